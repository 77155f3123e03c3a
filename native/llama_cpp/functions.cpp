#include "functions.h"

#include <cstdint>
#include <cstring>

// What leaves this library's own: each of the three libraries has a copy.
#define WRAP extern "C" __attribute__((visibility("hidden")))

namespace {

constexpr double kInfinity = __builtin_inf();
constexpr double kNone = __builtin_nan("");
constexpr double kRound = 0x1.8p52; // added to a number it leaves its nearest integer in the last bits
constexpr double kLog2E = 0x1.71547652b82fep+0;
constexpr double kLn2 = 0x1.62e42fefa39efp-1;
constexpr double kLn2High = 0x1.62e42fefp-1; // 33 bits: a small integer times it is exact
constexpr double kLn2Low = 0x1.473de6af278edp-34;
constexpr double kHalfPi = 0x1.921fb54442d18p+0;
constexpr double kHalfPiLow = 0x1.1a62633145c07p-54;
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;

// Series of Taylor: expm1(r) = r + r^2 * (...), sin(r) = r + r^3 * (...), cos(r) = 1 + r^2 * (...), 2 atanh(f) = 2f + f^3 * (...).
constexpr double kExp[] = {
    0x1.0000000000000p-1, 0x1.5555555555555p-3, 0x1.5555555555555p-5, 0x1.1111111111111p-7, 0x1.6c16c16c16c17p-10, 0x1.a01a01a01a01ap-13,
    0x1.a01a01a01a01ap-16, 0x1.71de3a556c734p-19, 0x1.27e4fb7789f5cp-22, 0x1.ae64567f544e4p-26, 0x1.1eed8eff8d898p-29, 0x1.6124613a86d09p-33,
    0x1.93974a8c07c9dp-37,
};
constexpr double kSin[] = {
    -0x1.5555555555555p-3, 0x1.1111111111111p-7, -0x1.a01a01a01a01ap-13, 0x1.71de3a556c734p-19, -0x1.ae64567f544e4p-26, 0x1.6124613a86d09p-33,
    -0x1.ae7f3e733b81fp-41,
};
constexpr double kCos[] = {
    -0x1.0000000000000p-1, 0x1.5555555555555p-5, -0x1.6c16c16c16c17p-10, 0x1.a01a01a01a01ap-16, -0x1.27e4fb7789f5cp-22, 0x1.1eed8eff8d898p-29,
    -0x1.93974a8c07c9dp-37,
};
constexpr double kAtanh[] = {
    0x1.5555555555555p-1, 0x1.999999999999ap-2, 0x1.2492492492492p-2, 0x1.c71c71c71c71cp-3, 0x1.745d1745d1746p-3, 0x1.3b13b13b13b14p-3,
    0x1.1111111111111p-3, 0x1.e1e1e1e1e1e1ep-4, 0x1.af286bca1af28p-4, 0x1.8618618618618p-4, 0x1.642c8590b2164p-4,
};
// erf(x) = x * (...) of x^2 below 0.5, and around 0.75, 1.25, ... 3.75.
constexpr double kErfSmall[] = {
    0x1.20dd750429b6dp+0, -0x1.812746b0379e7p-2, 0x1.ce2f21a042be2p-4, -0x1.b82ce31288b51p-6, 0x1.565bcd0e6a53fp-8, -0x1.c02db40040b86p-11,
    0x1.f9a326f9b89b7p-14, -0x1.f4d25c3e0c2ebp-17, 0x1.b9e6c9dc651a3p-20, -0x1.5f742ec43e71ap-23, 0x1.fcc5720624c1cp-27, -0x1.51d7181c5d36dp-30,
};
constexpr double kErf[7][15] = {
    {0x1.6c1c9759d0e5fp-1, 0x1.492e42d78d2c5p-1, -0x1.edc5644353c27p-2, 0x1.b6e8591f66e5bp-6, 0x1.349b5eaa14598p-3,
     -0x1.b42a1890ce411p-5, -0x1.b8477966b3381p-6, 0x1.2e0afb0bb961ep-6, 0x1.2db332f9e64d4p-9, -0x1.04105cd6d527ep-8,
     0x1.86234ec3372d9p-13, 0x1.4725abcb993b6p-11, -0x1.bd5eea735c608p-14, -0x1.3db33dbe2237ep-14, 0x1.7313fb66f36f6p-16},
    {0x1.d8865d98abe01p-1, 0x1.e4652fadcb6b2p-3, -0x1.2ebf3dcc9f22fp-2, 0x1.571d01c5c56bep-3, -0x1.93a9a7bb7ed94p-8,
     -0x1.8281ce0b34fa4p-5, 0x1.5d0003af70568p-6, 0x1.db43c97264485p-9, -0x1.75672cebadac5p-8, 0x1.cc22555d6cd4ep-11,
     0x1.a0074f860d925p-11, -0x1.53b177f074426p-12, -0x1.ba66102895704p-15, 0x1.d4520093cdd9ep-15, -0x1.94a53c645ccdbp-19},
    {0x1.f92d077f8d56dp-1, 0x1.b055303221015p-5, -0x1.7a4a8a2bdce13p-4, 0x1.7148c3d57c312p-4, -0x1.8a0da54306154p-5,
     0x1.b22257dd01249p-8, 0x1.25b378c92a6c0p-7, -0x1.8d10fb6b8006fp-8, 0x1.7ec1d1d8d3387p-11, 0x1.d4cf0ad2e6ca3p-11,
     -0x1.d041eea2258aep-12, -0x1.6d70cffe71229p-18, 0x1.2007a6d7935c6p-14, -0x1.294d49e1a631dp-16, -0x1.3668d56f09b00p-18},
    {0x1.ff404760319b4p-1, 0x1.d4143a9dfe965p-8, -0x1.074b60f8df349p-6, 0x1.63ef61e824425p-6, -0x1.38a98327890e6p-6,
     0x1.5d3b17bbe0f22p-7, -0x1.7cae0d45b1a6ap-9, -0x1.5f8313b6fdd59p-11, 0x1.0602e33b9ef4ap-10, -0x1.8352cd05696b8p-12,
     -0x1.80c1330a27b22p-17, 0x1.11321ce0dc8f3p-14, -0x1.7ca5429a38511p-16, -0x1.65937983af9a4p-20, 0x1.cb0718bc6dc96p-19},
    {0x1.fff2cfb0453d9p-1, 0x1.3360ccd23db3ap-11, -0x1.a6a519a114d70p-10, 0x1.69cf466ccdf62p-9, -0x1.ab0c273ac263ep-9,
     0x1.6935960664d74p-9, -0x1.b2755bfd73556p-10, 0x1.52b6263f0c0e7p-11, -0x1.7557726380065p-14, -0x1.2abb3cb37d67fp-14,
     0x1.cd592454e7d28p-15, -0x1.09d09f8254931p-16, -0x1.1f87c15445595p-20, 0x1.68b7ad440ba03p-19, -0x1.eb027532f1e9dp-21},
    {0x1.ffff6f9f67e55p-1, 0x1.e9b5e8d00ce77p-16, -0x1.8de3cd290a7c0p-14, 0x1.9aa489e3cad21p-13, -0x1.2c7d5ef053eb0p-12,
     0x1.490a4d230eab9p-12, -0x1.145464ea2872bp-12, 0x1.647f721c135ebp-13, -0x1.567479c97cce7p-14, 0x1.b2c3201a66dd9p-16,
     -0x1.38933c0f0c9fap-19, -0x1.8070948011d1bp-19, 0x1.ff3236f426a50p-20, -0x1.26552b63b3912p-21, 0x1.d56060892daf5p-29},
    {0x1.fffffc2f171e3p-1, 0x1.d9371e2ff7c35p-21, -0x1.bba3ac4cf8472p-19, 0x1.0b6a7b0f1b586p-17, -0x1.d06f586093ea7p-17,
     0x1.3436bc9fc46f6p-16, -0x1.4357b5546e9f3p-16, 0x1.110de49c0acd0p-16, -0x1.7566beee1bb2fp-17, 0x1.99f5c54c5ea75p-18,
     -0x1.5d6903bb02d10p-19, 0x1.a0431133a7b2dp-21, -0x1.833324e429526p-24, -0x1.ec7d23a1cdfffp-25, 0x1.6df3b136b9415p-25},
};

// 2^(i/32), for the exponential function of floats, which is called most.
constexpr double kSteps = 0x1.71547652b82fep+5;  // 32 / ln 2
constexpr double kStep = 0x1.62e42fefa39efp-6; // ln 2 / 32
constexpr double kPowers[32] = {
    0x1.0000000000000p+0, 0x1.059b0d3158574p+0, 0x1.0b5586cf9890fp+0, 0x1.11301d0125b51p+0,
    0x1.172b83c7d517bp+0, 0x1.1d4873168b9aap+0, 0x1.2387a6e756238p+0, 0x1.29e9df51fdee1p+0,
    0x1.306fe0a31b715p+0, 0x1.371a7373aa9cbp+0, 0x1.3dea64c123422p+0, 0x1.44e086061892dp+0,
    0x1.4bfdad5362a27p+0, 0x1.5342b569d4f82p+0, 0x1.5ab07dd485429p+0, 0x1.6247eb03a5585p+0,
    0x1.6a09e667f3bcdp+0, 0x1.71f75e8ec5f74p+0, 0x1.7a11473eb0187p+0, 0x1.82589994cce13p+0,
    0x1.8ace5422aa0dbp+0, 0x1.93737b0cdc5e5p+0, 0x1.9c49182a3f090p+0, 0x1.a5503b23e255dp+0,
    0x1.ae89f995ad3adp+0, 0x1.b7f76f2fb5e47p+0, 0x1.c199bdd85529cp+0, 0x1.cb720dcef9069p+0,
    0x1.d5818dcfba487p+0, 0x1.dfc97337b9b5fp+0, 0x1.ea4afa2a490dap+0, 0x1.f50765b6e4540p+0,
};

// Bits of 2/pi from 2^-8 on (in steps of a byte): those that a float's significand can meet, see reduce_large.
constexpr uint32_t kTwoOverPiBits[24] = {
    0xa2,       0xa2f9,     0xa2f983,   0xa2f9836e, 0xf9836e4e, 0x836e4e44, 0x6e4e4415, 0x4e441529,
    0x441529fc, 0x1529fc27, 0x29fc2757, 0xfc2757d1, 0x2757d1f5, 0x57d1f534, 0xd1f534dd, 0xf534ddc0,
    0x34ddc0db, 0xddc0db62, 0xc0db6295, 0xdb629599, 0x6295993c, 0x95993c43, 0x993c4390, 0x3c439041,
};

double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
double magnitude(double x) { return __builtin_fabs(x); }
bool is_nan(double x) { return x != x; }

uint64_t bits(double x) {
    uint64_t found;
    memcpy(&found, &x, sizeof(found));
    return found;
}
uint32_t bits(float x) {
    uint32_t found;
    memcpy(&found, &x, sizeof(found));
    return found;
}
double from_bits(uint64_t x) {
    double found;
    memcpy(&found, &x, sizeof(found));
    return found;
}

template <int N> double polynomial(const double (&factors)[N], double x) {
    double sum = factors[N - 1];
    for (int i = N - 2; i >= 0; --i) {
        sum = fma(sum, x, factors[i]);
    }
    return sum;
}

// 2^n for -1022 <= n <= 1023.
double power_of_two(int64_t n) { return from_bits((uint64_t) (n + 1023) << 52); }

double scaled(double x, int64_t n) {
    if (n >= -1022 && n <= 1023) {
        return x * power_of_two(n);
    }
    const int64_t half = n / 2; // twice: 2^n itself may be out of range, the result subnormal
    return x * power_of_two(half) * power_of_two(n - half);
}

struct Exponent {
    double rest; // e^r - 1
    int64_t n;
};

// e^(x + tail) = 2^n * (1 + rest), |x| below 1100, tail tiny.
Exponent exponent(double x, double tail) {
    const double steps = fma(x, kLog2E, kRound);
    const double n = steps - kRound;
    const double r = fma(-n, kLn2Low, fma(-n, kLn2High, x)) + tail;
    return {fma(r * r, polynomial(kExp, r), r), (int64_t) n};
}

double exp_within(double x, double tail) {
    const Exponent e = exponent(x, tail);
    return scaled(1.0 + e.rest, e.n);
}

// e^x, |x| below 700, with an error of some 1e-14: enough for a float, and for a sum of which floats are made.
double exp_short(double x) {
    const double steps = fma(x, kSteps, kRound);
    const uint64_t n = bits(steps); // in its last bits
    const double r = fma(-(steps - kRound), kStep, x);
    const double power = from_bits(bits(kPowers[n & 31]) + ((n >> 5) << 52));
    const double square = r * r;
    return fma(power, fma(square, fma(square, fma(r, kExp[3], kExp[2]), fma(r, kExp[1], kExp[0])), r), power);
}

double expm1_within(double x) {
    const Exponent e = exponent(x, 0.0);
    if (e.n == 0) {
        return e.rest;
    }
    const double power = scaled(1.0, e.n);
    return fma(power, e.rest, power - 1.0);
}

// What a float can tell apart ends at 128 * ln 2.
double clamped(double x) { return x > 200.0 ? 200.0 : x < -200.0 ? -200.0 : x; }

struct Logarithm {
    double high, low; // of m, between sqrt(1/2) and sqrt(2)
    double k;         // x = 2^k * m
};

// Of a finite number above zero.
Logarithm logarithm(double x) {
    uint64_t number = bits(x);
    int64_t k = 0;
    if (number < (1ull << 52)) {
        number = bits(x * 0x1p54);
        k = -54;
    }
    const uint64_t offset = number - bits(0x1.6a09e667f3bcdp-1);
    k += (int64_t) offset >> 52;
    const double m = from_bits(number - (offset & (0xfffull << 52)));
    const double above = m - 1.0, below = m + 1.0;
    const double f = above / below;
    const double f_low = (fma(-f, below, above) - f * (m - (below - 1.0))) / below;
    const double z = f * f;
    return {2.0 * f, fma(f * z, polynomial(kAtanh, z), 2.0 * f_low), (double) k};
}

double log_within(double x) {
    const Logarithm l = logarithm(x);
    return fma(l.k, kLn2High, l.high) + fma(l.k, kLn2Low, l.low);
}

double log2_within(double x) {
    const Logarithm l = logarithm(x);
    return fma(l.high + l.low, kLog2E, l.k);
}

double special_log(double x) { return x == 0.0 ? -kInfinity : x < 0.0 || is_nan(x) ? kNone : x; }
bool ordinary(double x) { return x > 0.0 && x < kInfinity; }

struct Angle {
    double r; // within pi/4 of zero
    unsigned quadrant;
};

// For numbers from 2^31 on: the significand times those bits of 2/pi that do not give whole turns.
Angle reduce_large(float x) {
    const uint32_t number = bits(x);
    const uint32_t * table = &kTwoOverPiBits[(number >> 26) & 15];
    const uint32_t significand = ((number & 0xffffff) | 0x800000) << ((number >> 23) & 7);
    const uint64_t high = (uint64_t) (significand * table[0]) << 32;
    const uint64_t low = (uint64_t) significand * table[8] >> 32;
    uint64_t product = (high | low) + (uint64_t) significand * table[4];
    const uint64_t n = (product + (1ull << 61)) >> 62;
    product -= n << 62;
    const double r = (double) (int64_t) product * 0x1.921fb54442d18p-62;
    return x < 0.0f ? Angle{-r, (unsigned) (0 - n) & 3} : Angle{r, (unsigned) n & 3};
}

Angle reduce(float x) {
    if (magnitude(x) >= 0x1p31) {
        return reduce_large(x);
    }
    const double n = fma(x, kTwoOverPi, kRound) - kRound;
    return {fma(-n, kHalfPiLow, fma(-n, kHalfPi, x)), (unsigned) (int64_t) n & 3};
}

float sine(const Angle & angle, unsigned turned) {
    const double z = angle.r * angle.r;
    const unsigned quadrant = (angle.quadrant + turned) & 3;
    const double value = quadrant & 1 ? fma(z, polynomial(kCos, z), 1.0) : fma(angle.r * z, polynomial(kSin, z), angle.r);
    return (float) (quadrant & 2 ? -value : value);
}

bool is_whole(double y) { return magnitude(y) >= 0x1p53 || (double) (int64_t) y == y; }
bool is_odd(double y) { return magnitude(y) < 0x1p53 && (double) (int64_t) y == y && ((int64_t) y & 1); }

// Where one of both is zero, infinite or no number, or x is negative without a real power: IEC 60559. False elsewhere.
bool special_pow(double x, double y, double * result) {
    const bool negative = (bits(x) >> 63) && is_odd(y);
    const double large = magnitude(x);
    if (y == 0.0 || x == 1.0) {
        *result = 1.0;
    } else if (is_nan(x) || is_nan(y)) {
        *result = kNone;
    } else if (magnitude(y) == kInfinity) {
        *result = large == 1.0 ? 1.0 : (large > 1.0) == (y > 0.0) ? kInfinity : 0.0;
    } else if (large == 0.0 || large == kInfinity) {
        const double value = (large == 0.0) == (y > 0.0) ? 0.0 : kInfinity;
        *result = negative ? -value : value;
    } else if (x < 0.0 && !is_whole(y)) {
        *result = kNone;
    } else {
        return false;
    }
    return true;
}

} // namespace

