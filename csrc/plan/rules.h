// The rules of the work plan: pure integer functions, the same on the host and on a device, so that both planners
// agree bit for bit.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace mla_prefill::plan {

// No backend cuts query tiles smaller than this: it bounds the number of items.
constexpr int32_t kMinTileQ = 64;

// Nor key tiles smaller than this: it bounds the ranks.
constexpr int32_t kMinTileKV = 32;

// Nor does one split the keys of sequences of more items or into shorter pieces: it bounds which problems have pieces.
constexpr int32_t kMostSplitItems = 264;
constexpr int32_t kMinSplitKeys = 2048;

// Whether a plan may have pieces, known without reading cu_seqlens.
MLA_HOST_DEVICE bool may_split(int64_t num_heads, int64_t total_k) {
  return 2 * num_heads <= kMostSplitItems && 2 * kMinSplitKeys <= total_k;
}

// What a backend asks of the plan.
struct Config {
  int32_t tile_q = 128;            // query rows of one item, at least kMinTileQ
  int32_t short_tile_q = 64;       // the same for short sequences: those of at most short_keys keys, which is 0 or more
  int32_t short_keys = -1;         // tiles of tile_kv, so that they are the end of the list; -1: none is short
  int32_t tile_kv = 128;           // keys per step of the kernel's main loop, at least kMinTileKV
  int32_t item_overhead = 2;       // cost of starting an item, in key tiles
  int32_t min_item_cost = 8;       // cheaper items take several heads until they cost this much, in key tiles
  int64_t group_bytes = 32 << 20;  // K and V of the heads that run side by side should fit this cache; below 2^32
  int32_t max_splits = 1;          // pieces that an item's keys are cut into at most; see num_splits
  int32_t split_items = 0;         // sequences of fewer items are split, into up to this many pieces
  int32_t min_split_keys = 0;      // keys of a piece at least, several times tile_kv
};

MLA_HOST_DEVICE bool is_short(const Config& config, int32_t len_k) { return len_k <= config.short_keys; }

// In 32 bits and without a sign, which GPUs divide fastest.
MLA_HOST_DEVICE uint32_t divide(uint32_t a, uint32_t b) { return a / b; }

MLA_HOST_DEVICE int32_t ceil_div(int32_t a, int32_t b) {  // a >= 0, b > 0
  return (int32_t)divide((uint32_t)a + (uint32_t)b - 1, (uint32_t)b);
}

MLA_HOST_DEVICE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// An upper bound on the number of items for any backend, known without reading cu_seqlens.
MLA_HOST_DEVICE int64_t max_items(int64_t max_tokens_q, int64_t batch, int64_t num_heads) {
  // ceil(len / tile) <= floor(len / tile) + 1, and only sequences with rows count.
  return (max_tokens_q / kMinTileQ + (batch < max_tokens_q ? batch : max_tokens_q)) * num_heads;
}

MLA_HOST_DEVICE int32_t log2_floor(int32_t x) {  // of x >= 1
  return 31 - __builtin_clz((uint32_t)x);
}

// Keys [0, result) are seen by at least one of the query rows [0, row_end) of a sequence, row_end <= len_q;
// bottom-right causal.
MLA_HOST_DEVICE int32_t visible_keys(bool causal, int32_t len_q, int32_t len_k, int32_t row_end) {
  const int32_t rows_after = causal ? len_q - row_end : 0;
  return rows_after < len_k ? len_k - rows_after : 0;
}

// Numbers of pieces are powers of two up to this one.
constexpr int32_t kMaxSplits = 16;
constexpr int32_t kNumSplitClasses = 4;  // 16, 8, 4 and 2 pieces
static_assert(kMaxSplits == 1 << kNumSplitClasses, "a class for each number of pieces above 1");

// Few queries on a long context leave a GPU idle: the keys of each of the sequence's items are cut into this many
// pieces, for as many CTAs, which combine their results. It follows from the sequence alone, so that a result does not
// depend on the rest of the batch.
MLA_HOST_DEVICE int32_t num_splits(const Config& config, int32_t num_heads, bool causal, int32_t len_q, int32_t len_k) {
  const int64_t items = (int64_t)ceil_div(len_q, config.tile_q) * num_heads;
  const int64_t keys = visible_keys(causal, len_q, len_k, len_q < config.tile_q ? len_q : config.tile_q);
  int32_t splits = 1;
  while (2 * splits <= config.max_splits && 2 * splits * items <= config.split_items &&
         2 * splits * (int64_t)config.min_split_keys <= keys) {
    splits *= 2;
  }
  return splits;
}

