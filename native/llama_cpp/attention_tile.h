// Attention of one tile, for sixteen floats at a time. Included after vec16_avx2.h or vec16_avx512.h and functions_simd.h.
//
// Keys meet few rows as they lie (a lane is a position in the key), many rows rearranged (a lane is a cell): either way every
// score is the same sum of sixteen lanes in the same order.
#pragma once

#include "attention.h"

#include <cstring>

namespace {

using namespace attested;

constexpr int kFewRows = 8;              // from so many rows on keys are rearranged
constexpr int kAtOnce = kWide ? 4 : 2;   // rows that meet a key as it lies
constexpr int kPairs = kWide ? 2 : 1;    // vectors of cells that two rows meet rearranged
constexpr int kSumRows = 6;              // rows that meet a value
constexpr int kSumVectors = kWide ? 4 : 1;
constexpr float kNothing = -__builtin_inff();

template <class T> VEC16_INLINE const T * row_of(const Rows & rows, int64_t batch, int64_t head, int64_t row) {
    return (const T *) (rows.data + batch * rows.batch + head * rows.head + row * rows.row);
}

// `count` rows of `cells` as floats, each `to_size` after the last and filled up with zeros.
void convert(const Rows & rows, ToFloat to_float, const Tile & tile, const int32_t * cells, int64_t count, int64_t size, float * to) {
    const int64_t to_size = padded(size);
    for (int64_t i = 0; i < count; ++i, to += to_size) {
        to_float(row_of<void>(rows, tile.batch, tile.kv_head, cells[i]), to, size);
        memset(to + size, 0, (to_size - size) * sizeof(float));
    }
}

// Keys as they lie: scores of NR rows with 16 cells. N16 is their size / 16, if it is known here.
template <class T, int NR, int N16>
VEC16_INLINE void few_scores(const float * queries, int64_t size, const T * const * keys, float * scores, int64_t stride) {
    const int64_t vectors = N16 ? N16 : size / 16;
    Vec16 sums[NR][4];
    for (int j = 0; j < 4; ++j) {
        Vec16 lanes[4][NR];
        for (int i = 0; i < 4; ++i) {
            for (int r = 0; r < NR; ++r) {
                lanes[i][r] = zero16();
            }
        }
        for (int64_t k = 0; k < vectors; ++k) {
            Vec16 query[NR];
            for (int r = 0; r < NR; ++r) {
                query[r] = load16(queries + r * size + k * 16);
            }
            for (int i = 0; i < 4; ++i) {
                const Vec16 key = load16(keys[j + 4 * i] + k * 16);
                for (int r = 0; r < NR; ++r) {
                    lanes[i][r] = fma16(query[r], key, lanes[i][r]);
                }
            }
        }
        for (int r = 0; r < NR; ++r) {
            sums[r][j] = reduce4(lanes[0][r], lanes[1][r], lanes[2][r], lanes[3][r]);
        }
    }
    for (int r = 0; r < NR; ++r) {
        store16(scores + r * stride, reduce16(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
    }
}

template <class T, int NR>
void few_scores_of(const float * queries, int64_t size, const T * const * keys, float * scores, int64_t stride) {
    switch (size) {
        case 64: return few_scores<T, NR, 4>(queries, size, keys, scores, stride);
        case 128: return few_scores<T, NR, 8>(queries, size, keys, scores, stride);
        default: return few_scores<T, NR, 0>(queries, size, keys, scores, stride);
    }
}

// Asks for the rows of the next block.
template <class T> VEC16_INLINE void ask(const T * row, int64_t size) {
    for (int64_t at = 0; at < size * (int64_t) sizeof(T); at += 64) {
        _mm_prefetch((const char *) row + at, _MM_HINT_T0);
    }
}

// Pointers to the keys of `most` cells from `start` on; behind the last one the last one again.
template <class T, int MOST>
void key_rows(const Attention & work, const Tile & tile, const Workspace & memory, int64_t start, const T ** rows) {
    const int64_t count = tile.n_cells - start < MOST ? tile.n_cells - start : MOST;
    if (work.key == Element::other) {
        convert(work.keys, work.keys_to_float, tile, tile.cells + start, count, work.key_size, memory.keys);
    }
    for (int64_t i = 0; i < MOST; ++i) {
        const int64_t cell = i < count ? i : count - 1;
        rows[i] = work.key == Element::other ? (const T *) (memory.keys + cell * padded(work.key_size))
                                             : row_of<T>(work.keys, tile.batch, tile.kv_head, tile.cells[start + cell]);
        if (work.key != Element::other && start + MOST + i < tile.n_cells) {
            ask(row_of<T>(work.keys, tile.batch, tile.kv_head, tile.cells[start + MOST + i]), work.key_size);
        }
    }
}

template <class T> void scores_as_they_lie(const Attention & work, const Tile & tile, const Workspace & memory, int64_t stride) {
    const int64_t rows = tile.queries * tile.heads, size = padded(work.key_size);
    for (int64_t start = 0; start < tile.n_cells; start += 16) {
        const T * keys[16];
        key_rows<T, 16>(work, tile, memory, start, keys);
        for (int64_t r = 0; r < rows; r += kAtOnce) {
            const float * queries = memory.queries + r * size;
            float * scores = memory.scores + r * stride + start;
            switch (rows - r) {
                case 1: few_scores_of<T, 1>(queries, size, keys, scores, stride); break;
                case 2: few_scores_of<T, 2>(queries, size, keys, scores, stride); break;
                case 3: few_scores_of<T, kWide ? 3 : 2>(queries, size, keys, scores, stride); break;
                default: few_scores_of<T, kAtOnce>(queries, size, keys, scores, stride); break;
            }
        }
    }
}

// Eight rows of eight become eight columns.
VEC16_INLINE __m256 load8(const float * from) { return _mm256_loadu_ps(from); }
VEC16_INLINE __m256 load8(const uint16_t * from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) from)); }
template <class T> VEC16_INLINE void transpose8(const T * const * rows, int64_t at, float * to) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; ++i) {
        a[i] = load8(rows[i] + at);
    }
    for (int i = 0; i < 4; ++i) {
        b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        for (int h = 0; h < 2; ++h) {
            a[4 * i + 2 * h] = _mm256_shuffle_ps(b[4 * i + h], b[4 * i + 2 + h], 0x44);
            a[4 * i + 2 * h + 1] = _mm256_shuffle_ps(b[4 * i + h], b[4 * i + 2 + h], 0xEE);
        }
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * kKeyBlock, _mm256_permute2f128_ps(a[i], a[4 + i], 0x20));
        _mm256_storeu_ps(to + (i + 4) * kKeyBlock, _mm256_permute2f128_ps(a[i], a[4 + i], 0x31));
    }
}

