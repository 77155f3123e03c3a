// Functions of sixteen floats, from +, *, /, fma and integer operations alone: the same bits in every width.
// Included after vec16_avx2.h or vec16_avx512.h; attention_plain.cpp has the same of one float.
#pragma once

namespace {

constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2High = 0x1.62e4p-1f; // few digits: a small integer times it is exact
constexpr float kLn2Low = 0x1.7f7d1cp-20f;
constexpr float kRound = 12582912.0f; // 3 * 2^22: added to a number it leaves its nearest integer in the last bits
constexpr float kExpLeast = -87.0f;   // below it exp is zero: so no result is subnormal
constexpr float kExp[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

// exp(x) for x <= 0: within two units of the last place, zero below -87.
VEC16_INLINE Vec16 exp16(Vec16 x) {
    const Vec16 steps = fma16(x, all16(kLog2E), all16(kRound));
    const Vec16 n = steps - all16(kRound);
    const Vec16 r = fma16(n, all16(-kLn2Low), fma16(n, all16(-kLn2High), x));
    Vec16 sum = all16(kExp[0]);
    for (int i = 1; i < 6; ++i) {
        sum = fma16(sum, r, all16(kExp[i]));
    }
    sum = fma16(sum, r * r, r) + all16(1.0f);
    return unless_below16(add_exponent16(sum, steps), x, kExpLeast);
}

// tanh(x), with an error of some 1e-7 (not relative to small results): what bounds scores.
VEC16_INLINE Vec16 tanh16(Vec16 x) {
    const Vec16 positive = with_sign16(x, x);
    const Vec16 e = exp16(all16(-2.0f) * positive);
    return with_sign16((all16(1.0f) - e) / (all16(1.0f) + e), x);
}

} // namespace