// Modelled time of one head of an item, in key tiles.
MLA_HOST_DEVICE int32_t item_cost(const Config& config, int32_t keys) {
  return config.item_overhead + ceil_div(keys, config.tile_kv);
}

// Heads that one item computes one after the other: 1 for long work, more where starting an item would dominate.
MLA_HOST_DEVICE int32_t heads_per_item(const Config& config, int32_t num_heads, int32_t len_k) {
  return (int32_t)clamp(divide(config.min_item_cost, item_cost(config, len_k)), 1, num_heads);
}

// Heads whose keys and values share the cache while all query tiles of a sequence pass over them.
MLA_HOST_DEVICE int32_t heads_per_group(const Config& config, int32_t num_heads, int32_t len_k, int64_t bytes_per_key) {
  const int64_t per_head = len_k * bytes_per_key;
  if (per_head == 0) return num_heads;
  if (per_head >= config.group_bytes) return 1;
  const uint32_t heads = divide((uint32_t)config.group_bytes, (uint32_t)per_head);
  return heads < (uint32_t)num_heads ? (int32_t)heads : num_heads;
}

// Query rows [q_begin, q_begin + q_rows) of sequence `seq` against its keys [kv_begin, kv_end), for heads
// [head_begin, head_begin + head_count). Rows and keys count from the sequence's start. An item without keys
// writes the empty result. num_splits above 1: its keys may be cut into this many pieces, and it has one head.
struct WorkItem {
  int32_t seq;
  int32_t q_begin;
  int32_t q_rows;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t head_begin;
  int32_t head_count;
  int32_t num_splits;
};

// The items of one sequence, in order: under the causal mask heads in groups that share the cache, without it an item's
// heads by themselves; in a group the query tile with the most keys first; a tile's heads in a row. Each item follows
// from its index alone, so they can be written in parallel.
struct SequenceWork {
  int32_t len_q, len_k, num_heads;
  int32_t tile_q;
  int32_t num_tiles;
  int32_t group;            // heads of a group
  int32_t step;             // heads of an item
  int32_t items_per_group;  // of a whole group
  int32_t num_items;
  int32_t num_splits;
};

MLA_HOST_DEVICE SequenceWork sequence_work(const Config& config, int32_t num_heads, bool causal, int64_t bytes_per_key,
                                           int32_t len_q, int32_t len_k) {
  SequenceWork work;
  work.len_q = len_q;
  work.len_k = len_k;
  work.num_heads = num_heads;
  work.tile_q = is_short(config, len_k) ? config.short_tile_q : config.tile_q;
  work.num_tiles = ceil_div(len_q, work.tile_q);
  work.step = heads_per_item(config, num_heads, len_k);
  // Without a mask all tiles of a head cost the same: none has to come first, and side by side they share K and V.
  work.group = causal ? heads_per_group(config, num_heads, len_k, bytes_per_key) : work.step;
  work.items_per_group = work.num_tiles * ceil_div(work.group, work.step);
  const int32_t whole_groups = divide(num_heads, work.group), last_group = num_heads - whole_groups * work.group;
  work.num_items = whole_groups * work.items_per_group + work.num_tiles * ceil_div(last_group, work.step);
  work.num_splits = num_splits(config, num_heads, causal, len_q, len_k);
  return work;
}