// The tree of lanes, depth first: lanes L, L + W, L + 2 W, ... of NR rows with NC vectors of cells.
template <int NR, int NC> struct Sums {
    Vec16 of[NR][NC];
};
template <int L, int W, int NR, int NC, int N16>
VEC16_INLINE Sums<NR, NC> lanes(const float * queries, int64_t size, const float * keys) {
    Sums<NR, NC> sums;
    if constexpr (W == 16) {
        for (int r = 0; r < NR; ++r) {
            for (int c = 0; c < NC; ++c) {
                sums.of[r][c] = zero16();
            }
        }
        const int64_t vectors = N16 ? N16 : size / 16;
        for (int64_t i = 0; i < vectors; ++i) {
            const int64_t k = L + 16 * i;
            Vec16 key[NC];
            for (int c = 0; c < NC; ++c) {
                key[c] = load16(keys + k * kKeyBlock + 16 * c);
            }
            for (int r = 0; r < NR; ++r) {
                const Vec16 query = all16(queries[r * size + k]);
                for (int c = 0; c < NC; ++c) {
                    sums.of[r][c] = fma16(query, key[c], sums.of[r][c]);
                }
            }
        }
    } else {
        sums = lanes<L, 2 * W, NR, NC, N16>(queries, size, keys);
        const auto others = lanes<L + W, 2 * W, NR, NC, N16>(queries, size, keys);
        for (int r = 0; r < NR; ++r) {
            for (int c = 0; c < NC; ++c) {
                sums.of[r][c] = sums.of[r][c] + others.of[r][c];
            }
        }
    }
    return sums;
}

