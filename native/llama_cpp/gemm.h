// Products of quantised weights with activations: what the parts of it share. See docs/adr/0010-one-arithmetic.md.
//
// The activations are quantised to eight bits and laid out once for a product; then each thread multiplies panels of weight
// rows with all of them. Lanes are rows of weights, so a float sum of one output stays in one lane from the first block of
// its row to the last, whatever the width of the vectors.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace attested {

enum class Format { q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, q2_k, q3_k, q4_k, q5_k, q6_k };

constexpr int kFormats = 11;
constexpr int kUnit = 32;   // weights in a block, or in the part of a super-block that is multiplied at once
constexpr int kSuper = 256; // weights in a super-block
constexpr int kGroup = 16;  // tokens whose activations lie together

// What is known of a format beside the layout of its bits.
struct Traits {
    int block;   // weights in a block with float scales of its own
    int bytes;   // of such a block
    int offset;  // what an unsigned code is too large by
    bool minimum; // whether each block has a least value beside its scale
    int sub;     // weights under one integer scale, 0 without
};

constexpr Traits kTraits[kFormats] = {
    {32, 18, 8, false, 0},    // q4_0
    {32, 20, 0, true, 0},     // q4_1
    {32, 22, 16, false, 0},   // q5_0
    {32, 24, 0, true, 0},     // q5_1
    {32, 34, 128, false, 0},  // q8_0
    {32, 18, 128, false, 0},  // iq4_nl
    {256, 84, 0, true, 16},   // q2_k
    {256, 110, 4, false, 16}, // q3_k
    {256, 144, 0, true, 32},  // q4_k
    {256, 176, 0, true, 32},  // q5_k
    {256, 210, 32, false, 16} // q6_k
};

constexpr const Traits & traits(Format format) { return kTraits[(int) format]; }

// Activations lie in groups of kGroup tokens (of all tokens, if there are fewer); a group has a block after the other. With
// `slots` tokens in each group, a block of 32 is: codes int8[slots][32], scales float[slots], and for each token the scale
// times the sum of its codes (float) where the format has minimums, else minus `offset` times that sum (int32).
// A block of 256 is: codes int8[8][slots][32], scales float[slots], sums of the codes of each `sub` weights int16[slots][16].
constexpr size_t input_block_bytes(int block, int slots) { return (size_t) slots * (block == kUnit ? 40 : 292); }

// Rows of weights with all tokens: out[token * out_stride + row].
struct Product {
    Format format;
    const uint8_t * weights;
    size_t stride; // bytes from one row of weights to the next
    int64_t rows;
    int64_t blocks; // in a row
    const uint8_t * inputs;
    int64_t tokens;
    float * out;
    size_t out_stride;
};

using Multiply = void (*)(const Product & product);

void gemm_plain(const Product & product);
void gemm_avx2(const Product & product);
void gemm_avxvnni(const Product & product);
void gemm_avx512(const Product & product);
void gemm_amx(const Product & product);
void gemm_amx_emulated(const Product & product); // the same with tile operations in C++; needs AVX-512

// One row of activations, blocks [begin, end) of it, as slot `slot` of a group at `group`.
void quantise(const Traits & format, const float * row, int64_t begin, int64_t end, uint8_t * group, int slots, int slot);

} // namespace attested
