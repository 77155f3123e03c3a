// The definition of attention.h in plain loops, one row at a time: what the other variants are tested against.
#include "attention.h"

#include <cmath>
#include <cstring>

#include <immintrin.h>

namespace attested {
namespace {

float rows_total(const float * lanes16) {
    float lanes[16];
    memcpy(lanes, lanes16, sizeof(lanes));
    for (int w = 8; w; w /= 2) {
        for (int i = 0; i < w; ++i) {
            lanes[i] += lanes[i + w];
        }
    }
    return lanes[0];
}

float plus_exponent(float value, float steps) {
    uint32_t a, b;
    memcpy(&a, &value, 4);
    memcpy(&b, &steps, 4);
    a += b << 23;
    memcpy(&value, &a, 4);
    return value;
}

// exp16 and tanh16 of functions_simd.h.
float exp_one(float x) {
    static const float kCoefficients[] = {
        1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    if (x < -87.0f) {
        return 0.0f;
    }
    const float steps = __builtin_fmaf(x, 0x1.715476p+0f, 12582912.0f), n = steps - 12582912.0f;
    const float r = __builtin_fmaf(n, -0x1.7f7d1cp-20f, __builtin_fmaf(n, -0x1.62e4p-1f, x));
    float sum = kCoefficients[0];
    for (int i = 1; i < 6; ++i) {
        sum = __builtin_fmaf(sum, r, kCoefficients[i]);
    }
    return plus_exponent(__builtin_fmaf(sum, r * r, r) + 1.0f, steps);
}

float tanh_one(float x) {
    const float e = exp_one(-2.0f * __builtin_fabsf(x));
    return __builtin_copysignf((1.0f - e) / (1.0f + e), x);
}

float element(const Rows & rows, Element type, ToFloat to_float, int64_t batch, int64_t head, int64_t row, int64_t at, int64_t size) {
    const char * data = rows.data + batch * rows.batch + head * rows.head + row * rows.row;
    if (type == Element::f32) {
        return ((const float *) data)[at];
    }
    if (type == Element::f16) {
        return _cvtsh_ss(((const uint16_t *) data)[at]);
    }
    float values[4096];
    to_float(data, values, size);
    return values[at];
}

struct Row {
    int64_t batch, kv_head, head, query;
};

int64_t own_cells(const Attention & work, const Row & row, int32_t * cells) {
    int64_t count = 0;
    for (int64_t c = 0; c < work.n_cells; ++c) {
        if (!work.mask.data || element(work.mask, Element::f16, nullptr, row.batch % work.mask_batches, row.head % work.mask_heads,
                                       row.query, c, 0) != -INFINITY) {
            cells[count++] = (int32_t) c;
        }
    }
    return count;
}

float score(const Attention & work, const Row & row, int32_t cell) {
    float lanes[16] = {0};
    for (int64_t k = 0; k < work.key_size; ++k) {
        const float query = element(work.queries, Element::f32, nullptr, row.batch, row.head, row.query, k, 0);
        const float key = element(work.keys, work.key, work.keys_to_float, row.batch, row.kv_head, cell, k, work.key_size);
        lanes[k % 16] = __builtin_fmaf(query, key, lanes[k % 16]);
    }
    float result = rows_total(lanes);
    if (work.softcap != 0.0f) {
        result = work.softcap * tanh_one(result * (work.scale / work.softcap));
    } else {
        result = result * work.scale;
    }
    if (work.mask.data) {
        const float bias = element(work.mask, Element::f16, nullptr, row.batch % work.mask_batches, row.head % work.mask_heads, row.query, cell, 0);
        result = result + slope(work, row.head) * bias;
    }
    return result;
}

void attend(const Attention & work, const Row & row, const Workspace & memory) {
    float * out = work.out + ((row.batch * work.n_queries + row.query) * work.n_heads + row.head) * work.value_size;
    const int64_t own = own_cells(work, row, memory.cells);
    float limit = work.sinks ? work.sinks[row.head] : -INFINITY;
    for (int64_t i = 0; i < own; ++i) {
        memory.scores[i] = score(work, row, memory.cells[i]);
        limit = memory.scores[i] > limit ? memory.scores[i] : limit;
    }
    float lanes[16] = {0};
    for (int64_t i = 0; i < own; ++i) {
        memory.scores[i] = limit == -INFINITY ? 0.0f : exp_one(memory.scores[i] - limit);
        lanes[i % 16] += memory.scores[i];
    }
    float sum = rows_total(lanes);
    if (work.sinks && limit != -INFINITY) {
        sum += exp_one(work.sinks[row.head] - limit);
    }
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int64_t d = 0; d < work.value_size; ++d) {
        float result = 0.0f;
        for (int64_t i = 0; i < own; ++i) {
            const float value = element(
                work.values, work.value, work.values_to_float, row.batch, row.kv_head, memory.cells[i], d, work.value_size);
            result = __builtin_fmaf(memory.scores[i], value, result);
        }
        out[d] = result * factor + 0.0f;
    }
}

} // namespace

void attention_plain(const Attention & work, const Unit & unit, const Workspace & memory) {
    for (int64_t q = unit.first_query; q < unit.first_query + unit.queries; ++q) {
        for (int64_t h = unit.first_head; h < unit.first_head + unit.heads; ++h) {
            attend(work, {unit.batch, unit.kv_head, h, q}, memory);
        }
    }
}

} // namespace attested