template <int NR, int N16>
void many_scores(const float * queries, int64_t size, const float * keys, float * scores, int64_t stride) {
    for (int part = 0; part < 2 / kPairs; ++part) {
        const auto sums = lanes<0, 1, NR, kPairs, N16>(queries, size, keys + part * 16);
        for (int r = 0; r < NR; ++r) {
            for (int c = 0; c < kPairs; ++c) {
                store16(scores + r * stride + 16 * (part + c), sums.of[r][c]);
            }
        }
    }
}

template <int NR> void many_scores_of(const float * queries, int64_t size, const float * keys, float * scores, int64_t stride) {
    switch (size) {
        case 64: return many_scores<NR, 4>(queries, size, keys, scores, stride);
        case 128: return many_scores<NR, 8>(queries, size, keys, scores, stride);
        default: return many_scores<NR, 0>(queries, size, keys, scores, stride);
    }
}

template <class T> void scores_rearranged(const Attention & work, const Tile & tile, const Workspace & memory, int64_t stride) {
    const int64_t rows = tile.queries * tile.heads, size = padded(work.key_size);
    for (int64_t start = 0; start < tile.n_cells; start += kKeyBlock) {
        const T * keys[kKeyBlock];
        key_rows<T, kKeyBlock>(work, tile, memory, start, keys);
        for (int64_t k = 0; k < size; k += 8) {
            for (int c = 0; c < kKeyBlock; c += 8) {
                transpose8(keys + c, k, memory.arranged + k * kKeyBlock + c);
            }
        }
        int64_t r = 0;
        for (; r + 2 <= rows; r += 2) {
            many_scores_of<2>(memory.queries + r * size, size, memory.arranged, memory.scores + r * stride + start, stride);
        }
        if (r < rows) {
            many_scores_of<1>(memory.queries + r * size, size, memory.arranged, memory.scores + r * stride + start, stride);
        }
    }
}

VEC16_INLINE float largest(Vec16 a) {
    float lanes[16], most = kNothing;
    store16(lanes, a);
    for (int i = 0; i < 16; ++i) {
        most = lanes[i] > most ? lanes[i] : most;
    }
    return most;
}

VEC16_INLINE float total(Vec16 a) {
    float lanes[16];
    store16(lanes, a);
    for (int w = 8; w; w /= 2) {
        for (int i = 0; i < w; ++i) {
            lanes[i] += lanes[i + w];
        }
    }
    return lanes[0];
}

// Moves the scores of a query's own cells together. Cells that it does not see may be between them.
void keep_own(const Tile & tile, int64_t query, float * scores) {
    int64_t kept = 0;
    for (int64_t s = 0; s < tile.n_segments; ++s) {
        const int64_t start = tile.segments[s].start, count = tile.segments[s + 1].start - start;
        if (tile.segments[s].queries >> query & 1) {
            if (kept != start) {
                memmove(scores + kept, scores + start, count * sizeof(float));
            }
            kept += count;
        }
    }
}

void add_mask(const Attention & work, const Tile & tile, int64_t query, int64_t head, float * scores) {
    const float factor = slope(work, head);
    const uint16_t * mask =
        row_of<uint16_t>(work.mask, tile.batch % work.mask_batches, head % work.mask_heads, tile.first_query + query);
    for (int64_t s = 0; s < tile.n_segments; ++s) {
        if (tile.segments[s].queries >> query & 1) {
            for (int64_t c = tile.segments[s].start; c < tile.segments[s + 1].start; ++c, ++scores) {
                *scores = *scores + factor * _cvtsh_ss(mask[tile.cells[c]]);
            }
        }
    }
}

