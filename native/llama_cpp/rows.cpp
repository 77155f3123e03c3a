// Products of Q4_1 and Q8_0 weights with several rows of activations at once, bit for bit those of llama.cpp.
//
// llama.cpp multiplies one row of weights with one row of activations at a time: each weight is taken apart again for
// every row of a batch, and one chain of dependent additions is all that is under way. Here a few rows of weights meet up
// to eight rows of activations at once. Every sum is made of the same products in the same order and lanes as in
// ggml_vec_dot_q4_1_q8_1 and ggml_vec_dot_q8_0_q8_0 (ggml-cpu/arch/x86/quants.c), so no bit of a result changes and a
// row gives the same in every company.
//
// The other thing that makes a row differ in company is attention: with several threads ggml splits the tokens that a single
// row looks at among them, and adds up in another order than for several rows. Here a single row takes the way of several.
//
// attested.cmake links this file into ggml-cpu and puts it in front of two functions: ggml_compute_forward_mul_mat_tiled, through
// which ggml offers a whole product to a faster path, and ggml_compute_forward_flash_attn_ext. See docs/adr/0009.

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "simd-mappings.h"
#include "tiled/tiled.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ROWS 1
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define ROWS_512 1
#endif
#endif

#ifdef ROWS

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kBlock = 32;   // weights in a block of either format
constexpr int kTile = 8;     // rows of activations that meet the weights at once, at most
constexpr int kAhead = 4096; // bytes of weights asked for in advance; measured, see docs/benchmarks.md
constexpr int64_t kPiece = 256 << 10; // bytes of weights that one thread takes at a time, at most

static_assert(QK4_1 == kBlock && QK8_0 == kBlock && QK8_1 == kBlock, "blocks of 32 weights");

// From a table, as ggml does it.
float half(ggml_half value) { return GGML_CPU_FP16_TO_FP32(value); }

// A block of NX rows of activations as the inner loop reads it.
template <int NX> struct alignas(64) Q8_1Inputs {
    int8_t quants[NX][kBlock];
    float sums[kTile]; // scale times the sum of the quants; zero beyond NX
    float scales[NX];
};
template <int NX> struct alignas(64) Q8_0Inputs {
    int8_t quants[NX][kBlock];
    int32_t offset[NX][8]; // -128 times each sum of four quants, see Avx512::unpack
    float scales[NX];
};

struct Q4_1 {
    using Weights = block_q4_1;
    using Input = block_q8_1;
    template <int NX> using Inputs = Q8_1Inputs<NX>;
    static constexpr bool minimums = true; // each block has a least weight, to be multiplied with the sum of the inputs
    static float scale(const Input & input) { return half(input.data.data.d); }
};
struct Q8_0 {
    using Weights = block_q8_0;
    using Input = block_q8_0;
    template <int NX> using Inputs = Q8_0Inputs<NX>;
    static constexpr bool minimums = false;
    static float scale(const Input & input) { return half(input.d); }
};

// One row of weights in 256 bits, as ggml does it.
struct Avx2 {
    static constexpr int rows = 1;
    static constexpr int vectors(int) { return 1; }
    using Floats = __m256;
    using Ints = __m256i;

    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats all(float value) { return _mm256_set1_ps(value); }
    static Floats eight(const float * values) { return _mm256_load_ps(values); }
    static Ints eight(const void * bytes) { return _mm256_load_si256((const __m256i *) bytes); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static __m256 of_row(Floats value, int) { return value; }

    using Scale = float;
    static Scale scale(const block_q4_1 & a, const block_q4_1 &) { return half(a.data.data.d); }
    static Scale scale(const block_q8_0 & a, const block_q8_0 &) { return half(a.d); }
    static Floats scaled(Scale weights, float inputs) { return all(weights * inputs); }
    static Floats minimum(const block_q4_1 & a, const block_q4_1 &) { return all(half(a.data.data.m)); }
    static Ints unpack(const block_q4_1 & a, const block_q4_1 &) {
        const __m128i packed = _mm_loadu_si128((const __m128i *) a.qs);
        return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(packed, 4), packed), _mm256_set1_epi8(15));
    }
    static Ints unpack(const block_q8_0 & a, const block_q8_0 &) { return _mm256_loadu_si256((const __m256i *) a.qs); }
    static void offset(int32_t *, const int8_t *) {}
    static Floats pairs(Ints without_sign, Ints with_sign) {
        const Ints sums = _mm256_maddubs_epi16(without_sign, with_sign);
        return _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_set1_epi16(1), sums));
    }
    template <int NX> static Floats dot(Ints weights, const Q8_1Inputs<NX> & inputs, int x) {
        return pairs(weights, eight((const void *) inputs.quants[x]));
    }
    template <int NX> static Floats dot(Ints weights, const Q8_0Inputs<NX> & inputs, int x) {
        const Ints quants = eight((const void *) inputs.quants[x]);
        return pairs(_mm256_sign_epi8(weights, weights), _mm256_sign_epi8(quants, weights));
    }
};

