// Sixteen floats in two vectors of 256 bits. Counterpart of vec16_avx512.h: the same functions, the same bits.
// For files of one variant: everything is in an anonymous namespace, and nothing of the C++ library is used.
#pragma once

#include <cstdint>

#include <immintrin.h>

namespace {

#define VEC16_INLINE inline __attribute__((always_inline))

struct Vec16 {
    __m256 low, high;
};

constexpr bool kWide = false;

VEC16_INLINE Vec16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
VEC16_INLINE Vec16 all16(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
VEC16_INLINE Vec16 load16(const float * from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
VEC16_INLINE Vec16 load16(const uint16_t * halves) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) halves)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (halves + 8)))};
}
struct Bf16 {
    uint16_t bits;
};
VEC16_INLINE Vec16 load16(const Bf16 * from) {
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) from));
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) (from + 8)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
VEC16_INLINE void store16(float * to, Vec16 a) {
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps(to + 8, a.high);
}
VEC16_INLINE Vec16 operator+(Vec16 a, Vec16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
VEC16_INLINE Vec16 operator-(Vec16 a, Vec16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
VEC16_INLINE Vec16 operator*(Vec16 a, Vec16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
VEC16_INLINE Vec16 operator/(Vec16 a, Vec16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
VEC16_INLINE Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
VEC16_INLINE Vec16 max16(Vec16 a, Vec16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }

// The bits of `a` plus those of `steps`, shifted into the place of the exponent.
VEC16_INLINE Vec16 add_exponent16(Vec16 a, Vec16 steps) {
    const __m256i low = _mm256_slli_epi32(_mm256_castps_si256(steps.low), 23);
    const __m256i high = _mm256_slli_epi32(_mm256_castps_si256(steps.high), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.low), low)),
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.high), high))};
}
// `a`, and zero where x < limit.
VEC16_INLINE Vec16 unless_below16(Vec16 a, Vec16 x, float limit) {
    const __m256 least = _mm256_set1_ps(limit);
    return {_mm256_and_ps(a.low, _mm256_cmp_ps(x.low, least, _CMP_NLT_UQ)), _mm256_and_ps(a.high, _mm256_cmp_ps(x.high, least, _CMP_NLT_UQ))};
}
// `a` with the sign of `sign` beside its own (xor).
VEC16_INLINE Vec16 with_sign16(Vec16 a, Vec16 sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(a.low, _mm256_and_ps(sign.low, bit)), _mm256_xor_ps(a.high, _mm256_and_ps(sign.high, bit))};
}

// The trees of four vectors, first half: lanes l and l + 8, then l and l + 4. Four sums each are left, those of `a` first.
VEC16_INLINE Vec16 reduce4(Vec16 a, Vec16 b, Vec16 c, Vec16 d) {
    const __m256 a8 = _mm256_add_ps(a.low, a.high), b8 = _mm256_add_ps(b.low, b.high);
    const __m256 c8 = _mm256_add_ps(c.low, c.high), d8 = _mm256_add_ps(d.low, d.high);
    return {_mm256_add_ps(_mm256_permute2f128_ps(a8, b8, 0x20), _mm256_permute2f128_ps(a8, b8, 0x31)),
            _mm256_add_ps(_mm256_permute2f128_ps(c8, d8, 0x20), _mm256_permute2f128_ps(c8, d8, 0x31))};
}
VEC16_INLINE __m256 join(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 ab = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
    const __m256 cd = _mm256_add_ps(_mm256_shuffle_ps(c, d, 0x44), _mm256_shuffle_ps(c, d, 0xEE));
    return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xDD));
}
// Second half: l and l + 2, then l and l + 1. Of what reduce4 made of vectors (j, j + 4, j + 8, j + 12), for j = 0..3: in order.
VEC16_INLINE Vec16 reduce16(Vec16 a, Vec16 b, Vec16 c, Vec16 d) {
    return {join(a.low, b.low, c.low, d.low), join(a.high, b.high, c.high, d.high)};
}

} // namespace
