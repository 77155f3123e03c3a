// Products with AVX-VNNI: four bytes are multiplied and added up in 32 bits, in vectors of 256.
#include "gemm_256.h"

namespace attested {
namespace {

struct Simd : Simd256 {
    static constexpr bool kSigned = false;

    // Where the sum under one scale fits into 16 bits, it is multiplied as the lower one of two such.
    template <Format F> static constexpr bool kShort = F == Format::q2_k || F == Format::q3_k || F == Format::q4_k;

    template <Format F> static Ints multiplier(Ints value) { return kShort<F> ? both(value, all(0xffff)) : value; }
    static Ints nonlinear(Ints index) {
        return table(_mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, -127, -115, -103, -90, -75, -59, -39, -15), index);
    }
    static Ints pairs(Ints sum, Ints a, Ints b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }

    template <int count> static Ints products(const Ints * codes, const int8_t * x, Ints sum) {
        for (int j = 0; j < count; ++j) {
            sum = _mm256_dpbusd_avx_epi32(sum, codes[j], four(x + 4 * j));
        }
        return sum;
    }
    template <int range> static Ints dot(const Ints * codes, const int8_t * x, Ints sum) { return products<8>(codes, x, sum); }
    template <Format F> static Ints scaled(const Ints * codes, Ints first, Ints second, const int8_t * x, Ints sum) {
        if (F == Format::q5_k) {
            return more(sum, _mm256_mullo_epi32(products<8>(codes, x, all(0)), first));
        }
        const Ints low = products<4>(codes, x, all(0)), high = products<4>(codes + 4, x + 16, all(0));
        if (kShort<F>) {
            return pairs(pairs(sum, low, first), high, second);
        }
        return more(sum, more(_mm256_mullo_epi32(low, first), _mm256_mullo_epi32(high, second)));
    }
};

} // namespace
} // namespace attested

#include "gemm_tiles.h"

namespace attested {

void gemm_avxvnni(const Product & product) { dispatch<Small, Large>(product); }

} // namespace attested
