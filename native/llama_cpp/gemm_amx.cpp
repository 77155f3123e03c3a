// Products with AMX: a tile of 16 tokens meets a panel of 16 rows at once. Everything else is that of AVX-512.
//
// The tile operations stand behind `Hardware`; `Emulated` does the same in C++, so that a processor without AMX tests all but
// the instructions themselves.
#include "gemm_512.h"

#include "gemm_tiles.h"

namespace attested {
namespace {

constexpr int kLeast = 8; // tokens from which on a tile is faster; measured

// What ldtilecfg reads.
struct alignas(64) Configuration {
    uint8_t palette;
    uint8_t start;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Registers: 0 to 3 sums; 4 and 5 codes of tokens and of rows, 32 of each; 6 and 7 the same with 16.
constexpr Configuration kConfiguration = {1, 0, {}, {64, 64, 64, 64, 32, 64, 16, 64}, {16, 16, 16, 16, 16, 8, 16, 4}};

// Not the intrinsics: of ldtilecfg that of GCC 12 says that 8 of the 64 bytes are read, and the others may never be written.
struct Hardware {
    static void begin() { __asm__ volatile("ldtilecfg %0" : : "m"(kConfiguration) : "memory"); }
    static void end() { __asm__ volatile("tilerelease" : : : "memory"); }
    template <int tile> static void zero() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile)); }
    template <int tile> static void load(const void * from, size_t stride) {
        __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(tile), "r"(from), "r"(stride) : "memory");
    }
    template <int tile> static void store(void * to, size_t stride) {
        __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(tile), "r"(to), "r"(stride) : "memory");
    }
    // Adds the products of the codes of tokens, with sign, and of rows, without.
    template <int sums, int tokens, int rows> static void multiply() {
        __asm__ volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(rows), "i"(tokens), "i"(sums));
    }
};

struct Emulated {
    static thread_local uint8_t registers[8][16][64];

    static void begin() { memset(registers, 0, sizeof(registers)); }
    static void end() {}
    template <int tile> static void zero() { memset(registers[tile], 0, sizeof(registers[tile])); }
    template <int tile> static void load(const void * from, size_t stride) {
        zero<tile>();
        for (int row = 0; row < kConfiguration.rows[tile]; ++row) {
            memcpy(registers[tile][row], (const uint8_t *) from + row * stride, kConfiguration.row_bytes[tile]);
        }
    }
    template <int tile> static void store(void * to, size_t stride) {
        for (int row = 0; row < kConfiguration.rows[tile]; ++row) {
            memcpy((uint8_t *) to + row * stride, registers[tile][row], kConfiguration.row_bytes[tile]);
        }
    }
    template <int sums, int tokens, int rows> static void multiply() {
        for (int m = 0; m < kConfiguration.rows[sums]; ++m) {
            int32_t line[16];
            memcpy(line, registers[sums][m], sizeof(line));
            for (int k = 0; k < kConfiguration.row_bytes[tokens]; ++k) {
                for (int n = 0; n < 16; ++n) {
                    line[n] += (int8_t) registers[tokens][m][k] * registers[rows][k / 4][4 * n + k % 4];
                }
            }
            memcpy(registers[sums][m], line, sizeof(line));
        }
    }
};
thread_local uint8_t Emulated::registers[8][16][64];

constexpr int kTiles = 4; // whose sums are under way together
constexpr int kPad = 4;   // vectors between such sums: 4 KiB apart, a load waits for a store that it has nothing to do with

// Starts the sums of products of each of 16 tokens with each row: of 32 codes, or (`half`) of 16.
template <class Tiles, int tile, bool half> void start(const int8_t * tokens, const Ints * codes) {
    Tiles::template zero<tile>();
    Tiles::template load<half ? 6 : 4>(tokens, kUnit);
    Tiles::template load<half ? 7 : 5>(codes, 64);
    Tiles::template multiply<tile, half ? 6 : 4, half ? 7 : 5>();
}

// Up to four of them, `step` bytes of tokens and `width` vectors of codes apart, stored as 16 vectors each.
template <class Tiles, bool half> struct Four {
    const int8_t * tokens;
    size_t step;
    const Ints * codes;
    size_t width;

    void sums(int count, Ints * out) const {
        start<Tiles, 0, half>(tokens, codes);
        if (count > 1) start<Tiles, 1, half>(tokens + step, codes + width);
        if (count > 2) start<Tiles, 2, half>(tokens + 2 * step, codes + 2 * width);
        if (count > 3) start<Tiles, 3, half>(tokens + 3 * step, codes + 3 * width);
        Tiles::template store<0>(out, 64);
        if (count > 1) Tiles::template store<1>(out + kGroup, 64);
        if (count > 2) Tiles::template store<2>(out + 2 * kGroup, 64);
        if (count > 3) Tiles::template store<3>(out + 3 * kGroup, 64);
    }
};

int least(int a, int b) { return a < b ? a : b; }

