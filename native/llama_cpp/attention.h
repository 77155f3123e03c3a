// Attention of arithmetic "attested-1": every query's result from its own (unmasked) cells alone, in one order.
//
// score = the sum of q_k * k_k: 16 lanes, lane l takes k = l, l + 16, ... by fma, then the tree (l and l + 8, + 4, + 2, + 1);
// times scale; logit_softcap; plus slope * mask. p = exp(score - the largest of all). Output d = sum of p_j * v_jd by fma in the
// order of the cells. The sum of p: 16 lanes, lane l takes own cells l, l + 16, ..., then the tree; then the sink, if there is
// one. Output times 1 / sum, plus zero. attention_plain.cpp says the same in plain loops. See docs/adr/0010.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attested {

using ToFloat = void (*)(const void * from, float * to, int64_t count);

// A stack of rows: strides in bytes.
struct Rows {
    const char * data;
    size_t row, head, batch;
};

enum class Element : int32_t { f32, f16, other }; // other: to be turned into floats by `to_float`

struct Attention {
    Rows queries; // f32
    Rows keys, values;
    ToFloat keys_to_float, values_to_float;
    Element key, value;
    Rows mask; // f16, -inf: not one of the query's cells; data is null where every cell is
    int64_t mask_heads, mask_batches;
    const float * sinks; // one a head, or null
    float * out;         // [batch][query][head][value_size]
    int64_t key_size, value_size;
    int64_t n_queries, n_heads, n_kv_heads, n_batches, n_cells;
    float scale, max_bias, softcap;
};

// Consecutive cells of a tile's list that the same queries see.
struct Segment {
    int32_t start;
    uint32_t queries; // bit i: query `first_query + i`
};

constexpr int kTileQueries = 32; // bits of Segment::queries
constexpr int kTileRows = 48;    // rows (a query and a head) that meet the keys together, at most
constexpr int kKeyBlock = 32;    // cells whose keys are arranged at a time

// Work memory of one thread, all of it aligned to 64 bytes.
struct Workspace {
    uint64_t * bits;
    int32_t * cells;
    Segment * segments;
    float * queries; // [row][padded key_size]
    float * keys;    // a block, converted
    float * arranged; // a block of keys with the cells side by side
    float * values;  // a block, converted
    float * sums;    // [row][padded value_size]
    float * scores;  // [row][stride]
    int64_t scores_size;
};

// Queries that see much the same cells, and heads that share keys and values.
struct Tile {
    int64_t batch, kv_head, first_head, heads, first_query, queries;
    const int32_t * cells;
    int64_t n_cells;
    const Segment * segments; // one more than there are, which starts at n_cells
    int64_t n_segments;
    int64_t own[kTileQueries]; // cells of each query
    bool biased;               // the mask holds other values than 0 and -inf
};

// Heads and queries that one thread takes at a time; the heads belong to one kv head.
struct Unit {
    int64_t batch, kv_head, first_head, heads, first_query, queries;
};

static constexpr int64_t padded(int64_t size, int64_t to = 16) { return (size + to - 1) / to * to; }
static constexpr int64_t score_stride(int64_t cells) { return padded(cells, kKeyBlock) + 16; }
static constexpr int64_t value_block(int64_t value_size) { return value_size > 256 ? 16 : value_size > 128 ? 32 : 64; }

// What ALiBi multiplies a head's mask with.
float slope(const Attention & work, int64_t head);

void attention_plain(const Attention & work, const Unit & unit, const Workspace & memory);
void attention_avx2(const Attention & work, const Tile & tile, const Workspace & memory);
void attention_avx512(const Attention & work, const Tile & tile, const Workspace & memory);

using AttentionTile = void (*)(const Attention &, const Tile &, const Workspace &);

// Splits the queries into tiles (attention_tiles.cpp).
void attention_tiles(const Attention & work, const Unit & unit, const Workspace & memory, AttentionTile tile);

} // namespace attested
