// Products in panels: what the variants with vector instructions share. Included by one file a variant, after that file has
// defined `Simd` in its anonymous namespace; everything here is in that namespace again, so that no copy is merged with
// another file's (attested.cmake says why).
//
// A panel is as many rows of weights as a vector has lanes. Their codes are transposed into vectors of 32-bit lanes, each
// with four consecutive codes of its row, for as many blocks as stay in the first-level cache; then every token is
// multiplied with them. Simd has
//   Ints, Floats, kLanes    vectors of kLanes 32-bit values
//   kSigned                 whether codes with an offset of 128 are wanted with their sign, without the offset
//   columns, heads          dwords of kLanes rows, transposed
//   dot<range>              products of eight vectors of codes with 32 activations; `range` is the largest code
//   scaled<format>          the same with integer scales of sub-blocks
//   multiplier<format>      an integer scale as `scaled` wants it
//   pairs                   sums of the products of two 16-bit values

#include "gemm.h"

#include <string.h>

namespace attested {
namespace {

using Ints = Simd::Ints;
using Floats = Simd::Floats;
constexpr int kLanes = Simd::kLanes;
constexpr int kChunk = 512;       // columns that are transposed before they are multiplied
constexpr int kMostTokens = 256;  // that meet a panel before the next one

// A block of 32 of a panel.
struct alignas(64) Unit {
    Ints codes[8];
    Floats scale;
    Floats minimum;
};

// A super-block of a panel.
struct alignas(64) Super {
    Ints codes[64];
    Ints scales[16];  // of each `sub` weights
    Ints pairs[8];    // minimums, or with an offset scales, of two neighbours
    Floats scale;
    Floats minimum;
};

struct Rows {
    const uint8_t * data;
    size_t stride;
    Rows at(size_t offset) const { return {data + offset, stride}; }
};

Ints low4(Ints value) { return Simd::both(value, Simd::all(0x0f0f0f0f)); }
Ints high4(Ints value) { return low4(Simd::template right<4>(value)); }

// Codes of 4 bits: the low halves of 16 bytes, then the high ones.
void nibbles(Rows rows, Ints * out) {
    Ints packed[4];
    Simd::columns(rows.data, rows.stride, packed);
    for (int j = 0; j < 4; ++j) {
        out[j] = low4(packed[j]);
        out[4 + j] = high4(packed[j]);
    }
}

template <Format F> void unpack(Rows rows, Unit & out) {
    constexpr int start = traits(F).minimum ? 4 : 2;
    Ints head[2];
    Simd::heads(rows.data, rows.stride, head);
    out.scale = Simd::low_half(head[0]);
    if (traits(F).minimum) {
        out.minimum = Simd::high_half(head[0]);
    }
    if (F == Format::q8_0) {
        Simd::columns(rows.data + start, rows.stride, out.codes);
        Simd::columns(rows.data + start + 16, rows.stride, out.codes + 4);
        if (!Simd::kSigned) {
            for (int j = 0; j < 8; ++j) {
                out.codes[j] = Simd::differ(out.codes[j], Simd::all((int) 0x80808080));
            }
        }
        return;
    }
    const bool five = F == Format::q5_0 || F == Format::q5_1;
    nibbles(rows.at(five ? start + 4 : start), out.codes);
    if (F == Format::iq4_nl) {
        for (int j = 0; j < 8; ++j) {
            out.codes[j] = Simd::nonlinear(out.codes[j]);
        }
    }
    if (five) {
        const Ints high = F == Format::q5_1
                              ? head[1]
                              : Simd::either(Simd::template right32<16>(head[0]), Simd::template left32<16>(head[1]));
        Simd::fifth_bits(high, out.codes);
    }
}

Ints byte(Ints value, int index) {
    switch (index) {
        case 0: return Simd::both(value, Simd::all(0xff));
        case 1: return Simd::both(Simd::template right32<8>(value), Simd::all(0xff));
        case 2: return Simd::both(Simd::template right32<16>(value), Simd::all(0xff));
        default: return Simd::template right32<24>(value);
    }
}

Ints signed_byte(Ints value, int index) {
    switch (index) {
        case 0: return Simd::template signed_right32<24>(Simd::template left32<24>(value));
        case 1: return Simd::template signed_right32<24>(Simd::template left32<16>(value));
        case 2: return Simd::template signed_right32<24>(Simd::template left32<8>(value));
        default: return Simd::template signed_right32<24>(value);
    }
}

Ints pair(Ints first, Ints second) {
    return Simd::either(Simd::both(first, Simd::all(0xffff)), Simd::template left32<16>(second));
}

// Scales and minimums of sub-blocks, from vectors with a byte for each: 4 of them for 16, 2 for 8.
template <Format F> void scales(const Ints * scale_bytes, const Ints * minimum_bytes, Super & out) {
    constexpr int count = kSuper / traits(F).sub;
    Ints value[count];
    for (int j = 0; j < count; ++j) {
        value[j] = F == Format::q6_k || F == Format::q3_k ? signed_byte(scale_bytes[j / 4], j % 4) : byte(scale_bytes[j / 4], j % 4);
        out.scales[j] = Simd::template multiplier<F>(value[j]);
    }
    for (int j = 0; j < count / 2; ++j) {
        out.pairs[j] = traits(F).minimum
                           ? pair(byte(minimum_bytes[j / 2], j % 2 * 2), byte(minimum_bytes[j / 2], j % 2 * 2 + 1))
                           : pair(value[2 * j], value[2 * j + 1]);
    }
}

void unpack_q2_k(Rows rows, Super & out) {
    Ints scale[4], minimum[4], packed[4];
    Simd::columns(rows.data, rows.stride, scale);
    for (int j = 0; j < 4; ++j) {
        minimum[j] = high4(scale[j]);
        scale[j] = low4(scale[j]);
    }
    scales<Format::q2_k>(scale, minimum, out);
    const Ints three = Simd::all(0x03030303);
    for (int half = 0; half < 4; ++half) { // 16 of the 64 bytes
        Simd::columns(rows.data + 16 + half * 16, rows.stride, packed);
        Ints * to = out.codes + half / 2 * 32 + half % 2 * 4;
        for (int j = 0; j < 4; ++j) {
            to[j] = Simd::both(packed[j], three);
            to[8 + j] = Simd::both(Simd::template right<2>(packed[j]), three);
            to[16 + j] = Simd::both(Simd::template right<4>(packed[j]), three);
            to[24 + j] = Simd::both(Simd::template right<6>(packed[j]), three);
        }
    }
    Simd::columns(rows.data + 68, rows.stride, packed);
    out.scale = Simd::low_half(packed[3]);
    out.minimum = Simd::high_half(packed[3]);
}

// Bit `bit` of each byte, as the bit of value 4.
template <int bit> Ints third_bit(Ints value) {
    const Ints moved = bit < 2 ? Simd::template left<(bit < 2 ? 2 - bit : 0)>(value) : Simd::template right<(bit < 2 ? 0 : bit - 2)>(value);
    return Simd::both(moved, Simd::all(0x04040404));
}

template <int part> void codes_q3_k(const Ints * packed, const Ints * high, Ints * to) {
    const Ints three = Simd::all(0x03030303);
    for (int j = 0; j < 4; ++j) {
        to[j] = Simd::either(Simd::both(packed[j], three), third_bit<4 * part>(high[j]));
        to[8 + j] = Simd::either(Simd::both(Simd::template right<2>(packed[j]), three), third_bit<4 * part + 1>(high[j]));
        to[16 + j] = Simd::either(Simd::both(Simd::template right<4>(packed[j]), three), third_bit<4 * part + 2>(high[j]));
        to[24 + j] = Simd::either(Simd::both(Simd::template right<6>(packed[j]), three), third_bit<4 * part + 3>(high[j]));
    }
}

void unpack_q3_k(Rows rows, Super & out) {
    Ints tail[4], scale[4], packed[4], high[4];
    Simd::columns(rows.data + 94, rows.stride, tail); // two bytes of codes, twelve of scales, the scale of all
    out.scale = Simd::high_half(tail[3]);
    Ints word[3];
    for (int j = 0; j < 3; ++j) {
        word[j] = Simd::either(Simd::template right32<16>(tail[j]), Simd::template left32<16>(tail[j + 1]));
    }
    const Ints two = Simd::all(0x30303030);
    scale[0] = Simd::either(low4(word[0]), Simd::both(Simd::template left<4>(word[2]), two));
    scale[1] = Simd::either(low4(word[1]), Simd::both(Simd::template left<2>(word[2]), two));
    scale[2] = Simd::either(high4(word[0]), Simd::both(word[2], two));
    scale[3] = Simd::either(high4(word[1]), Simd::both(Simd::template right<2>(word[2]), two));
    for (int j = 0; j < 4; ++j) {
        scale[j] = Simd::less_bytes(scale[j], Simd::all(0x20202020));
    }
    scales<Format::q3_k>(scale, nullptr, out);
    for (int side = 0; side < 2; ++side) {
        Simd::columns(rows.data + side * 16, rows.stride, high);
        Simd::columns(rows.data + 32 + side * 16, rows.stride, packed);
        codes_q3_k<0>(packed, high, out.codes + side * 4);
        Simd::columns(rows.data + 64 + side * 16, rows.stride, packed);
        codes_q3_k<1>(packed, high, out.codes + 32 + side * 4);
    }
}

// The first 16 bytes of q4_k and q5_k: both scales, then 6 bits for the scale and for the minimum of each sub-block.
template <Format F> void scales_of_eight(Rows rows, Super & out) {
    Ints head[4], scale[2], minimum[2];
    Simd::columns(rows.data, rows.stride, head);
    out.scale = Simd::low_half(head[0]);
    out.minimum = Simd::high_half(head[0]);
    const Ints six = Simd::all(0x3f3f3f3f), two = Simd::all(0x30303030);
    scale[0] = Simd::both(head[1], six);
    minimum[0] = Simd::both(head[2], six);
    scale[1] = Simd::either(low4(head[3]), Simd::both(Simd::template right<2>(head[1]), two));
    minimum[1] = Simd::either(high4(head[3]), Simd::both(Simd::template right<2>(head[2]), two));
    scales<F>(scale, minimum, out);
}

void unpack_q4_k(Rows rows, Super & out) {
    scales_of_eight<Format::q4_k>(rows, out);
    Ints packed[4];
    for (int quarter = 0; quarter < 8; ++quarter) {
        Simd::columns(rows.data + 16 + quarter * 16, rows.stride, packed);
        Ints * to = out.codes + quarter / 2 * 16 + quarter % 2 * 4;
        for (int j = 0; j < 4; ++j) {
            to[j] = low4(packed[j]);
            to[8 + j] = high4(packed[j]);
        }
    }
}

// Bit `bit` of each byte, as the bit of value 16.
template <int bit> Ints fifth_bit(Ints value) {
    const Ints moved = bit < 4 ? Simd::template left<(bit < 4 ? 4 - bit : 0)>(value) : Simd::template right<(bit < 4 ? 0 : bit - 4)>(value);
    return Simd::both(moved, Simd::all(0x10101010));
}

template <int step> void codes_q5_k(Rows rows, const Ints * high, Ints * to) {
    Ints packed[4];
    for (int side = 0; side < 2; ++side) {
        Simd::columns(rows.data + 48 + step * 32 + side * 16, rows.stride, packed);
        for (int j = 0; j < 4; ++j) {
            to[step * 16 + side * 4 + j] = Simd::either(low4(packed[j]), fifth_bit<2 * step>(high[side * 4 + j]));
            to[step * 16 + 8 + side * 4 + j] = Simd::either(high4(packed[j]), fifth_bit<2 * step + 1>(high[side * 4 + j]));
        }
    }
}

void unpack_q5_k(Rows rows, Super & out) {
    scales_of_eight<Format::q5_k>(rows, out);
    Ints high[8];
    Simd::columns(rows.data + 16, rows.stride, high);
    Simd::columns(rows.data + 32, rows.stride, high + 4);
    codes_q5_k<0>(rows, high, out.codes);
    codes_q5_k<1>(rows, high, out.codes);
    codes_q5_k<2>(rows, high, out.codes);
    codes_q5_k<3>(rows, high, out.codes);
}

void unpack_q6_k(Rows rows, Super & out) {
    Ints scale[4], first[4], second[4], high[4];
    Simd::columns(rows.data + 192, rows.stride, scale);
    scales<Format::q6_k>(scale, nullptr, out);
    Simd::columns(rows.data + 194, rows.stride, first);
    out.scale = Simd::high_half(first[3]);
    const Ints two = Simd::all(0x30303030);
    for (int part = 0; part < 4; ++part) { // 16 of the 32 bytes with high bits, of either half
        const int half = part / 2, side = part % 2;
        Simd::columns(rows.data + half * 64 + side * 16, rows.stride, first);
        Simd::columns(rows.data + half * 64 + 32 + side * 16, rows.stride, second);
        Simd::columns(rows.data + 128 + half * 32 + side * 16, rows.stride, high);
        Ints * to = out.codes + half * 32 + side * 4;
        for (int j = 0; j < 4; ++j) {
            to[j] = Simd::either(low4(first[j]), Simd::both(Simd::template left<4>(high[j]), two));
            to[8 + j] = Simd::either(low4(second[j]), Simd::both(Simd::template left<2>(high[j]), two));
            to[16 + j] = Simd::either(high4(first[j]), Simd::both(high[j], two));
            to[24 + j] = Simd::either(high4(second[j]), Simd::both(Simd::template right<2>(high[j]), two));
        }
    }
}

template <Format F> void unpack(Rows rows, Super & out) {
    switch (F) {
        case Format::q2_k: return unpack_q2_k(rows, out);
        case Format::q3_k: return unpack_q3_k(rows, out);
        case Format::q4_k: return unpack_q4_k(rows, out);
        case Format::q5_k: return unpack_q5_k(rows, out);
        default: return unpack_q6_k(rows, out);
    }
}

constexpr int range(Format f) {
    return f == Format::q5_0 || f == Format::q5_1 ? 31 : f == Format::q8_0 || f == Format::iq4_nl ? 255 : 15;
}

constexpr int shift(int offset) { return offset == 4 ? 2 : offset == 32 ? 5 : 0; }

// One block with `tokens` of a group of `slots`; `sums` has a vector for each token.
template <Format F> struct Block32 {
    using Panel = Unit;
    static void multiply(const Unit & w, const uint8_t * inputs, int slots, int tokens, Floats * sums) {
        constexpr bool minimum = traits(F).minimum;
        Ints codes[8];
        for (int j = 0; j < 8; ++j) {
            codes[j] = w.codes[j];
        }
        const Floats scale = w.scale, least = w.minimum;
        const float * scales = (const float *) (inputs + slots * kUnit);
        const float * sum = scales + slots;
        for (int t = 0; t < tokens; ++t) {
            const Ints start = minimum || (Simd::kSigned && range(F) == 255) ? Simd::all(0) : Simd::all(((const int *) sum)[t]);
            const Ints products = Simd::template dot<range(F)>(codes, (const int8_t *) inputs + t * kUnit, start);
            Floats total = Simd::fma(Simd::times(scale, Simd::each(scales[t])), Simd::floats(products), sums[t]);
            if (minimum) {
                total = Simd::fma(least, Simd::each(sum[t]), total);
            }
            sums[t] = total;
        }
    }
};

template <Format F> struct Block256 {
    using Panel = Super;
    static void multiply(const Super & w, const uint8_t * inputs, int slots, int tokens, Floats * sums) {
        Ints totals[kGroup];
        for (int t = 0; t < tokens; ++t) {
            totals[t] = Simd::all(0);
        }
        for (int unit = 0; unit < kSuper / kUnit; ++unit) {
            Ints codes[8];
            for (int j = 0; j < 8; ++j) {
                codes[j] = w.codes[unit * 8 + j];
            }
            const Ints first = w.scales[traits(F).sub == 16 ? 2 * unit : unit];
            const Ints second = w.scales[traits(F).sub == 16 ? 2 * unit + 1 : unit];
            const int8_t * x = (const int8_t *) inputs + unit * slots * kUnit;
            for (int t = 0; t < tokens; ++t) {
                totals[t] = Simd::template scaled<F>(codes, first, second, x + t * kUnit, totals[t]);
            }
        }
        const float * scales = (const float *) (inputs + slots * kSuper);
        finish(w, scales, (const int *) (scales + slots), tokens, totals, sums);
    }
    static void finish(const Super & w, const float * scales, const int * halves, int tokens, const Ints * totals, Floats * sums) {
        constexpr int count = kSuper / traits(F).sub / 2;
        Ints pairs[count];
        for (int j = 0; j < count; ++j) {
            pairs[j] = w.pairs[j];
        }
        const Floats scale = w.scale, least = w.minimum;
        for (int t = 0; t < tokens; ++t) {
            Ints other = Simd::all(0);
            for (int j = 0; j < count; ++j) {
                other = Simd::pairs(other, pairs[j], Simd::all(halves[t * 8 + j]));
            }
            const Floats input = Simd::each(scales[t]);
            Ints products = totals[t];
            if (!traits(F).minimum) {
                products = Simd::less(products, Simd::template left32<shift(traits(F).offset)>(other));
            }
            Floats total = Simd::fma(Simd::times(scale, input), Simd::floats(products), sums[t]);
            if (traits(F).minimum) {
                total = Simd::minus_fma(Simd::times(least, input), Simd::floats(other), total);
            }
            sums[t] = total;
        }
    }
};

// Blocks one after the other.
template <Format F, class Block> struct Each : Block {
    static void run(const typename Block::Panel * w, int count, const uint8_t * inputs, int slots, int tokens, Floats * sums) {
        const size_t bytes = input_block_bytes(traits(F).block, slots);
        for (int b = 0; b < count; ++b) {
            Block::multiply(w[b], inputs + b * bytes, slots, tokens, sums);
        }
    }
};
template <Format F> using Small = Each<F, Block32<F>>;
template <Format F> using Large = Each<F, Block256<F>>;

// The last rows of a matrix, where they do not fill a panel: copied, so that nothing behind them is read.
struct Tail {
    alignas(64) uint8_t bytes[kLanes][kChunk * 34 / 32 + 64];
    Rows copy(const uint8_t * from, size_t stride, int64_t rows, size_t size) {
        for (int64_t row = 0; row < kLanes; ++row) {
            if (row < rows) {
                memcpy(bytes[row], from + row * stride, size);
            } else {
                memset(bytes[row], 0, size);
            }
        }
        return {bytes[0], sizeof(bytes[0])};
    }
};

// Asks for the memory behind a panel as far as the panel itself was read.
void fetch(const uint8_t * from, size_t size) {
    for (size_t at = 0; at < size; at += 64) {
        Simd::prefetch(from + at);
    }
}

// One panel with tokens [begin, end), at most kMostTokens.
template <Format F, class Block> void panel(const Product & p, int64_t row, int64_t begin, int64_t end, bool ahead) {
    constexpr Traits format = traits(F);
    constexpr int kBlocks = kChunk / format.block;
    const int slots = p.tokens < kGroup ? (int) p.tokens : kGroup;
    const size_t input_bytes = input_block_bytes(format.block, slots);
    const int64_t rows = p.rows - row < kLanes ? p.rows - row : kLanes;
    typename Block::Panel blocks[kBlocks];
    Floats sums[kMostTokens];
    for (int64_t t = 0; t < end - begin; ++t) {
        sums[t] = Simd::each(0.0f);
    }
    Tail tail;
    const uint8_t * next = p.weights + (row + kLanes) * p.stride;
    for (int64_t block = 0; block < p.blocks; block += kBlocks) {
        const int count = p.blocks - block < kBlocks ? (int) (p.blocks - block) : kBlocks;
        const uint8_t * from = p.weights + row * p.stride + block * format.bytes;
        const Rows source = rows == kLanes ? Rows{from, p.stride} : tail.copy(from, p.stride, rows, (size_t) count * format.bytes);
        for (int b = 0; b < count; ++b) {
            unpack<F>(source.at((size_t) b * format.bytes), blocks[b]);
            if (ahead) {
                fetch(next, (size_t) format.bytes * kLanes);
                next += (size_t) format.bytes * kLanes;
            }
        }
        for (int64_t token = begin; token < end; token += kGroup) {
            const int some = end - token < kGroup ? (int) (end - token) : kGroup;
            const uint8_t * inputs = p.inputs + (token / kGroup * p.blocks + block) * input_bytes;
            Block::run(blocks, count, inputs, slots, some, sums + (token - begin));
        }
    }
    for (int64_t t = begin; t < end; ++t) {
        Simd::store(p.out + t * p.out_stride + row, sums[t - begin], (int) rows);
    }
}

template <Format F, class Block> void panels(const Product & p) {
    for (int64_t begin = 0; begin < p.tokens; begin += kMostTokens) {
        const int64_t end = p.tokens - begin < kMostTokens ? p.tokens : begin + kMostTokens;
        for (int64_t row = 0; row < p.rows; row += kLanes) {
            panel<F, Block>(p, row, begin, end, begin == 0);
        }
    }
}

template <template <Format> class Of32, template <Format> class Of256> void dispatch(const Product & p) {
    switch (p.format) {
        case Format::q4_0: return panels<Format::q4_0, Of32<Format::q4_0>>(p);
        case Format::q4_1: return panels<Format::q4_1, Of32<Format::q4_1>>(p);
        case Format::q5_0: return panels<Format::q5_0, Of32<Format::q5_0>>(p);
        case Format::q5_1: return panels<Format::q5_1, Of32<Format::q5_1>>(p);
        case Format::q8_0: return panels<Format::q8_0, Of32<Format::q8_0>>(p);
        case Format::iq4_nl: return panels<Format::iq4_nl, Of32<Format::iq4_nl>>(p);
        case Format::q2_k: return panels<Format::q2_k, Of256<Format::q2_k>>(p);
        case Format::q3_k: return panels<Format::q3_k, Of256<Format::q3_k>>(p);
        case Format::q4_k: return panels<Format::q4_k, Of256<Format::q4_k>>(p);
        case Format::q5_k: return panels<Format::q5_k, Of256<Format::q5_k>>(p);
        case Format::q6_k: return panels<Format::q6_k, Of256<Format::q6_k>>(p);
    }
}

} // namespace
} // namespace attested