#ifdef ROWS_512

// Two rows of weights in 512 bits: the eight lanes of the first, then the eight of the second.
struct Avx512 {
    static constexpr int rows = 2;
    // Two vectors share what is loaded of the activations; for few of those one is faster.
    static constexpr int vectors(int inputs) { return inputs >= 4 ? 2 : 1; }
    using Floats = __m512;
    using Ints = __m512i;

    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats eight(const float * values) { return _mm512_broadcast_f32x8(_mm256_load_ps(values)); }
    static Ints eight(const void * bytes) { return _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i *) bytes)); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static __m256 of_row(Floats value, int row) {
        return row ? _mm512_extractf32x8_ps(value, 1) : _mm512_castps512_ps256(value);
    }

    // The scales (and minimums) of both blocks: values 0 and 2 (and 1 and 3).
    static __m128 halves(const block_q4_1 & a, const block_q4_1 & b) {
        uint32_t first, second;
        memcpy(&first, &a, sizeof(first));
        memcpy(&second, &b, sizeof(second));
        return _mm_cvtph_ps(_mm_insert_epi32(_mm_cvtsi32_si128((int) first), (int) second, 1));
    }
    static __m128 halves(const block_q8_0 & a, const block_q8_0 & b) {
        return _mm_cvtph_ps(_mm_insert_epi16(_mm_cvtsi32_si128(a.d), b.d, 2));
    }
    using Scale = Floats;
    template <class W> static Scale scale(const W & a, const W & b) {
        const __m512i from = _mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0);
        return _mm512_permutexvar_ps(from, _mm512_zextps128_ps512(halves(a, b)));
    }
    static Floats scaled(Scale weights, float inputs) { return _mm512_mul_ps(weights, _mm512_set1_ps(inputs)); }
    static Floats minimum(const block_q4_1 & a, const block_q4_1 & b) {
        const __m512i from = _mm512_set_epi32(3, 3, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1);
        return _mm512_permutexvar_ps(from, _mm512_zextps128_ps512(halves(a, b)));
    }
    static Ints unpack(const block_q4_1 & a, const block_q4_1 & b) {
        Ints value = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) a.qs));
        value = _mm512_mask_broadcast_i32x4(value, 0xFF00, _mm_loadu_si128((const __m128i *) b.qs));
        value = _mm512_srlv_epi64(value, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0));
        return _mm512_and_si512(value, _mm512_set1_epi8(15));
    }
    // The instruction wants one factor without a sign: 128 is added to every weight here, and `offset` takes it off the sum.
    static Ints unpack(const block_q8_0 & a, const block_q8_0 & b) {
        Ints value = _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *) a.qs));
        value = _mm512_inserti64x4(value, _mm256_loadu_si256((const __m256i *) b.qs), 1);
        return _mm512_xor_si512(value, _mm512_set1_epi8((char) 0x80));
    }
    static void offset(int32_t * eight, const int8_t * quants) {
        const __m256i sums = _mm256_dpbusd_epi32(
            _mm256_setzero_si256(), _mm256_set1_epi8((char) 0x80), _mm256_load_si256((const __m256i *) quants));
        _mm256_store_si256((__m256i *) eight, _mm256_sub_epi32(_mm256_setzero_si256(), sums));
    }
    template <int NX> static Floats dot(Ints weights, const Q8_1Inputs<NX> & inputs, int x) {
        return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), weights, eight((const void *) inputs.quants[x])));
    }
    template <int NX> static Floats dot(Ints weights, const Q8_0Inputs<NX> & inputs, int x) {
        const Ints sums = eight((const void *) inputs.offset[x]);
        return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(sums, weights, eight((const void *) inputs.quants[x])));
    }
};
using Widest = Avx512;

