// Vectors of 256 bits for the products: what AVX2 and AVX-VNNI share. See gemm_tiles.h for what is asked of them.
#include "gemm.h"

#include <immintrin.h>
#include <string.h>

namespace attested {
namespace {

struct Simd256 {
    using Ints = __m256i;
    using Floats = __m256;
    static constexpr int kLanes = 8;

    static Ints all(int value) { return _mm256_set1_epi32(value); }
    static Floats each(float value) { return _mm256_set1_ps(value); }
    static Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
    static Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
    static Ints differ(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
    static Ints more(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
    static Ints less(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
    static Ints less_bytes(Ints a, Ints b) { return _mm256_sub_epi8(a, b); }
    template <int n> static Ints right(Ints a) { return _mm256_srli_epi16(a, n); }
    template <int n> static Ints left(Ints a) { return _mm256_slli_epi16(a, n); }
    template <int n> static Ints right32(Ints a) { return _mm256_srli_epi32(a, n); }
    template <int n> static Ints left32(Ints a) { return _mm256_slli_epi32(a, n); }
    template <int n> static Ints signed_right32(Ints a) { return _mm256_srai_epi32(a, n); }

    static Floats floats(Ints a) { return _mm256_cvtepi32_ps(a); }
    static Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats minus_fma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
    static Floats low_half(Ints a) {
        const Ints words = _mm256_packus_epi32(both(a, all(0xffff)), _mm256_setzero_si256());
        return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08)));
    }
    static Floats high_half(Ints a) { return low_half(right32<16>(a)); }
    static void store(float * to, Floats value, int rows) {
        if (rows == kLanes) {
            _mm256_storeu_ps(to, value);
        } else {
            alignas(32) float lanes[kLanes];
            _mm256_store_ps(lanes, value);
            memcpy(to, lanes, rows * sizeof(float));
        }
    }
    static void prefetch(const void * at) { _mm_prefetch((const char *) at, _MM_HINT_T1); }

    // 16 bytes of each row, as four vectors of one dword a row.
    static Ints two(const uint8_t * at, size_t stride) {
        const __m128i low = _mm_loadu_si128((const __m128i *) at);
        return _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_loadu_si128((const __m128i *) (at + 4 * stride)), 1);
    }
    static void columns(const uint8_t * at, size_t stride, Ints * out) {
        const Ints a = two(at, stride), b = two(at + stride, stride);
        const Ints c = two(at + 2 * stride, stride), d = two(at + 3 * stride, stride);
        const Ints ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
        const Ints ab2 = _mm256_unpackhi_epi32(a, b), cd2 = _mm256_unpackhi_epi32(c, d);
        out[0] = _mm256_unpacklo_epi64(ab, cd);
        out[1] = _mm256_unpackhi_epi64(ab, cd);
        out[2] = _mm256_unpacklo_epi64(ab2, cd2);
        out[3] = _mm256_unpackhi_epi64(ab2, cd2);
    }
    // The first two of them.
    static void heads(const uint8_t * at, size_t stride, Ints * out) {
        const Ints ab = _mm256_unpacklo_epi32(two(at, stride), two(at + stride, stride));
        const Ints cd = _mm256_unpacklo_epi32(two(at + 2 * stride, stride), two(at + 3 * stride, stride));
        out[0] = _mm256_unpacklo_epi64(ab, cd);
        out[1] = _mm256_unpackhi_epi64(ab, cd);
    }
    // Puts bit 4 * j + i of each lane above the four bits of byte i of codes[j].
    static void fifth_bits(Ints high, Ints * codes) {
        const Ints first = _mm256_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c, 0x08080808, 0x04040404, 0);
        for (int j = 0; j < 8; ++j) {
            const Ints bits = all(j % 2 ? (int) 0x80402010 : 0x08040201);
            const Ints bytes = _mm256_shuffle_epi8(high, _mm256_add_epi8(first, _mm256_set1_epi8((char) (j / 2))));
            codes[j] = either(codes[j], both(_mm256_cmpeq_epi8(both(bytes, bits), bits), all(0x10101010)));
        }
    }
    static Ints table(__m128i values, Ints index) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), index); }

    // Four activations in each lane.
    static Ints four(const int8_t * x) {
        int value;
        memcpy(&value, x, sizeof(value));
        return all(value);
    }
};

} // namespace
} // namespace attested
