// Products with AVX2: bytes are multiplied in pairs whose sums are of 16 bits, so no more of them are added up there than
// fit, and codes of eight bits go in with their sign taken over by the activations.
#include "gemm_256.h"

namespace attested {
namespace {

struct Simd : Simd256 {
    static constexpr bool kSigned = true;

    // An integer scale meets the sums of even and of odd pairs.
    template <Format F> static Ints multiplier(Ints value) { return either(both(value, all(0xffff)), left32<16>(value)); }
    static Ints nonlinear(Ints index) {
        return table(_mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), index);
    }
    static Ints pairs(Ints sum, Ints a, Ints b) { return more(sum, _mm256_madd_epi16(a, b)); }

    // Sums of `count` products of pairs, which fit into 16 bits.
    template <int count> static Ints words(const Ints * codes, const int8_t * x) {
        Ints sum = _mm256_maddubs_epi16(codes[0], four(x));
        for (int j = 1; j < count; ++j) {
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[j], four(x + 4 * j)));
        }
        return sum;
    }
    template <int count> static Ints weighed(const Ints * codes, const int8_t * x, Ints first, Ints second, Ints sum) {
        for (int j = 0; j < 8; j += count) {
            sum = pairs(sum, words<count>(codes + j, x + 4 * j), j < 4 ? first : second);
        }
        return sum;
    }
    template <int range> static Ints dot(const Ints * codes, const int8_t * x, Ints sum) {
        const Ints one = _mm256_set1_epi16(1);
        if (range == 255) {
            for (int j = 0; j < 8; ++j) {
                const Ints products = _mm256_maddubs_epi16(_mm256_abs_epi8(codes[j]), _mm256_sign_epi8(four(x + 4 * j), codes[j]));
                sum = pairs(sum, products, one);
            }
            return sum;
        }
        return range == 31 ? weighed<4>(codes, x, one, one, sum) : weighed<8>(codes, x, one, one, sum);
    }
    template <Format F> static Ints scaled(const Ints * codes, Ints first, Ints second, const int8_t * x, Ints sum) {
        switch (F) {
            case Format::q4_k: return weighed<8>(codes, x, first, second, sum); // both are the same
            case Format::q6_k: return weighed<2>(codes, x, first, second, sum);
            default: return weighed<4>(codes, x, first, second, sum);
        }
    }
};

} // namespace
} // namespace attested

#include "gemm_tiles.h"

namespace attested {

void gemm_avx2(const Product & product) { dispatch<Small, Large>(product); }

} // namespace attested