#else
using Widest = Avx2;
#endif

// The order of ggml's hsum_float_8.
float total(__m256 eight) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    sum = _mm_add_ss(sum, _mm_movehdup_ps(sum));
    return _mm_cvtss_f32(sum);
}

// Rows `stride` bytes apart.
struct Weights {
    const char * data;
    size_t stride;
    int64_t count;
};
struct Inputs {
    const char * data;
    size_t stride;
    int64_t count;
    int blocks;
};
struct Output {
    float * data; // of row x of activations and row r of weights: data[x * stride + r]
    size_t stride;
};

// Memory of this thread that grows to what a product needs.
void * scratch(size_t size) {
    struct Scratch {
        void * memory = nullptr;
        size_t size = 0;
        ~Scratch() { free(memory); }
    };
    static thread_local Scratch own;
    if (own.size < size) {
        free(own.memory);
        own.memory = aligned_alloc(64, size);
        own.size = own.memory ? size : 0;
        GGML_ASSERT(own.memory && "no memory to arrange the activations of a batch");
    }
    return own.memory;
}

template <class Simd, class Format, int NX> auto arrange(const Inputs & inputs) {
    using Block = typename Format::template Inputs<NX>;
    auto * blocks = (Block *) scratch(sizeof(Block) * inputs.blocks);
    for (int b = 0; b < inputs.blocks; ++b) {
        Block & block = blocks[b];
        if constexpr (Format::minimums) {
            memset(block.sums, 0, sizeof(block.sums));
        }
        for (int x = 0; x < NX; ++x) {
            const auto & input = ((const typename Format::Input *) (inputs.data + x * inputs.stride))[b];
            memcpy(block.quants[x], input.qs, kBlock);
            block.scales[x] = Format::scale(input);
            if constexpr (Format::minimums) {
                block.sums[x] = half(input.data.data.s);
            } else {
                Simd::offset(block.offset[x], block.quants[x]);
            }
        }
    }
    return (const Block *) blocks;
}

// NV vectors of weights with NX rows of activations. Of the last vector's rows fewer may be there: one is then read twice.
template <class Simd, class Format, int NV, int NX, class Block>
void tile(const Weights & weights, const Block * inputs, int blocks, const Output & out) {
    using W = typename Format::Weights;
    const W * first[NV];
    const W * second[NV];
    typename Simd::Floats sums[NV][NX];
    typename Simd::Floats minimums[NV];
    for (int v = 0; v < NV; ++v) {
        const int64_t row = v * Simd::rows;
        first[v] = (const W *) (weights.data + row * weights.stride);
        second[v] = (const W *) (weights.data + std::min<int64_t>(row + Simd::rows - 1, weights.count - 1) * weights.stride);
        minimums[v] = Simd::zero();
        for (int x = 0; x < NX; ++x) {
            sums[v][x] = Simd::zero();
        }
    }
    for (int b = 0; b < blocks; ++b) {
        typename Simd::Ints quants[NV];
        typename Simd::Scale scales[NV];
        for (int v = 0; v < NV; ++v) {
            const W & one = first[v][b];
            const W & other = second[v][b];
            _mm_prefetch((const char *) &one + kAhead, _MM_HINT_T0);
            if (Simd::rows > 1) {
                _mm_prefetch((const char *) &other + kAhead, _MM_HINT_T0);
            }
            quants[v] = Simd::unpack(one, other);
            scales[v] = Simd::scale(one, other);
            if constexpr (Format::minimums) {
                minimums[v] = Simd::fma(Simd::minimum(one, other), Simd::eight(inputs[b].sums), minimums[v]);
            }
        }
        for (int x = 0; x < NX; ++x) {
            for (int v = 0; v < NV; ++v) {
                const auto scale = Simd::scaled(scales[v], inputs[b].scales[x]);
                sums[v][x] = Simd::fma(scale, Simd::dot(quants[v], inputs[b], x), sums[v][x]);
            }
        }
    }
    for (int v = 0; v < NV; ++v) {
        for (int r = 0; r < Simd::rows && v * Simd::rows + r < weights.count; ++r) {
            alignas(32) float least[kTile];
            _mm256_store_ps(least, Simd::of_row(minimums[v], r));
            for (int x = 0; x < NX; ++x) {
                const float sum = total(Simd::of_row(sums[v][x], r));
                out.data[x * out.stride + v * Simd::rows + r] = Format::minimums ? sum + least[x] : sum;
            }
        }
    }
}

