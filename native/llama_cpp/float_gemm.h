// Products of F32, F16 and BF16 weights in arithmetic "attested-1": sixteen lanes, lane l takes columns l, l + 16, ... by fma in
// f32, in order; then the lanes are added as a tree (l and l + 8, + 4, + 2, + 1). Activations are rounded to the weights' type
// first, as ggml does. The same for any number of tokens, threads and either vector width. See docs/adr/0010.
#pragma once

#include <cstddef>
#include <cstdint>

struct ggml_compute_params;
struct ggml_tensor;

namespace attested {

enum class FloatType : int32_t { f32, f16, bf16 };

struct FloatProduct {
    FloatType type;
    const char * weights; // rows `stride` bytes apart
    size_t stride;
    int64_t rows, columns;
    const float * inputs; // rounded; rows of float_columns(columns), filled up with zeros
    int64_t tokens;
    float * out; // out[token * out_stride + row]
    size_t out_stride;
};

static constexpr int64_t float_columns(int64_t columns) { return (columns + 15) / 16 * 16; }

void float_gemm_plain(const FloatProduct & product);
void float_gemm_avx2(const FloatProduct & product);
void float_gemm_avx512(const FloatProduct & product);

// Computes a product of ggml's, if it is one of these. Called by every thread.
bool float_matmul(const ggml_compute_params * params, ggml_tensor * out);

// Work memory that it needs, 0 where it computes nothing.
size_t float_matmul_bytes(const ggml_tensor * out);

} // namespace attested
