// The definition of float_gemm.h in plain loops: what the other variants are tested against.
#include "float_gemm.h"

#include <cstring>

#include <immintrin.h>

namespace attested {
namespace {

float weight(const FloatProduct & product, int64_t row, int64_t column) {
    const char * data = product.weights + row * product.stride;
    if (product.type == FloatType::f32) {
        return ((const float *) data)[column];
    }
    const uint16_t bits = ((const uint16_t *) data)[column];
    if (product.type == FloatType::f16) {
        return _cvtsh_ss(bits);
    }
    const uint32_t wide = (uint32_t) bits << 16;
    float value;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

} // namespace

void float_gemm_plain(const FloatProduct & product) {
    for (int64_t token = 0; token < product.tokens; ++token) {
        const float * inputs = product.inputs + token * float_columns(product.columns);
        for (int64_t row = 0; row < product.rows; ++row) {
            float lanes[16] = {0};
            for (int64_t k = 0; k < product.columns; ++k) {
                lanes[k % 16] = __builtin_fmaf(weight(product, row, k), inputs[k], lanes[k % 16]);
            }
            for (int w = 8; w; w /= 2) {
                for (int i = 0; i < w; ++i) {
                    lanes[i] += lanes[i + w];
                }
            }
            product.out[token * product.out_stride + row] = lanes[0];
        }
    }
}

} // namespace attested