namespace attested {

float expf(float x) { return is_nan(x) ? x : (float) exp_short(clamped(x)); }
float exp2f(float x) { return is_nan(x) ? x : (float) exp_within(clamped(x) * kLn2, 0.0); }
float expm1f(float x) { return is_nan(x) || x == 0.0f ? x : (float) expm1_within(clamped(x)); }
float logf(float x) { return (float) (ordinary(x) ? log_within(x) : special_log(x)); }
float log2f(float x) { return (float) (ordinary(x) ? log2_within(x) : special_log(x)); }

float log1pf(float x) {
    if (x == 0.0f) {
        return x;
    }
    if (magnitude(x) < 0.25) {
        const double f = x / (2.0 + x);
        const double z = f * f;
        return (float) fma(f * z, polynomial(kAtanh, z), 2.0 * f);
    }
    const double sum = 1.0 + (double) x;
    return (float) (ordinary(sum) ? log_within(sum) : special_log(sum));
}

float sinf(float x) {
    return x == 0.0f ? x : magnitude(x) < kInfinity ? sine(reduce(x), 0) : (float) kNone;
}
float cosf(float x) { return magnitude(x) < kInfinity ? sine(reduce(x), 1) : (float) kNone; }

float tanhf(float x) {
    if (is_nan(x)) {
        return x;
    }
    const double large = magnitude(x);
    const double grown = expm1_within(2.0 * (large > 10.0 ? 10.0 : large));
    return (float) __builtin_copysign(grown / (grown + 2.0), x);
}

float erff(float x) {
    if (is_nan(x)) {
        return x;
    }
    const double large = magnitude(x);
    double value = 1.0;
    if (large < 0.5) {
        value = large * polynomial(kErfSmall, large * large);
    } else if (large < 4.0) {
        const int piece = (int) ((large - 0.5) * 2.0);
        value = polynomial(kErf[piece], large - (0.75 + 0.5 * piece));
    }
    return (float) __builtin_copysign(value, x);
}

float powf(float x, float y) {
    double result;
    if (!special_pow(x, y, &result)) {
        result = exp_within(clamped((double) y * log_within(magnitude(x))), 0.0);
        result = x < 0.0f && is_odd(y) ? -result : result;
    }
    return (float) result;
}

double exp(double x) {
    if (is_nan(x)) {
        return x;
    }
    return x > 709.8 ? kInfinity : x < -745.2 ? 0.0 : exp_within(x, 0.0);
}

double exp2(double x) {
    if (is_nan(x)) {
        return x;
    }
    if (magnitude(x) > 1080.0) {
        return x > 0.0 ? kInfinity : 0.0;
    }
    const double n = (x + kRound) - kRound;
    return scaled(exp_within((x - n) * kLn2, 0.0), (int64_t) n);
}

double log_sum_exp(const float * logits, int64_t count) {
    double largest = -kInfinity;
    for (int64_t i = 0; i < count; ++i) {
        largest = logits[i] > largest ? logits[i] : largest;
    }
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
        const double below = logits[i] - largest;
        sum += below > -700.0 ? exp_short(below) : 0.0;
    }
    return largest + log(sum);
}