// Turns a row of scores into weights; returns 1 / their sum, zero where there is no cell.
float weights(const Attention & work, const Tile & tile, int64_t query, int64_t head, float * scores) {
    const int64_t own = tile.own[query];
    keep_own(tile, query, scores);
    for (int64_t i = own; i < padded(own); ++i) {
        scores[i] = kNothing;
    }
    const bool capped = work.softcap != 0.0f;
    const Vec16 scale = all16(capped ? work.scale / work.softcap : work.scale), cap = all16(work.softcap);
    Vec16 most = all16(kNothing);
    for (int64_t i = 0; i < own; i += 16) {
        Vec16 score = load16(scores + i) * scale;
        if (capped) {
            score = cap * tanh16(score);
        }
        store16(scores + i, score);
        most = max16(score, most);
    }
    if (tile.biased || capped || !(work.scale > 0.0f)) { // then what is behind the last cell is no longer -inf, or not the least
        if (tile.biased) {
            add_mask(work, tile, query, head, scores);
        }
        for (int64_t i = own; i < padded(own); ++i) {
            scores[i] = kNothing;
        }
        most = all16(kNothing);
        for (int64_t i = 0; i < own; i += 16) {
            most = max16(load16(scores + i), most);
        }
    }
    float limit = largest(most);
    if (work.sinks && work.sinks[head] > limit) {
        limit = work.sinks[head];
    }
    if (limit == kNothing) {
        memset(scores, 0, padded(own) * sizeof(float));
        return 0.0f;
    }
    Vec16 sums = zero16();
    for (int64_t i = 0; i < own; i += 16) {
        const Vec16 weight = exp16(load16(scores + i) - all16(limit));
        store16(scores + i, weight);
        sums = sums + weight;
    }
    float sum = total(sums);
    if (work.sinks) {
        float sink[16];
        store16(sink, exp16(all16(work.sinks[head] - limit)));
        sum += sink[0];
    }
    return sum == 0.0f ? 0.0f : 1.0f / sum;
}

// Adds `count` values to NR rows, ND vectors from `at` on.
template <class T, int NR, int ND>
VEC16_INLINE void add_values(float * const * sums, const float * const * weights, const T * const * values, int64_t count, int64_t at) {
    Vec16 sum[NR][ND];
    for (int r = 0; r < NR; ++r) {
        for (int d = 0; d < ND; ++d) {
            sum[r][d] = load16(sums[r] + at + 16 * d);
        }
    }
    for (int64_t c = 0; c < count; ++c) {
        Vec16 value[ND];
        for (int d = 0; d < ND; ++d) {
            value[d] = load16(values[c] + at + 16 * d);
        }
        for (int r = 0; r < NR; ++r) {
            const Vec16 weight = all16(weights[r][c]);
            for (int d = 0; d < ND; ++d) {
                sum[r][d] = fma16(weight, value[d], sum[r][d]);
            }
        }
    }
    for (int r = 0; r < NR; ++r) {
        for (int d = 0; d < ND; ++d) {
            store16(sums[r] + at + 16 * d, sum[r][d]);
        }
    }
}

template <class T, int NR>
void add_values_to(float * const * sums, const float * const * weights, const T * const * values, int64_t count, int64_t size) {
    int64_t at = 0;
    for (; at + 16 * kSumVectors <= size; at += 16 * kSumVectors) {
        add_values<T, NR, kSumVectors>(sums, weights, values, count, at);
    }
    for (; at < size; at += 16) {
        add_values<T, NR, 1>(sums, weights, values, count, at);
    }
}

template <class T>
void add_block(float ** sums, const float ** weights, int64_t rows, const T * const * values, int64_t count, int64_t size) {
    for (; rows > 0; rows -= kSumRows, sums += kSumRows, weights += kSumRows) {
        switch (rows) {
            case 1: add_values_to<T, 1>(sums, weights, values, count, size); break;
            case 2: add_values_to<T, 2>(sums, weights, values, count, size); break;
            case 3: add_values_to<T, 3>(sums, weights, values, count, size); break;
            case 4: add_values_to<T, 4>(sums, weights, values, count, size); break;
            case 5: add_values_to<T, 5>(sums, weights, values, count, size); break;
            default: add_values_to<T, kSumRows>(sums, weights, values, count, size); break;
        }
    }
}

// A block of halves for many rows: turned into floats once.
void widen(const uint16_t * const * rows, int64_t count, int64_t size, float * to) {
    for (int64_t c = 0; c < count; ++c, to += size) {
        for (int64_t k = 0; k < size; k += 16) {
            store16(to + k, load16(rows[c] + k));
        }
    }
}

