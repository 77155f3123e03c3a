// Where ggml's products come in: which ones are taken, how threads share them, and who computes.
//
// attested.cmake puts these functions in front of ggml's own of the same names with the linker's --wrap. ggml offers every
// product to ggml_compute_forward_mul_mat_tiled first. What is not taken here goes ggml's way row by row, whose order of
// additions does not depend on the batch; never to its tiled products, which round in another order.
#include "gemm.h"

#include "float_gemm.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "variants.h"

namespace attested {
namespace {

std::atomic<int64_t> products{0};

bool format_of(ggml_type type, Format & format) {
    switch (type) {
        case GGML_TYPE_Q4_0: format = Format::q4_0; return true;
        case GGML_TYPE_Q4_1: format = Format::q4_1; return true;
        case GGML_TYPE_Q5_0: format = Format::q5_0; return true;
        case GGML_TYPE_Q5_1: format = Format::q5_1; return true;
        case GGML_TYPE_Q8_0: format = Format::q8_0; return true;
        case GGML_TYPE_IQ4_NL: format = Format::iq4_nl; return true;
        case GGML_TYPE_Q2_K: format = Format::q2_k; return true;
        case GGML_TYPE_Q3_K: format = Format::q3_k; return true;
        case GGML_TYPE_Q4_K: format = Format::q4_k; return true;
        case GGML_TYPE_Q5_K: format = Format::q5_k; return true;
        case GGML_TYPE_Q6_K: format = Format::q6_k; return true;
        default: return false;
    }
}

Multiply kernel(Variant variant) {
    switch (variant) {
        case Variant::plain: return gemm_plain;
        case Variant::avx2: return gemm_avx2;
        case Variant::avxvnni: return gemm_avxvnni;
        case Variant::avx512: return gemm_avx512;
        case Variant::amx: return gemm_amx;
    }
    return gemm_plain;
}

bool handled(const ggml_tensor * out, Format & format) {
    const ggml_tensor * weights = out->src[0];
    const ggml_tensor * inputs = out->src[1];
    return out->op == GGML_OP_MUL_MAT && inputs->type == GGML_TYPE_F32 && out->type == GGML_TYPE_F32 && format_of(weights->type, format) &&
           weights->nb[0] == ggml_type_size(weights->type) && inputs->nb[0] == sizeof(float) && out->nb[0] == sizeof(float);
}

// Bytes of all activations of one matrix of them.
size_t inputs_bytes(const Traits & format, int64_t blocks, int64_t tokens) {
    const int slots = (int) std::min<int64_t>(tokens, kGroup);
    const int64_t groups = (tokens + kGroup - 1) / kGroup;
    return (size_t) (groups * blocks) * input_block_bytes(format.block, slots);
}

// Each thread turns its share of the blocks of every row of activations into eight bits a value.
void quantise_share(const ggml_compute_params * params, const Traits & format, const ggml_tensor * inputs) {
    const int64_t blocks = inputs->ne[0] / format.block, tokens = inputs->ne[1];
    const int slots = (int) std::min<int64_t>(tokens, kGroup);
    const size_t group = blocks * input_block_bytes(format.block, slots);
    const size_t matrix = inputs_bytes(format, blocks, tokens);
    const int64_t rows = tokens * inputs->ne[2] * inputs->ne[3];
    // Of a few rows each thread takes some blocks, of many some rows.
    const bool by_row = rows >= 4 * params->nth;
    const int64_t count = by_row ? rows : blocks;
    const int64_t begin = params->ith * count / params->nth, end = (params->ith + 1) * count / params->nth;
    for (int64_t row = by_row ? begin : 0; row < (by_row ? end : rows); ++row) {
        const int64_t token = row % tokens, i2 = row / tokens % inputs->ne[2], i3 = row / tokens / inputs->ne[2];
        const char * from = (const char *) inputs->data + token * inputs->nb[1] + i2 * inputs->nb[2] + i3 * inputs->nb[3];
        uint8_t * to = (uint8_t *) params->wdata + row / tokens * matrix + token / kGroup * group;
        quantise(format, (const float *) from, by_row ? 0 : begin, by_row ? blocks : end, to, slots, (int) (token % kGroup));
    }
}

// Rows of weights that a thread takes at a time: small enough that the threads end together.
int64_t piece_of(int64_t rows, int threads) {
    if (threads == 1) {
        return rows;
    }
    const int64_t share = rows / (4 * threads) / kGroup * kGroup;
    return std::clamp<int64_t>(share, kGroup, 1024);
}

void compute(const ggml_compute_params * params, Format format, ggml_tensor * out) {
    const ggml_tensor * weights = out->src[0];
    const ggml_tensor * inputs = out->src[1];
    const Traits & known = traits(format);
    const int64_t blocks = weights->ne[0] / known.block;
    const size_t matrix = inputs_bytes(known, blocks, inputs->ne[1]);
    const int64_t matrices = inputs->ne[2] * inputs->ne[3];
    GGML_ASSERT(params->wsize >= matrix * matrices);
    quantise_share(params, known, inputs);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
        products.fetch_add(1, std::memory_order_relaxed);
    }
    ggml_barrier(params->threadpool);
    const Multiply multiply = kernel(variant());
    const int64_t rows = weights->ne[1], piece = piece_of(rows, params->nth), pieces = (rows + piece - 1) / piece;
    for (int64_t at = params->ith; at < pieces * matrices; at = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t row = at % pieces * piece, index = at / pieces, i2 = index % inputs->ne[2], i3 = index / inputs->ne[2];
        const char * from = (const char *) weights->data + row * weights->nb[1];
        from += i2 / (inputs->ne[2] / weights->ne[2]) * weights->nb[2] + i3 / (inputs->ne[3] / weights->ne[3]) * weights->nb[3];
        float * to = (float *) ((char *) out->data + i2 * out->nb[2] + i3 * out->nb[3]) + row;
        multiply({format, (const uint8_t *) from, weights->nb[1], std::min(piece, rows - row), blocks,
                  (const uint8_t *) params->wdata + index * matrix, inputs->ne[1], to, out->nb[1] / sizeof(float)});
    }
}

bool kernel_named(const char * name, Multiply & found) {
    if (strcmp(name, "amx-int8-emulated") == 0 && available(Variant::avx512)) {
        found = gemm_amx_emulated;
        return true;
    }
    Variant variant;
    if (!named(name, variant)) {
        return false;
    }
    found = kernel(variant);
    return true;
}

} // namespace
} // namespace attested