double log(double x) { return ordinary(x) ? log_within(x) : special_log(x); }
double log2(double x) { return ordinary(x) ? log2_within(x) : special_log(x); }

double pow(double x, double y) {
    double result;
    if (special_pow(x, y, &result)) {
        return result;
    }
    if (y == 1.0 || y == 2.0 || y == -1.0) { // as compilers do it
        return y == 1.0 ? x : y == 2.0 ? x * x : 1.0 / x;
    }
    const Logarithm l = logarithm(magnitude(x));
    const double whole = l.k * kLn2High;
    const double sum = whole + l.high;
    const double rest = (l.high - (sum - whole)) + fma(l.k, kLn2Low, l.low);
    const double high = sum + rest, low = rest - (high - sum);
    const double product = y * high;
    if (magnitude(product) > 800.0) {
        result = product > 0.0 ? kInfinity : 0.0;
    } else {
        result = exp_within(product, fma(y, high, -product) + y * low);
    }
    return x < 0.0 && is_odd(y) ? -result : result;
}

} // namespace attested

WRAP float __wrap_expf(float x) { return attested::expf(x); }
WRAP float __wrap_exp2f(float x) { return attested::exp2f(x); }
WRAP float __wrap_expm1f(float x) { return attested::expm1f(x); }
WRAP float __wrap_logf(float x) { return attested::logf(x); }
WRAP float __wrap_log2f(float x) { return attested::log2f(x); }
WRAP float __wrap_log1pf(float x) { return attested::log1pf(x); }
WRAP float __wrap_sinf(float x) { return attested::sinf(x); }
WRAP float __wrap_cosf(float x) { return attested::cosf(x); }
WRAP void __wrap_sincosf(float x, float * sine, float * cosine) {
    *sine = attested::sinf(x);
    *cosine = attested::cosf(x);
}
WRAP float __wrap_tanhf(float x) { return attested::tanhf(x); }
WRAP float __wrap_erff(float x) { return attested::erff(x); }
WRAP float __wrap_powf(float x, float y) { return attested::powf(x, y); }
WRAP double __wrap_exp(double x) { return attested::exp(x); }
WRAP double __wrap_exp2(double x) { return attested::exp2(x); }
WRAP double __wrap_log(double x) { return attested::log(x); }
WRAP double __wrap_log2(double x) { return attested::log2(x); }
WRAP double __wrap_pow(double x, double y) { return attested::pow(x, y); }
