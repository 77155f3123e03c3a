// The arithmetic of products in plain C++, as docs/adr/0010 defines it: every other variant has to give these bits.
#include "gemm.h"

#include <math.h>
#include <string.h>

#include "ggml.h"

namespace attested {
namespace {

float half(const uint8_t * bytes) {
    ggml_fp16_t value;
    memcpy(&value, bytes, sizeof(value));
    return ggml_fp16_to_fp32(value);
}

// A block of one row: signed codes, its scale and minimum, and the integer scale and minimum of each sub-block.
struct Block {
    int codes[kSuper];
    int scales[16];
    int minimums[16];
    float scale;
    float minimum;
};

constexpr int8_t kNonlinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

int nibble(const uint8_t * bytes, int k) { return k < 16 ? bytes[k] & 15 : bytes[k - 16] >> 4; }

void block_of_32(Format format, const uint8_t * at, Block & out) {
    const bool minimum = traits(format).minimum;
    const uint8_t * codes = at + (minimum ? 4 : 2);
    out.scale = half(at);
    out.minimum = minimum ? half(at + 2) : 0.0f;
    uint32_t high = 0;
    if (format == Format::q5_0 || format == Format::q5_1) {
        memcpy(&high, codes, sizeof(high));
        codes += sizeof(high);
    }
    for (int k = 0; k < kUnit; ++k) {
        switch (format) {
            case Format::q8_0: out.codes[k] = (int8_t) codes[k]; break;
            case Format::iq4_nl: out.codes[k] = kNonlinear[nibble(codes, k)]; break;
            default: out.codes[k] = (nibble(codes, k) | (int) (high >> k & 1) << 4) - traits(format).offset;
        }
    }
}

// The 6-bit scales and minimums of q4_k and q5_k.
void scales_of_eight(const uint8_t * q, Block & out) {
    for (int j = 0; j < 4; ++j) {
        out.scales[j] = q[j] & 63;
        out.minimums[j] = q[j + 4] & 63;
        out.scales[j + 4] = (q[j + 8] & 15) | (q[j] >> 6) << 4;
        out.minimums[j + 4] = q[j + 8] >> 4 | (q[j + 4] >> 6) << 4;
    }
}

void block_of_256(Format format, const uint8_t * at, Block & out) {
    out.minimum = 0.0f;
    for (int k = 0; k < kSuper; ++k) {
        const int part = k / 128, shift = k % 128 / 32, l = k % 32;
        const int in_pair = k / 64 * 32 + l; // where q4_k and q5_k have the nibbles of k
        const int pair = k % 64 / 32 * 4;
        switch (format) {
            case Format::q2_k: out.codes[k] = at[16 + part * 32 + l] >> (2 * shift) & 3; break;
            case Format::q3_k:
                out.codes[k] = (at[32 + part * 32 + l] >> (2 * shift) & 3) + (at[l] >> (4 * part + shift) & 1) * 4 - 4;
                break;
            case Format::q4_k: out.codes[k] = at[16 + in_pair] >> pair & 15; break;
            case Format::q5_k: out.codes[k] = (at[48 + in_pair] >> pair & 15) | (at[16 + l] >> (k / 32) & 1) << 4; break;
            default: // q6_k
                out.codes[k] = (at[part * 64 + shift % 2 * 32 + l] >> (shift / 2 * 4) & 15) +
                               (at[128 + part * 32 + l] >> (2 * shift) & 3) * 16 - 32;
        }
    }
    for (int j = 0; j < 16; ++j) {
        if (format == Format::q2_k) {
            out.scales[j] = at[j] & 15;
            out.minimums[j] = at[j] >> 4;
        } else if (format == Format::q3_k) {
            const int low = at[96 + j % 8] >> (j / 8 * 4) & 15;
            out.scales[j] = (low | (at[104 + j % 4] >> (j / 4 * 2) & 3) << 4) - 32;
        } else if (format == Format::q6_k) {
            out.scales[j] = (int8_t) at[192 + j];
        }
    }
    switch (format) {
        case Format::q2_k: out.scale = half(at + 80), out.minimum = half(at + 82); break;
        case Format::q3_k: out.scale = half(at + 108); break;
        case Format::q6_k: out.scale = half(at + 208); break;
        default: // q4_k, q5_k
            out.scale = half(at), out.minimum = half(at + 2);
            scales_of_eight(at + 4, out);
    }
}

// Activations of one token in one block.
struct Input {
    int8_t codes[kSuper];
    float scale;
    float sum; // scale times the sum of all codes
};

void input_of(const Product & p, int64_t token, int64_t block, Input & out) {
    const Traits & format = traits(p.format);
    const int slots = p.tokens < kGroup ? (int) p.tokens : kGroup, slot = (int) (token % kGroup);
    const size_t bytes = input_block_bytes(format.block, slots);
    const uint8_t * at = p.inputs + (token / kGroup * p.blocks + block) * bytes;
    for (int unit = 0; unit < format.block / kUnit; ++unit) {
        memcpy(out.codes + unit * kUnit, at + (unit * slots + slot) * kUnit, kUnit);
    }
    int sum = 0;
    for (int k = 0; k < format.block; ++k) {
        sum += out.codes[k];
    }
    memcpy(&out.scale, at + (size_t) slots * format.block + slot * sizeof(float), sizeof(float));
    out.sum = out.scale * (float) sum;
}

float add_block(const Traits & format, const Block & w, const Input & x, float sum) {
    if (!format.sub) {
        int products = 0;
        for (int k = 0; k < kUnit; ++k) {
            products += w.codes[k] * x.codes[k];
        }
        sum = fmaf(w.scale * x.scale, (float) products, sum);
        return format.minimum ? fmaf(w.minimum, x.sum, sum) : sum;
    }
    int products = 0, minimums = 0;
    for (int j = 0; j < kSuper / format.sub; ++j) {
        for (int k = j * format.sub; k < (j + 1) * format.sub; ++k) {
            products += w.scales[j] * w.codes[k] * x.codes[k];
            minimums += w.minimums[j] * x.codes[k];
        }
    }
    sum = fmaf(w.scale * x.scale, (float) products, sum);
    return format.minimum ? fmaf(-(w.minimum * x.scale), (float) minimums, sum) : sum;
}

} // namespace

void gemm_plain(const Product & p) {
    const Traits & format = traits(p.format);
    Block w;
    Input x;
    memset(&w, 0, sizeof(w));
    for (int64_t row = 0; row < p.rows; ++row) {
        for (int64_t token = 0; token < p.tokens; ++token) {
            p.out[token * p.out_stride + row] = 0.0f;
        }
        for (int64_t block = 0; block < p.blocks; ++block) {
            const uint8_t * at = p.weights + row * p.stride + block * format.bytes;
            format.block == kUnit ? block_of_32(p.format, at, w) : block_of_256(p.format, at, w);
            for (int64_t token = 0; token < p.tokens; ++token) {
                float & sum = p.out[token * p.out_stride + row];
                input_of(p, token, block, x);
                sum = add_block(format, w, x, sum);
            }
        }
    }
}

} // namespace attested
