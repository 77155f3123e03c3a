// Which cells each query sees, and which queries are worth computing together.
#include "attention.h"

#include <algorithm>
#include <cstring>

#include <immintrin.h>

namespace attested {
namespace {

// A tile is split where its queries see less than this share (in sixteenths) of what all of them together see.
constexpr int64_t kShared = 10;
constexpr int64_t kWord = 64;

// Bit i: whether cell i is one of the query's. Returns whether the mask holds anything but 0 and -inf.
bool scan(const uint16_t * mask, int64_t n_cells, uint64_t * bits) {
    const __m256i masked = _mm256_set1_epi16((short) 0xFC00);
    __m256i other = _mm256_setzero_si256();
    bool biased = false;
    for (int64_t start = 0; start < n_cells; start += kWord) {
        const int64_t count = std::min(kWord, n_cells - start);
        uint64_t word = 0;
        int64_t i = 0;
        for (; i + 32 <= count; i += 32) {
            const __m256i a = _mm256_loadu_si256((const __m256i *) (mask + start + i));
            const __m256i b = _mm256_loadu_si256((const __m256i *) (mask + start + i + 16));
            const __m256i a_masked = _mm256_cmpeq_epi16(a, masked), b_masked = _mm256_cmpeq_epi16(b, masked);
            other = _mm256_or_si256(other, _mm256_or_si256(_mm256_andnot_si256(a_masked, a), _mm256_andnot_si256(b_masked, b)));
            const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(a_masked, b_masked), 0xD8);
            word |= (uint64_t) (uint32_t) ~_mm256_movemask_epi8(both) << i;
        }
        for (; i < count; ++i) {
            if (mask[start + i] != 0xFC00) {
                word |= (uint64_t) 1 << i;
                biased = biased || mask[start + i] != 0;
            }
        }
        bits[start / kWord] = word;
    }
    return biased || !_mm256_testz_si256(other, other);
}

void all_cells(int64_t n_cells, uint64_t * bits) {
    for (int64_t start = 0; start < n_cells; start += kWord) {
        const int64_t count = std::min(kWord, n_cells - start);
        bits[start / kWord] = count == kWord ? ~(uint64_t) 0 : ((uint64_t) 1 << count) - 1;
    }
}

// The cells that any query of the tile sees, in order, in segments that the same queries see.
void list_cells(const uint64_t * bits, int64_t words, const Workspace & memory, Tile & tile) {
    const uint32_t everyone = tile.queries == 32 ? ~(uint32_t) 0 : ((uint32_t) 1 << tile.queries) - 1;
    int64_t cells = 0, segments = 0;
    uint32_t last = 0;
    for (int64_t w = 0; w < words; ++w) {
        uint64_t any = 0, all = ~(uint64_t) 0;
        for (int64_t q = 0; q < tile.queries; ++q) {
            any |= bits[q * words + w];
            all &= bits[q * words + w];
        }
        if (all == ~(uint64_t) 0 && last == everyone) {
            for (int32_t i = 0; i < kWord; ++i) {
                memory.cells[cells + i] = (int32_t) (w * kWord) + i;
            }
            cells += kWord;
            continue;
        }
        for (uint64_t left = any; left; left &= left - 1) {
            const int bit = __builtin_ctzll(left);
            uint32_t queries = everyone;
            if (!(all >> bit & 1)) {
                queries = 0;
                for (int64_t q = 0; q < tile.queries; ++q) {
                    queries |= (uint32_t) (bits[q * words + w] >> bit & 1) << q;
                }
            }
            if (queries != last) {
                memory.segments[segments++] = {(int32_t) cells, queries};
                last = queries;
            }
            memory.cells[cells++] = (int32_t) (w * kWord) + bit;
        }
    }
    memory.segments[segments] = {(int32_t) cells, 0};
    tile.cells = memory.cells;
    tile.n_cells = cells;
    tile.segments = memory.segments;
    tile.n_segments = segments;
}

struct Splitter {
    const Attention & work;
    const Workspace & memory;
    AttentionTile compute;
    int64_t words;
    const int64_t * own; // cells of each query of the unit

    // `tile.first_query` counts from the start of the work, `at` from the start of the unit.
    void split(Tile tile, int64_t at) const {
        const uint64_t * bits = memory.bits + at * words;
        int64_t together = 0, sum = 0;
        for (int64_t w = 0; w < words; ++w) {
            uint64_t any = 0;
            for (int64_t q = 0; q < tile.queries; ++q) {
                any |= bits[q * words + w];
            }
            together += __builtin_popcountll(any);
        }
        for (int64_t q = 0; q < tile.queries; ++q) {
            sum += own[at + q];
        }
        const bool fits = score_stride(together) * tile.queries * tile.heads <= memory.scores_size;
        if (tile.queries > 1 && (!fits || sum * 16 < kShared * together * tile.queries)) {
            const int64_t half = tile.queries / 2;
            Tile second = tile;
            tile.queries = half;
            second.queries -= half;
            second.first_query += half;
            split(tile, at);
            split(second, at + half);
            return;
        }
        list_cells(bits, words, memory, tile);
        memcpy(tile.own, own + at, tile.queries * sizeof(int64_t));
        const int64_t room = memory.scores_size / (score_stride(together) * tile.queries);
        for (int64_t last = tile.first_head + tile.heads; tile.first_head < last; tile.first_head += tile.heads) {
            tile.heads = std::min(std::max<int64_t>(room, 1), last - tile.first_head);
            compute(work, tile, memory);
        }
    }
};

} // namespace

void attention_tiles(const Attention & work, const Unit & unit, const Workspace & memory, AttentionTile compute) {
    const int64_t words = (work.n_cells + kWord - 1) / kWord;
    int64_t own[kTileQueries];
    bool biased = false;
    for (int64_t q = 0; q < unit.queries; ++q) {
        uint64_t * bits = memory.bits + q * words;
        if (work.mask.data) {
            const char * mask = work.mask.data + (unit.batch % work.mask_batches) * work.mask.batch +
                                (unit.first_head % work.mask_heads) * work.mask.head + (unit.first_query + q) * work.mask.row;
            biased = scan((const uint16_t *) mask, work.n_cells, bits) || biased;
        } else {
            all_cells(work.n_cells, bits);
        }
        own[q] = 0;
        for (int64_t w = 0; w < words; ++w) {
            own[q] += __builtin_popcountll(bits[w]);
        }
    }
    Tile tile = {};
    tile.batch = unit.batch;
    tile.kv_head = unit.kv_head;
    tile.first_head = unit.first_head;
    tile.heads = unit.heads;
    tile.first_query = unit.first_query;
    tile.queries = unit.queries;
    tile.biased = biased;
    Splitter{work, memory, compute, words, own}.split(tile, 0);
}

} // namespace attested