template <class Simd, class Format, int NX>
void tiles(const Weights & weights, const Inputs & inputs, const Output & out) {
    constexpr int NV = Simd::vectors(NX);
    const auto * arranged = arrange<Simd, Format, NX>(inputs);
    int64_t row = 0;
    for (; row + NV * Simd::rows <= weights.count; row += NV * Simd::rows) {
        const Weights some = {weights.data + row * weights.stride, weights.stride, NV * Simd::rows};
        tile<Simd, Format, NV, NX>(some, arranged, inputs.blocks, {out.data + row, out.stride});
    }
    for (; row < weights.count; row += Simd::rows) {
        const Weights rest = {weights.data + row * weights.stride, weights.stride, weights.count - row};
        tile<Simd, Format, 1, NX>(rest, arranged, inputs.blocks, {out.data + row, out.stride});
    }
}

template <class Simd, class Format> void multiply(const Weights & weights, const Inputs & inputs, const Output & out) {
    using Tiles = void (*)(const Weights &, const Inputs &, const Output &);
    static constexpr Tiles of_rows[kTile] = {
        tiles<Simd, Format, 1>, tiles<Simd, Format, 2>, tiles<Simd, Format, 3>, tiles<Simd, Format, 4>,
        tiles<Simd, Format, 5>, tiles<Simd, Format, 6>, tiles<Simd, Format, 7>, tiles<Simd, Format, 8>,
    };
    // As few passes over the weights as there must be, of much the same number of rows each.
    for (int64_t x = 0, passes = (inputs.count + kTile - 1) / kTile; passes > 0; --passes) {
        const int64_t rows = (inputs.count - x) / passes;
        const Inputs some = {inputs.data + x * inputs.stride, inputs.stride, rows, inputs.blocks};
        of_rows[rows - 1](weights, some, {out.data + x * out.stride, out.stride});
        x += rows;
    }
}

bool handled(const ggml_tensor * weights, const ggml_tensor * inputs, const ggml_tensor * out) {
    return (weights->type == GGML_TYPE_Q4_1 || weights->type == GGML_TYPE_Q8_0) && inputs->type == GGML_TYPE_F32 &&
           weights->ne[2] == 1 && weights->ne[3] == 1 && inputs->ne[2] == 1 && inputs->ne[3] == 1 &&
           weights->nb[0] == ggml_type_size(weights->type) && inputs->nb[0] == sizeof(float) && out->nb[0] == sizeof(float);
}

// Each thread turns its share of every row of activations into eight bits a value, as ggml does.
void quantize(const ggml_compute_params * params, const ggml_tensor * inputs, ggml_type to) {
    const auto from_float = ggml_get_type_traits_cpu(to)->from_float;
    const int64_t blocks = inputs->ne[0] / kBlock;
    const int64_t begin = params->ith * blocks / params->nth;
    const int64_t end = (params->ith + 1) * blocks / params->nth;
    const size_t row_size = ggml_row_size(to, inputs->ne[0]);
    GGML_ASSERT(params->wsize >= row_size * inputs->ne[1]);
    for (int64_t x = 0; x < inputs->ne[1]; ++x) {
        const float * from = (const float *) ((const char *) inputs->data + x * inputs->nb[1]);
        char * row = (char *) params->wdata + x * row_size;
        from_float(from + begin * kBlock, row + begin * ggml_type_size(to), (end - begin) * kBlock);
    }
}

std::atomic<int64_t> computed{0};