template <class Tiles> struct With {
    template <Format F> struct Of32 {
        using Panel = Unit;
        static constexpr size_t kBytes = input_block_bytes(kUnit, kGroup);

        static void products(const Unit * w, int count, const uint8_t * inputs, Ints * out) {
            const Four<Tiles, false> four = {(const int8_t *) inputs, kBytes, w->codes, sizeof(Unit) / sizeof(Ints)};
            four.sums(count, out);
        }
        static void add(const Unit * w, int count, const uint8_t * inputs, int tokens, const Ints * products, Floats * sums) {
            for (int t = 0; t < tokens; ++t) {
                Floats total = sums[t];
                for (int b = 0; b < count; ++b) {
                    const float * scales = (const float *) (inputs + b * kBytes + kGroup * kUnit);
                    const float * sum = scales + kGroup;
                    Ints exact = products[b * kGroup + t];
                    if (!traits(F).minimum) {
                        exact = Simd::more(exact, Simd::all(((const int *) sum)[t]));
                    }
                    total = Simd::fma(Simd::times(w[b].scale, Simd::each(scales[t])), Simd::floats(exact), total);
                    if (traits(F).minimum) {
                        total = Simd::fma(w[b].minimum, Simd::each(sum[t]), total);
                    }
                }
                sums[t] = total;
            }
        }
        // The tiles of the next blocks are under way while floats are made of the sums of these.
        static void run(const Unit * w, int count, const uint8_t * inputs, int slots, int tokens, Floats * sums) {
            if (slots < kGroup || tokens < kLeast) {
                return Small<F>::run(w, count, inputs, slots, tokens, sums);
            }
            Ints made[2][kTiles * kGroup + kPad];
            products(w, least(kTiles, count), inputs, made[0]);
            for (int b = 0, turn = 0; b < count; b += kTiles, turn ^= 1) {
                if (b + kTiles < count) {
                    products(w + b + kTiles, least(kTiles, count - b - kTiles), inputs + (b + kTiles) * kBytes, made[turn ^ 1]);
                }
                add(w + b, least(kTiles, count - b), inputs + b * kBytes, tokens, made[turn], sums);
            }
        }
    };

    template <Format F> struct Of256 {
        using Panel = Super;
        static constexpr bool kHalf = traits(F).sub == 16;
        static constexpr int kParts = kSuper / traits(F).sub; // sub-blocks

        static void products(const Super & w, int part, const uint8_t * inputs, Ints * out) {
            const int8_t * tokens = (const int8_t *) inputs;
            if (kHalf) { // two units, two halves of each
                const Four<Tiles, true> first = {tokens + part / 2 * kGroup * kUnit, 16, w.codes + part * 4, 4};
                const Four<Tiles, true> second = {tokens + (part / 2 + 1) * kGroup * kUnit, 16, w.codes + part * 4 + 8, 4};
                first.sums(2, out);
                second.sums(2, out + 2 * kGroup);
            } else {
                const Four<Tiles, false> four = {tokens + part * kGroup * kUnit, kGroup * kUnit, w.codes + part * 8, 8};
                four.sums(kTiles, out);
            }
        }
        static void add(const Super & w, int part, const Ints * products, Ints * totals) {
            for (int t = 0; t < kGroup; ++t) {
                for (int j = 0; j < kTiles; ++j) {
                    const Ints product = products[j * kGroup + t], scale = w.scales[part + j];
                    totals[t] = kHalf && Simd::kShort<F> ? Simd::pairs(totals[t], product, scale)
                                                         : Simd::more(totals[t], multiplied(product, scale));
                }
            }
        }
        // A sum of 32 codes of 4 bits does not fit into 16 bits, and the scale has no sign: `kShort` says nothing here.
        static Ints multiplied(Ints product, Ints scale) { return _mm512_mullo_epi32(product, scale); }

        static void run(const Super * w, int count, const uint8_t * inputs, int slots, int tokens, Floats * sums) {
            if (slots < kGroup || tokens < kLeast) {
                return Large<F>::run(w, count, inputs, slots, tokens, sums);
            }
            Ints made[2][kTiles * kGroup + kPad], totals[kGroup];
            for (int b = 0; b < count; ++b, inputs += input_block_bytes(kSuper, kGroup)) {
                for (int t = 0; t < kGroup; ++t) {
                    totals[t] = Simd::all(0);
                }
                products(w[b], 0, inputs, made[0]);
                for (int part = 0, turn = 0; part < kParts; part += kTiles, turn ^= 1) {
                    if (part + kTiles < kParts) {
                        products(w[b], part + kTiles, inputs, made[turn ^ 1]);
                    }
                    add(w[b], part, made[turn], totals);
                }
                const float * scales = (const float *) (inputs + kGroup * kSuper);
                Block256<F>::finish(w[b], scales, (const int *) (scales + kGroup), tokens, totals, sums);
            }
        }
    };
};

template <class Tiles> void with(const Product & product) {
    if (product.tokens < kGroup) {
        return gemm_avx512(product);
    }
    Tiles::begin();
    dispatch<With<Tiles>::template Of32, With<Tiles>::template Of256>(product);
    Tiles::end();
}

} // namespace

void gemm_amx(const Product & product) { with<Hardware>(product); }
void gemm_amx_emulated(const Product & product) { with<Emulated>(product); }

} // namespace attested
