// Vectors of 512 bits with VNNI for the products: what AVX-512 and AMX share. See gemm_tiles.h for what is asked of them.
#include "gemm.h"

#include <immintrin.h>
#include <string.h>

namespace attested {
namespace {

struct Simd {
    using Ints = __m512i;
    using Floats = __m512;
    static constexpr int kLanes = 16;
    static constexpr bool kSigned = false;

    static Ints all(int value) { return _mm512_set1_epi32(value); }
    static Floats each(float value) { return _mm512_set1_ps(value); }
    static Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
    static Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
    static Ints differ(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
    static Ints more(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
    static Ints less(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
    static Ints less_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
    template <int n> static Ints right(Ints a) { return _mm512_srli_epi16(a, n); }
    template <int n> static Ints left(Ints a) { return _mm512_slli_epi16(a, n); }
    template <int n> static Ints right32(Ints a) { return _mm512_srli_epi32(a, n); }
    template <int n> static Ints left32(Ints a) { return _mm512_slli_epi32(a, n); }
    template <int n> static Ints signed_right32(Ints a) { return _mm512_srai_epi32(a, n); }

    static Floats floats(Ints a) { return _mm512_cvtepi32_ps(a); }
    static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats minus_fma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static Floats low_half(Ints a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
    static Floats high_half(Ints a) { return low_half(right32<16>(a)); }
    static void store(float * to, Floats value, int rows) { _mm512_mask_storeu_ps(to, (__mmask16) ((1u << rows) - 1), value); }
    static void prefetch(const void * at) { _mm_prefetch((const char *) at, _MM_HINT_T1); }

    // 16 bytes of each row, as four vectors of one dword a row.
    static Ints four_rows(const uint8_t * at, size_t stride) {
        Ints rows = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *) at));
        rows = _mm512_inserti32x4(rows, _mm_loadu_si128((const __m128i *) (at + 4 * stride)), 1);
        rows = _mm512_inserti32x4(rows, _mm_loadu_si128((const __m128i *) (at + 8 * stride)), 2);
        return _mm512_inserti32x4(rows, _mm_loadu_si128((const __m128i *) (at + 12 * stride)), 3);
    }
    static void columns(const uint8_t * at, size_t stride, Ints * out) {
        const Ints a = four_rows(at, stride), b = four_rows(at + stride, stride);
        const Ints c = four_rows(at + 2 * stride, stride), d = four_rows(at + 3 * stride, stride);
        const Ints ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
        const Ints ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
        out[0] = _mm512_unpacklo_epi64(ab, cd);
        out[1] = _mm512_unpackhi_epi64(ab, cd);
        out[2] = _mm512_unpacklo_epi64(ab2, cd2);
        out[3] = _mm512_unpackhi_epi64(ab2, cd2);
    }
    // The first two of them.
    static void heads(const uint8_t * at, size_t stride, Ints * out) {
        const Ints ab = _mm512_unpacklo_epi32(four_rows(at, stride), four_rows(at + stride, stride));
        const Ints cd = _mm512_unpacklo_epi32(four_rows(at + 2 * stride, stride), four_rows(at + 3 * stride, stride));
        out[0] = _mm512_unpacklo_epi64(ab, cd);
        out[1] = _mm512_unpackhi_epi64(ab, cd);
    }
    // Puts bit 4 * j + i of each lane above the four bits of byte i of codes[j].
    static void fifth_bits(Ints high, Ints * codes) {
        const Ints first = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
        for (int j = 0; j < 8; ++j) {
            const Ints bytes = _mm512_shuffle_epi8(high, _mm512_add_epi8(first, _mm512_set1_epi8((char) (j / 2))));
            const __mmask64 set = _mm512_test_epi8_mask(bytes, all(j % 2 ? (int) 0x80402010 : 0x08040201));
            codes[j] = _mm512_mask_add_epi8(codes[j], set, codes[j], all(0x10101010));
        }
    }
    static Ints nonlinear(Ints index) {
        const __m128i values = _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, -127, -115, -103, -90, -75, -59, -39, -15);
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), index);
    }
    // Four activations in each lane.
    static Ints four(const int8_t * x) {
        int value;
        memcpy(&value, x, sizeof(value));
        return all(value);
    }

    // Where the sum under one scale fits into 16 bits, it is multiplied as the lower one of two such.
    template <Format F> static constexpr bool kShort = F == Format::q2_k || F == Format::q3_k || F == Format::q4_k;

    template <Format F> static Ints multiplier(Ints value) { return kShort<F> ? both(value, all(0xffff)) : value; }
    static Ints pairs(Ints sum, Ints a, Ints b) { return _mm512_dpwssd_epi32(sum, a, b); }

    template <int count> static Ints products(const Ints * codes, const int8_t * x, Ints sum) {
        for (int j = 0; j < count; ++j) {
            sum = _mm512_dpbusd_epi32(sum, codes[j], four(x + 4 * j));
        }
        return sum;
    }
    template <int range> static Ints dot(const Ints * codes, const int8_t * x, Ints sum) { return products<8>(codes, x, sum); }
    template <Format F> static Ints scaled(const Ints * codes, Ints first, Ints second, const int8_t * x, Ints sum) {
        if (F == Format::q5_k) {
            return more(sum, _mm512_mullo_epi32(products<8>(codes, x, all(0)), first));
        }
        const Ints low = products<4>(codes, x, all(0)), high = products<4>(codes + 4, x + 16, all(0));
        if (kShort<F>) {
            return pairs(pairs(sum, low, first), high, second);
        }
        return more(sum, more(_mm512_mullo_epi32(low, first), _mm512_mullo_epi32(high, second)));
    }
};

} // namespace
} // namespace attested
