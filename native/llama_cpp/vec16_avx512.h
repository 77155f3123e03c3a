// Sixteen floats in one vector of 512 bits. Counterpart of vec16_avx2.h: the same functions, the same bits.
// For files of one variant: everything is in an anonymous namespace, and nothing of the C++ library is used.
#pragma once

#include <cstdint>

#include <immintrin.h>

// GCC 12 takes its own header's undefined vectors for a mistake of the caller.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace {

#define VEC16_INLINE inline __attribute__((always_inline))

struct Vec16 {
    __m512 all;
};

constexpr bool kWide = true;

VEC16_INLINE Vec16 zero16() { return {_mm512_setzero_ps()}; }
VEC16_INLINE Vec16 all16(float value) { return {_mm512_set1_ps(value)}; }
VEC16_INLINE Vec16 load16(const float * from) { return {_mm512_loadu_ps(from)}; }
VEC16_INLINE Vec16 load16(const uint16_t * halves) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) halves))}; }
struct Bf16 {
    uint16_t bits;
};
VEC16_INLINE Vec16 load16(const Bf16 * from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
VEC16_INLINE void store16(float * to, Vec16 a) { _mm512_storeu_ps(to, a.all); }
VEC16_INLINE Vec16 operator+(Vec16 a, Vec16 b) { return {_mm512_add_ps(a.all, b.all)}; }
VEC16_INLINE Vec16 operator-(Vec16 a, Vec16 b) { return {_mm512_sub_ps(a.all, b.all)}; }
VEC16_INLINE Vec16 operator*(Vec16 a, Vec16 b) { return {_mm512_mul_ps(a.all, b.all)}; }
VEC16_INLINE Vec16 operator/(Vec16 a, Vec16 b) { return {_mm512_div_ps(a.all, b.all)}; }
VEC16_INLINE Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
VEC16_INLINE Vec16 max16(Vec16 a, Vec16 b) { return {_mm512_max_ps(a.all, b.all)}; }

// The bits of `a` plus those of `steps`, shifted into the place of the exponent.
VEC16_INLINE Vec16 add_exponent16(Vec16 a, Vec16 steps) {
    const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(steps.all), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.all), shifted))};
}
// `a`, and zero where x < limit.
VEC16_INLINE Vec16 unless_below16(Vec16 a, Vec16 x, float limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.all, _mm512_set1_ps(limit), _CMP_NLT_UQ), a.all)};
}
// `a` with the sign of `sign` beside its own (xor).
VEC16_INLINE Vec16 with_sign16(Vec16 a, Vec16 sign) {
    return {_mm512_xor_ps(a.all, _mm512_and_ps(sign.all, _mm512_set1_ps(-0.0f)))};
}

// The trees of four vectors, first half: lanes l and l + 8, then l and l + 4. Four sums each are left, those of `a` first.
VEC16_INLINE Vec16 reduce4(Vec16 a, Vec16 b, Vec16 c, Vec16 d) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.all, b.all, 0x44), _mm512_shuffle_f32x4(a.all, b.all, 0xEE));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.all, d.all, 0x44), _mm512_shuffle_f32x4(c.all, d.all, 0xEE));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD))};
}
// Second half: l and l + 2, then l and l + 1. Of what reduce4 made of vectors (j, j + 4, j + 8, j + 12), for j = 0..3: in order.
VEC16_INLINE Vec16 reduce16(Vec16 a, Vec16 b, Vec16 c, Vec16 d) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_ps(a.all, b.all, 0x44), _mm512_shuffle_ps(a.all, b.all, 0xEE));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_ps(c.all, d.all, 0x44), _mm512_shuffle_ps(c.all, d.all, 0xEE));
    return {_mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xDD))};
}

} // namespace