extern "C" {

bool __wrap_ggml_compute_forward_mul_mat_tiled(const ggml_compute_params * params, ggml_tensor * out);
bool __wrap_ggml_compute_forward_mul_mat_tiled(const ggml_compute_params * params, ggml_tensor * out) {
    attested::Format format;
    if (!params->use_ref && attested::handled(out, format)) {
        attested::compute(params, format, out);
        return true;
    }
    return !params->use_ref && attested::float_matmul(params, out);
}

bool __wrap_ggml_compute_forward_mul_mat_id_tiled(
    const ggml_compute_params * params, ggml_tensor * out, int64_t expert, int64_t rows, const int32_t * pairs, char * scratch);
bool __wrap_ggml_compute_forward_mul_mat_id_tiled(
    const ggml_compute_params *, ggml_tensor *, int64_t, int64_t, const int32_t *, char *) {
    return false;
}

// Work memory that ggml reserves beside its own for activations. It asks for products of experts too, which need none.
size_t __wrap_ggml_tiled_wdata_size(int threads, ggml_tensor * out);
size_t __wrap_ggml_tiled_wdata_size(int, ggml_tensor * out) {
    attested::Format format;
    if (!attested::handled(out, format)) {
        return attested::float_matmul_bytes(out);
    }
    const ggml_tensor * inputs = out->src[1];
    const attested::Traits & known = attested::traits(format);
    return attested::inputs_bytes(known, inputs->ne[0] / known.block, inputs->ne[1]) * inputs->ne[2] * inputs->ne[3];
}

// Products computed by these kernels since the library was loaded: no result tells.
GGML_BACKEND_API int64_t attested_products(void);
int64_t attested_products(void) { return attested::products.load(std::memory_order_relaxed); }

// One product with the kernels of a variant, for tests: weights of ggml's type `type` in rows `stride` bytes apart, activations
// in rows without gaps; out[token * rows + row]. False where this processor has no such variant, or no variant that type.
GGML_BACKEND_API bool attested_gemm(const char * variant, int type, int64_t columns, const void * weights, size_t stride, int64_t rows,
                                    const float * inputs, int64_t tokens, float * out);
bool attested_gemm(const char * variant, int type, int64_t columns, const void * weights, size_t stride, int64_t rows,
                   const float * inputs, int64_t tokens, float * out) {
    attested::Format format;
    attested::Multiply multiply;
    if (!attested::format_of((ggml_type) type, format) || !attested::kernel_named(variant, multiply)) {
        return false;
    }
    const attested::Traits & known = attested::traits(format);
    const int64_t blocks = columns / known.block;
    const int slots = (int) std::min<int64_t>(tokens, attested::kGroup);
    std::vector<uint8_t> packed(attested::inputs_bytes(known, blocks, tokens));
    for (int64_t token = 0; token < tokens; ++token) {
        uint8_t * group = packed.data() + token / attested::kGroup * blocks * attested::input_block_bytes(known.block, slots);
        attested::quantise(known, inputs + token * columns, 0, blocks, group, slots, (int) (token % attested::kGroup));
    }
    multiply({format, (const uint8_t *) weights, stride, rows, blocks, packed.data(), tokens, out, (size_t) rows});
    return true;
}

} // extern "C"