MLA_HOST_DEVICE WorkItem item_of_sequence(const SequenceWork& work, bool causal, int32_t seq, uint32_t index) {
  const uint32_t groups_before = divide(index, work.items_per_group);
  const int32_t group_begin = (int32_t)groups_before * work.group;
  const int32_t group_end = group_begin + work.group < work.num_heads ? group_begin + work.group : work.num_heads;
  const uint32_t items_per_tile = ceil_div(group_end - group_begin, work.step);
  const uint32_t inside = index - groups_before * work.items_per_group;
  const uint32_t tiles_before = divide(inside, items_per_tile);
  const int32_t tile = work.num_tiles - 1 - (int32_t)tiles_before;
  const int32_t head = group_begin + (int32_t)(inside - tiles_before * items_per_tile) * work.step;

  WorkItem item;
  item.seq = seq;
  item.q_begin = tile * work.tile_q;
  item.q_rows = (int32_t)clamp(work.len_q - item.q_begin, 0, work.tile_q);
  item.kv_begin = 0;
  item.kv_end = visible_keys(causal, work.len_q, work.len_k, item.q_begin + item.q_rows);
  item.head_begin = head;
  item.head_count = (int32_t)clamp(group_end - head, 1, work.step);
  item.num_splits = work.num_splits;
  return item;
}

// A quarter-octave scale: it keeps the sort linear and leaves sequences of about the same work in memory order.
// `tiles` >= 0.
constexpr int32_t kNumLengthRanks = 4 * 32;
MLA_HOST_DEVICE int32_t length_rank(int32_t tiles) {
  if (tiles < 4) return (int32_t)tiles;
  const int32_t octave = log2_floor(tiles) - 2;  // tiles >> octave is in [4, 8)
  return 4 * octave + (int32_t)(tiles >> octave);
}

// Sequences are ordered by this rank, descending, and by index where it is equal: longest first, and those last whose
// first rows see few keys, so that the list ends in small items and CTAs finish together. (By length alone, a batch of
// cached prefixes and one long prompt took 4 % longer.) Before them those that are split, by class, so that a ticket
// leads to an item and a piece without a list of pieces.
constexpr int32_t kRanksPerSplitClass = 8;
constexpr int32_t kNumRanks = kNumLengthRanks + kNumSplitClasses * kRanksPerSplitClass;
MLA_HOST_DEVICE int32_t sequence_rank(const Config& config, int32_t num_heads, bool causal, int32_t len_q,
                                      int32_t len_k) {
  if (is_short(config, len_k)) return 0;
  const int32_t splits = num_splits(config, num_heads, causal, len_q, len_k);
  if (splits > 1) {
    const int32_t log2_splits = log2_floor(splits);
    const int32_t octave = log2_floor(divide(len_k >> log2_splits, config.min_split_keys));  // of a piece's length
    return kNumLengthRanks + (log2_splits - 1) * kRanksPerSplitClass +
           (int32_t)clamp(octave, 0, kRanksPerSplitClass - 1);
  }
  const int32_t first_rows = len_q < config.tile_q ? len_q : config.tile_q;
  const int32_t first = ceil_div(visible_keys(causal, len_q, len_k, first_rows), config.tile_kv);
  const int32_t last = ceil_div(visible_keys(causal, len_q, len_k, len_q), config.tile_kv);
  return length_rank(8 * first + last);
}

// What a ticket stands for: a piece of an item.
struct Piece {
  int32_t item;
  int32_t index;       // of num_splits
  int32_t num_splits;  // 1: the whole item
};

// Split items are the first of the list, those of more pieces before those of fewer: [0, split_end[0]) are of 16
// pieces, up to split_end[1] of 8, and so on. Each item's pieces have tickets in a row, from a multiple of their
// number.
MLA_HOST_DEVICE Piece piece_of_ticket(const int32_t (&split_end)[kNumSplitClasses], int32_t ticket) {
  int32_t first = 0;
  for (int32_t i = 0; i < kNumSplitClasses; ++i) {
    const int32_t log2_splits = kNumSplitClasses - i;
    const int32_t tickets = (split_end[i] - first) << log2_splits;
    if (ticket < tickets) return {first + (ticket >> log2_splits), ticket & ((1 << log2_splits) - 1), 1 << log2_splits};
    ticket -= tickets;
    first = split_end[i];
  }
  return {first + ticket, 0, 1};
}

// Tickets of split items, which come before the others.
MLA_HOST_DEVICE int32_t num_pieces(const int32_t (&split_end)[kNumSplitClasses]) {
  int32_t first = 0, result = 0;
  for (int32_t i = 0; i < kNumSplitClasses; ++i) {
    result += (split_end[i] - first) << (kNumSplitClasses - i);
    first = split_end[i];
  }
  return result;
}

}  // namespace mla_prefill::plan