void compute(const ggml_compute_params * params, ggml_tensor * out) {
    const ggml_tensor * weights = out->src[0];
    const ggml_tensor * inputs = out->src[1];
    const ggml_type type = weights->type == GGML_TYPE_Q4_1 ? GGML_TYPE_Q8_1 : GGML_TYPE_Q8_0;
    const auto product = weights->type == GGML_TYPE_Q4_1 ? multiply<Widest, Q4_1> : multiply<Widest, Q8_0>;
    quantize(params, inputs, type);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
        computed.fetch_add(1, std::memory_order_relaxed);
    }
    ggml_barrier(params->threadpool);
    // Pieces that stay in the processor's cache for the passes after the first and small enough that the threads end together,
    // yet large enough that the activations are arranged seldom.
    const int64_t count = weights->ne[1];
    const int64_t cached = kPiece / (int64_t) weights->nb[1];
    const int64_t shared = params->nth == 1 ? count : count / (4 * params->nth);
    const int64_t piece = std::max<int64_t>(std::min(cached, shared) / 4 * 4, 32);
    const Inputs arranged = {
        (const char *) params->wdata, ggml_row_size(type, inputs->ne[0]), inputs->ne[1], (int) (inputs->ne[0] / kBlock)};
    for (int64_t at = params->ith * piece; at < count; at = ggml_threadpool_chunk_add(params->threadpool, 1) * piece) {
        const Weights some = {(const char *) weights->data + at * weights->nb[1], weights->nb[1], std::min(piece, count - at)};
        product(some, arranged, {(float *) out->data + at, out->nb[1] / sizeof(float)});
    }
}

} // namespace

#endif

extern "C" {

bool __real_ggml_compute_forward_mul_mat_tiled(const ggml_compute_params * params, ggml_tensor * out);
bool __wrap_ggml_compute_forward_mul_mat_tiled(const ggml_compute_params * params, ggml_tensor * out);

bool __wrap_ggml_compute_forward_mul_mat_tiled(const ggml_compute_params * params, ggml_tensor * out) {
#ifdef ROWS
    if (!params->use_ref && handled(out->src[0], out->src[1], out)) {
        compute(params, out);
        return true;
    }
#endif
    return __real_ggml_compute_forward_mul_mat_tiled(params, out);
}

void __real_ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * out);
void __wrap_ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * out);

void __wrap_ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * out) {
    const ggml_tensor * queries = out->src[0];
    ggml_compute_params whole = *params;
    // With fewer heads than threads some would have nothing to do: there ggml may split, and the self-test says what follows.
    if (queries->ne[1] == 1 && queries->ne[3] == 1 && queries->ne[2] >= params->nth) {
        whole.use_ref = true; // of ggml's ways the one that neither splits nor tiles
    }
    __real_ggml_compute_forward_flash_attn_ext(&whole, out);
}

// Bits of the vectors in use, 0 where this processor's build has none. That the symbol exists says that this file is linked in.
GGML_BACKEND_API int attested_rows_bits(void);
int attested_rows_bits(void) {
#ifdef ROWS
    return 256 * Widest::rows;
#else
    return 0;
#endif
}

// Products computed here since this library was loaded: what only a look inside could tell, as no result differs.
GGML_BACKEND_API int64_t attested_products(void);
int64_t attested_products(void) {
#ifdef ROWS
    return computed.load(std::memory_order_relaxed);
#else
    return 0;
#endif
}

// One product with vectors of `bits`, for tests: weights of ggml's type `type` (Q4_1, Q8_0), inputs as ggml quantizes them for
// it, both in rows without gaps of `columns` values; out[x * count + r]. False where this build has no such vectors or type.
GGML_BACKEND_API bool attested_rows_multiply(
    int bits, int type, int64_t columns, const void * weights, int64_t count, const void * inputs, int64_t n_inputs, float * out);
bool attested_rows_multiply(
    int bits, int type, int64_t columns, const void * weights, int64_t count, const void * inputs, int64_t n_inputs, float * out) {
#ifdef ROWS
    const bool q4_1 = type == GGML_TYPE_Q4_1;
    if (!q4_1 && type != GGML_TYPE_Q8_0) {
        return false;
    }
    const Weights rows = {(const char *) weights, ggml_row_size((ggml_type) type, columns), count};
    const size_t stride = ggml_row_size(q4_1 ? GGML_TYPE_Q8_1 : GGML_TYPE_Q8_0, columns);
    const Inputs quantized = {(const char *) inputs, stride, n_inputs, (int) (columns / kBlock)};
    const Output to = {out, (size_t) count};
    if (bits == 256) {
        (q4_1 ? multiply<Avx2, Q4_1> : multiply<Avx2, Q8_0>)(rows, quantized, to);
        return true;
    }
#ifdef ROWS_512
    if (bits == 512) {
        (q4_1 ? multiply<Avx512, Q4_1> : multiply<Avx512, Q8_0>)(rows, quantized, to);
        return true;
    }
#endif
#endif
    return false;
}

} // extern "C"
