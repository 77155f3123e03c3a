// Puts the attention of attention.h in front of ggml's: takes the tensors apart, shares the work among the threads and sees to
// the work memory. What is not handled goes ggml's own way, the one of them that neither splits sums nor tiles.
#include "attention.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "variants.h"

namespace attested {
namespace {

constexpr int64_t kScores = 256 << 10; // floats that a thread keeps of a tile, or one row's

Rows rows_of(const ggml_tensor * tensor) { return {(const char *) tensor->data, tensor->nb[1], tensor->nb[2], tensor->nb[3]}; }

void copy(const void * from, float * to, int64_t count) { memcpy(to, from, count * sizeof(float)); }

// Sizes that are no multiple of sixteen are copied to where they can be filled up with zeros.
void choose(const ggml_tensor * tensor, Element & element, ToFloat & to_float) {
    const bool whole = tensor->ne[0] % 16 == 0;
    to_float = tensor->type == GGML_TYPE_F32 ? copy : (ToFloat) ggml_get_type_traits(tensor->type)->to_float;
    element = whole && tensor->type == GGML_TYPE_F32 ? Element::f32 : whole && tensor->type == GGML_TYPE_F16 ? Element::f16 : Element::other;
}

bool handled(const ggml_tensor * out) {
    const ggml_tensor * q = out->src[0], * k = out->src[1], * v = out->src[2], * mask = out->src[3], * sinks = out->src[4];
    const auto readable = [](const ggml_tensor * t) {
        return t->nb[0] == ggml_type_size(t->type) && (t->type == GGML_TYPE_F32 || ggml_get_type_traits(t->type)->to_float);
    };
    return q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && readable(k) && readable(v) && k->ne[0] <= 1024 && v->ne[0] <= 1024 &&
           k->ne[2] == v->ne[2] && k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] && q->ne[2] % k->ne[2] == 0 && k->ne[1] < INT32_MAX &&
           (!mask || (mask->type == GGML_TYPE_F16 && mask->nb[0] == 2 && mask->ne[0] >= k->ne[1] && mask->ne[1] >= q->ne[1])) &&
           (!sinks || sinks->type == GGML_TYPE_F32) && ggml_is_contiguous(out);
}

Attention attention_of(const ggml_tensor * out) {
    const ggml_tensor * q = out->src[0], * k = out->src[1], * v = out->src[2], * mask = out->src[3];
    Attention work = {};
    work.queries = rows_of(q);
    work.keys = rows_of(k);
    work.values = rows_of(v);
    choose(k, work.key, work.keys_to_float);
    choose(v, work.value, work.values_to_float);
    work.mask_heads = work.mask_batches = 1;
    if (mask) {
        work.mask = rows_of(mask);
        work.mask_heads = mask->ne[2];
        work.mask_batches = mask->ne[3];
    }
    work.sinks = out->src[4] ? (const float *) out->src[4]->data : nullptr;
    work.out = (float *) out->data;
    work.key_size = k->ne[0];
    work.value_size = v->ne[0];
    work.n_queries = q->ne[1];
    work.n_heads = q->ne[2];
    work.n_kv_heads = k->ne[2];
    work.n_batches = q->ne[3];
    work.n_cells = k->ne[1];
    memcpy(&work.scale, (const float *) out->op_params + 0, sizeof(float));
    memcpy(&work.max_bias, (const float *) out->op_params + 1, sizeof(float));
    memcpy(&work.softcap, (const float *) out->op_params + 2, sizeof(float));
    return work;
}

// Heads that can be computed together: those of a kv head, unless each has a mask of its own.
int64_t group(const Attention & work) {
    return work.mask_heads > 1 ? 1 : std::min<int64_t>(work.n_heads / work.n_kv_heads, kTileRows);
}

int64_t queries_of_tile(const Attention & work) { return std::clamp<int64_t>(kTileRows / group(work), 1, kTileQueries); }

// Hands out aligned parts of a thread's memory; of no memory: only counts.
struct Parts {
    char * memory;
    size_t used = 0;
    template <class T> void take(T *& part, int64_t count) {
        part = (T *) (memory + used);
        used += (count * sizeof(T) + 63) / 64 * 64;
    }
};

size_t lay_out(const Attention & work, char * memory, Workspace & space) {
    const int64_t rows = group(work) * queries_of_tile(work), keys = padded(work.key_size), values = padded(work.value_size);
    Parts parts{memory};
    space.scores_size = std::max(kScores, score_stride(work.n_cells));
    parts.take(space.bits, (work.n_cells + 63) / 64 * queries_of_tile(work));
    parts.take(space.cells, work.n_cells + 64);
    parts.take(space.segments, work.n_cells + 1);
    parts.take(space.queries, rows * keys);
    parts.take(space.keys, kKeyBlock * keys);
    parts.take(space.arranged, kKeyBlock * keys);
    parts.take(space.values, value_block(work.value_size) * values);
    parts.take(space.sums, rows * values);
    parts.take(space.scores, std::min(space.scores_size, rows * score_stride(work.n_cells)));
    return parts.used;
}

size_t thread_bytes(const Attention & work) {
    Workspace unused;
    return lay_out(work, nullptr, unused);
}

// Units of work in the order in which they are handed out. Where there are few, those that do not come out even among the
// threads are split into their heads.
struct Units {
    const Attention & work;
    int64_t heads, queries, tiles, groups, whole, parts;

