// Tiles of weights and tokens, sixteen columns at a time. Included after vec16_avx2.h or vec16_avx512.h.
#pragma once

#include "float_gemm.h"

#include <cstring>

namespace {

using namespace attested;

constexpr int kTokens = kWide ? 4 : 2;    // that meet the weights together
constexpr int kRows = kWide ? 4 : 2;      // of weights that meet them
constexpr int64_t kTokenBlock = 32;       // tokens that stay in the cache while all rows pass

// Sums of NR rows with NX tokens: of row i and token x at [4 * (n % 4) + n / 4], n = x * NR + i.
template <class T, int NR, int NX>
VEC16_INLINE void sums_of(const T * const * weights, const float * inputs, int64_t columns, float * sums) {
    const int64_t stride = float_columns(columns);
    Vec16 lanes[NR * NX];
    for (int n = 0; n < NR * NX; ++n) {
        lanes[n] = zero16();
    }
    int64_t k = 0;
    for (; k + 16 <= columns; k += 16) {
        Vec16 input[NX];
        for (int x = 0; x < NX; ++x) {
            input[x] = load16(inputs + x * stride + k);
        }
        for (int i = 0; i < NR; ++i) {
            const Vec16 weight = load16(weights[i] + k);
            for (int x = 0; x < NX; ++x) {
                lanes[x * NR + i] = fma16(weight, input[x], lanes[x * NR + i]);
            }
        }
    }
    if (k < columns) { // nothing behind a row is read
        for (int i = 0; i < NR; ++i) {
            T rest[16];
            memset(rest, 0, sizeof(rest));
            memcpy(rest, weights[i] + k, (columns - k) * sizeof(T));
            const Vec16 weight = load16(rest);
            for (int x = 0; x < NX; ++x) {
                lanes[x * NR + i] = fma16(weight, load16(inputs + x * stride + k), lanes[x * NR + i]);
            }
        }
    }
    Vec16 groups[4];
    for (int g = 0; g < 4; ++g) {
        const Vec16 * four = lanes + (4 * g < NR * NX ? 4 * g : 0);
        groups[g] = reduce4(four[0], four[1], four[2], four[3]);
    }
    store16(sums, reduce16(groups[0], groups[1], groups[2], groups[3]));
}

template <class T, int NR, int NX> void tile(const FloatProduct & product, int64_t token) {
    const float * inputs = product.inputs + token * float_columns(product.columns);
    for (int64_t row = 0; row < product.rows; row += NR) {
        const T * weights[NR];
        const int64_t left = product.rows - row, count = left < NR ? left : NR;
        for (int i = 0; i < NR; ++i) {
            weights[i] = (const T *) (product.weights + (row + (i < count ? i : count - 1)) * product.stride);
        }
        float sums[16];
        sums_of<T, NR, NX>(weights, inputs, product.columns, sums);
        for (int x = 0; x < NX; ++x) {
            for (int i = 0; i < count; ++i) {
                const int n = x * NR + i;
                product.out[(token + x) * product.out_stride + row + i] = sums[4 * (n % 4) + n / 4];
            }
        }
    }
}

template <class T> void block(const FloatProduct & product) {
    int64_t token = 0;
    for (; token + kTokens <= product.tokens; token += kTokens) {
        tile<T, kRows, kTokens>(product, token);
    }
    for (; token < product.tokens; ++token) {
        tile<T, 4, 1>(product, token);
    }
}

template <class T> void of_type(FloatProduct product) {
    const FloatProduct whole = product;
    const int64_t some = 64; // rows that stay in the cache while a block of tokens passes
    for (int64_t token = 0; token < whole.tokens; token += kTokenBlock) {
        for (int64_t row = 0; row < whole.rows; row += some) {
            product.weights = whole.weights + row * whole.stride;
            product.rows = whole.rows - row < some ? whole.rows - row : some;
            product.inputs = whole.inputs + token * float_columns(whole.columns);
            product.tokens = whole.tokens - token < kTokenBlock ? whole.tokens - token : kTokenBlock;
            product.out = whole.out + token * whole.out_stride + row;
            block<T>(product);
        }
    }
}

void multiply(const FloatProduct & product) {
    switch (product.type) {
        case FloatType::f32: return of_type<float>(product);
        case FloatType::f16: return of_type<uint16_t>(product);
        case FloatType::bf16: return of_type<Bf16>(product);
    }
}

} // namespace