// One segment's cells [start, start + count), a block at most, for the rows that see them.
void add_cells(const Attention & work, const Tile & tile, const Workspace & memory, int64_t start, int64_t count, float ** sums,
               const float ** weights, int64_t rows) {
    const int64_t size = padded(work.value_size);
    const int32_t * cells = tile.cells + start;
    if (work.value == Element::f16) {
        const uint16_t * halves[64];
        for (int64_t c = 0; c < count; ++c) {
            halves[c] = row_of<uint16_t>(work.values, tile.batch, tile.kv_head, cells[c]);
            if (start + count + c < tile.n_cells) {
                ask(row_of<uint16_t>(work.values, tile.batch, tile.kv_head, cells[count + c]), size);
            }
        }
        if (rows <= kSumRows) {
            return add_block(sums, weights, rows, halves, count, size);
        }
        widen(halves, count, size, memory.values);
    }
    if (work.value == Element::other) {
        convert(work.values, work.values_to_float, tile, cells, count, work.value_size, memory.values);
    }
    const float * floats[64];
    for (int64_t c = 0; c < count; ++c) {
        floats[c] = work.value == Element::f32 ? row_of<float>(work.values, tile.batch, tile.kv_head, cells[c]) : memory.values + c * size;
    }
    add_block(sums, weights, rows, floats, count, size);
}

void sum_values(const Attention & work, const Tile & tile, const Workspace & memory, int64_t stride) {
    const int64_t size = padded(work.value_size), block = value_block(work.value_size);
    int64_t seen[kTileQueries] = {0};
    memset(memory.sums, 0, tile.queries * tile.heads * size * sizeof(float));
    for (int64_t s = 0; s < tile.n_segments; ++s) {
        const Segment & segment = tile.segments[s];
        for (int64_t start = segment.start; start < tile.segments[s + 1].start; start += block) {
            const int64_t left = tile.segments[s + 1].start - start, count = left < block ? left : block;
            float * sums[kTileRows];
            const float * weights[kTileRows];
            int64_t rows = 0;
            for (int64_t q = 0; q < tile.queries; ++q) {
                if (segment.queries >> q & 1) {
                    for (int64_t h = 0; h < tile.heads; ++h, ++rows) {
                        sums[rows] = memory.sums + (q * tile.heads + h) * size;
                        weights[rows] = memory.scores + (q * tile.heads + h) * stride + seen[q];
                    }
                    seen[q] += count;
                }
            }
            add_cells(work, tile, memory, start, count, sums, weights, rows);
        }
    }
}

void load_queries(const Attention & work, const Tile & tile, const Workspace & memory) {
    const int64_t size = padded(work.key_size);
    float * to = memory.queries;
    for (int64_t q = 0; q < tile.queries; ++q) {
        for (int64_t h = 0; h < tile.heads; ++h, to += size) {
            const auto * query = row_of<float>(work.queries, tile.batch, tile.first_head + h, tile.first_query + q);
            memcpy(to, query, work.key_size * sizeof(float));
            memset(to + work.key_size, 0, (size - work.key_size) * sizeof(float));
        }
    }
}

// The same function for every variant; its caller has a name of its own.
void attend(const Attention & work, const Tile & tile, const Workspace & memory) {
    const int64_t stride = score_stride(tile.n_cells), size = padded(work.value_size);
    load_queries(work, tile, memory);
    const bool few = tile.queries * tile.heads < kFewRows;
    if (work.key == Element::f16) {
        (few ? scores_as_they_lie<uint16_t> : scores_rearranged<uint16_t>)(work, tile, memory, stride);
    } else {
        (few ? scores_as_they_lie<float> : scores_rearranged<float>)(work, tile, memory, stride);
    }
    float factors[kTileRows];
    for (int64_t q = 0, row = 0; q < tile.queries; ++q) {
        for (int64_t h = 0; h < tile.heads; ++h, ++row) {
            factors[row] = weights(work, tile, q, tile.first_head + h, memory.scores + row * stride);
        }
    }
    sum_values(work, tile, memory, stride);
    for (int64_t q = 0, row = 0; q < tile.queries; ++q) {
        for (int64_t h = 0; h < tile.heads; ++h, ++row) {
            float * out = work.out + ((tile.batch * work.n_queries + tile.first_query + q) * work.n_heads + tile.first_head + h) * work.value_size;
            for (int64_t d = 0; d < work.value_size; ++d) {
                out[d] = memory.sums[row * size + d] * factors[row] + 0.0f;
            }
        }
    }
}

} // namespace