    Units(const Attention & of, int64_t threads) : work(of), heads(group(of)), queries(queries_of_tile(of)) {
        tiles = (of.n_queries + queries - 1) / queries;
        groups = (of.n_heads / of.n_kv_heads + heads - 1) / heads;
        const int64_t all = tiles * groups * of.n_kv_heads * of.n_batches;
        whole = all < 4 * threads ? all / threads * threads : all;
        parts = whole == all ? 1 : std::min(heads, (threads + all - whole - 1) / (all - whole));
        count = whole + (all - whole) * parts;
    }
    int64_t count;

    Unit at(int64_t index) const {
        const int64_t part = index < whole ? 0 : (index - whole) % parts;
        const int64_t number = index < whole ? index : whole + (index - whole) / parts;
        const int64_t of_kv = work.n_heads / work.n_kv_heads;
        const int64_t first = number % groups * heads, some = std::min(heads, of_kv - first);
        const int64_t kv = number / groups % work.n_kv_heads, rest = number / groups / work.n_kv_heads;
        const int64_t query = rest % tiles * queries, split = index < whole ? 1 : parts;
        const int64_t begin = some * part / split, end = some * (part + 1) / split;
        return {rest / tiles, kv, kv * of_kv + first + begin, end - begin, query, std::min(queries, work.n_queries - query)};
    }
};

void compute_unit(const Attention & work, const Unit & unit, const Workspace & memory, Variant variant) {
    switch (variant) {
        case Variant::plain: return attention_plain(work, unit, memory);
        case Variant::avx2:
        case Variant::avxvnni: return attention_tiles(work, unit, memory, attention_avx2);
        case Variant::avx512:
        case Variant::amx: return attention_tiles(work, unit, memory, attention_avx512);
    }
}

void compute(const ggml_compute_params * params, const Attention & work) {
    const size_t bytes = thread_bytes(work);
    // Who computes a graph without a plan of our making gets memory for the time of this operation.
    const bool planned = params->wsize >= bytes * params->nth + 64;
    char * own = planned ? nullptr : (char *) aligned_alloc(64, bytes);
    GGML_ASSERT((planned || own) && "no memory for attention's scores");
    char * aligned = (char *) (((uintptr_t) params->wdata + 63) / 64 * 64);
    Workspace memory;
    lay_out(work, planned ? aligned + bytes * params->ith : own, memory);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    const Units units(work, params->nth);
    for (int64_t index = params->ith; index < units.count; index = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        compute_unit(work, units.at(index), memory, variant());
    }
    free(own);
}

} // namespace

// 2^(-max_bias * (h + 1) / n) for the first n heads, n the largest power of two that there are; the others lie between.
float slope(const Attention & work, int64_t head) {
    if (!(work.max_bias > 0.0f)) {
        return 1.0f;
    }
    int64_t n = 1;
    while (2 * n <= work.n_heads) {
        n *= 2;
    }
    const double steps = head < n ? (double) (head + 1) : (double) (2 * (head - n) + 1) / 2;
    const double exponent = -(double) work.max_bias * steps / (double) n;
    const int whole = (int) exponent;
    double power = 1.0, term = 1.0; // e^(x ln 2) for -1 < x <= 0, by its series
    for (int i = 1; i < 20; ++i) {
        term = term * (exponent - whole) * 0.69314718055994530942 / i;
        power = power + term;
    }
    for (int i = 0; i > whole; --i) {
        power = power / 2;
    }
    return (float) power;
}

} // namespace attested

extern "C" {

void __real_ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * out);
void __wrap_ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * out);

void __wrap_ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * out) {
    if (!params->use_ref && attested::handled(out)) {
        return attested::compute(params, attested::attention_of(out));
    }
    ggml_compute_params whole = *params;
    whole.use_ref = true;
    __real_ggml_compute_forward_flash_attn_ext(&whole, out);
}

ggml_cplan __real_ggml_graph_plan(const ggml_cgraph * graph, int n_threads, ggml_threadpool * threadpool);
ggml_cplan __wrap_ggml_graph_plan(const ggml_cgraph * graph, int n_threads, ggml_threadpool * threadpool);

// Has the backend reserve what attention needs beside what ggml's own operations do.
ggml_cplan __wrap_ggml_graph_plan(const ggml_cgraph * graph, int n_threads, ggml_threadpool * threadpool) {
    ggml_cplan plan = __real_ggml_graph_plan(graph, n_threads, threadpool);
    for (int i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        if (node->op == GGML_OP_FLASH_ATTN_EXT && attested::handled(node)) {
            const size_t bytes = attested::thread_bytes(attested::attention_of(node)) * plan.n_threads + 64;
            plan.work_size = std::max(plan.work_size, bytes);
        }
    }
    return plan;
}

// One attention with the variant of that name on this thread, for tests. False where this processor has no such variant.
GGML_BACKEND_API bool attested_attention(const char * variant, const attested::Attention * work);
bool attested_attention(const char * variant, const attested::Attention * work) {
    attested::Variant wanted;
    if (!attested::named(variant, wanted)) {
        return false;
    }
    char * bytes = (char *) aligned_alloc(64, attested::thread_bytes(*work));
    GGML_ASSERT(bytes && "no memory for attention's scores");
    attested::Workspace memory;
    attested::lay_out(*work, bytes, memory);
    const attested::Units units(*work, 1);
    for (int64_t index = 0; index < units.count; ++index) {
        attested::compute_unit(*work, units.at(index), memory, wanted);
    }
    free(bytes);
    return true;
}

} // extern "C"
