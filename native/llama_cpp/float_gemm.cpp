// Which of ggml's products of floats are taken, how activations are rounded and how threads share the rows of weights.
#include "float_gemm.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include <immintrin.h>

#include "variants.h"

namespace attested {
namespace {

bool type_of(ggml_type type, FloatType & found) {
    switch (type) {
        case GGML_TYPE_F32: found = FloatType::f32; return true;
        case GGML_TYPE_F16: found = FloatType::f16; return true;
        case GGML_TYPE_BF16: found = FloatType::bf16; return true;
        default: return false;
    }
}

bool handled(const ggml_tensor * out, FloatType & type) {
    const ggml_tensor * weights = out->src[0], * inputs = out->src[1];
    return out->op == GGML_OP_MUL_MAT && type_of(weights->type, type) && inputs->type == GGML_TYPE_F32 && out->type == GGML_TYPE_F32 &&
           weights->nb[0] == ggml_type_size(weights->type) && inputs->nb[0] == sizeof(float) && out->nb[0] == sizeof(float) &&
           inputs->ne[2] % weights->ne[2] == 0 && inputs->ne[3] % weights->ne[3] == 0;
}

// To the weights' type and back: to the nearest, ties to even.
float rounded(float value, FloatType type) {
    if (type == FloatType::f16) {
        return _cvtsh_ss(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
    }
    if (type == FloatType::bf16) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        const bool none = (bits & 0x7fffffff) > 0x7f800000;
        bits = none ? (bits | 0x400000) & 0xffff0000 : (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
        memcpy(&value, &bits, sizeof(bits));
    }
    return value;
}

void round_row(const float * from, float * to, int64_t columns, FloatType type) {
    for (int64_t k = 0; k < columns; ++k) {
        to[k] = rounded(from[k], type);
    }
    memset(to + columns, 0, (float_columns(columns) - columns) * sizeof(float));
}

void multiply(const FloatProduct & product, Variant variant) {
    switch (variant) {
        case Variant::plain: return float_gemm_plain(product);
        case Variant::avx2:
        case Variant::avxvnni: return float_gemm_avx2(product);
        case Variant::avx512:
        case Variant::amx: return float_gemm_avx512(product);
    }
}

} // namespace

size_t float_matmul_bytes(const ggml_tensor * out) {
    FloatType type;
    if (!handled(out, type)) {
        return 0;
    }
    return float_columns(out->src[1]->ne[0]) * ggml_nrows(out->src[1]) * sizeof(float);
}

bool float_matmul(const ggml_compute_params * params, ggml_tensor * out) {
    FloatType type;
    if (!handled(out, type)) {
        return false;
    }
    const ggml_tensor * weights = out->src[0], * inputs = out->src[1];
    GGML_ASSERT(params->wsize >= float_matmul_bytes(out));
    const int64_t columns = inputs->ne[0], tokens = inputs->ne[1], matrices = inputs->ne[2] * inputs->ne[3];
    auto * memory = (float *) params->wdata;
    for (int64_t row = params->ith; row < tokens * matrices; row += params->nth) {
        const int64_t token = row % tokens, i2 = row / tokens % inputs->ne[2], i3 = row / tokens / inputs->ne[2];
        const char * from = (const char *) inputs->data + token * inputs->nb[1] + i2 * inputs->nb[2] + i3 * inputs->nb[3];
        round_row((const float *) from, memory + row * float_columns(columns), columns, type);
    }
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    const int64_t rows = weights->ne[1];
    const int64_t piece = params->nth == 1 ? rows : std::clamp<int64_t>(rows / (4 * params->nth) / 16 * 16, 16, 1024);
    const int64_t pieces = (rows + piece - 1) / piece;
    for (int64_t at = params->ith; at < pieces * matrices; at = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t row = at % pieces * piece, index = at / pieces, i2 = index % inputs->ne[2], i3 = index / inputs->ne[2];
        const char * from = (const char *) weights->data + row * weights->nb[1];
        from += i2 / (inputs->ne[2] / weights->ne[2]) * weights->nb[2] + i3 / (inputs->ne[3] / weights->ne[3]) * weights->nb[3];
        float * to = (float *) ((char *) out->data + i2 * out->nb[2] + i3 * out->nb[3]) + row;
        multiply({type, from, weights->nb[1], std::min(piece, rows - row), columns, memory + index * tokens * float_columns(columns), tokens,
                  to, out->nb[1] / sizeof(float)}, variant());
    }
    return true;
}

} // namespace attested

extern "C" {

// One product with the variant of that name, for tests: rows of weights of ggml's type and activations without gaps;
// out[token * rows + row]. False where this processor has no such variant, or the type is another.
GGML_BACKEND_API bool attested_float_gemm(
    const char * variant, int type, int64_t columns, const void * weights, int64_t rows, const float * inputs, int64_t tokens, float * out);
bool attested_float_gemm(
    const char * variant, int type, int64_t columns, const void * weights, int64_t rows, const float * inputs, int64_t tokens, float * out) {
    attested::FloatType of;
    attested::Variant wanted;
    if (!attested::type_of((ggml_type) type, of) || !attested::named(variant, wanted)) {
        return false;
    }
    const int64_t stride = attested::float_columns(columns);
    auto * rounded = (float *) aligned_alloc(64, tokens * stride * sizeof(float));
    GGML_ASSERT(rounded && "no memory for activations");
    for (int64_t token = 0; token < tokens; ++token) {
        attested::round_row(inputs + token * columns, rounded + token * stride, columns, of);
    }
    const size_t row_bytes = columns * ggml_type_size((ggml_type) type);
    attested::multiply({of, (const char *) weights, row_bytes, rows, columns, rounded, tokens, out, (size_t) rows}, wanted);
    free(rounded);
    return true;
}

} // extern "C"
