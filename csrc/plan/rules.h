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

// What a backend asks of the plan.
struct Config {
  int32_t tile_q = 128;            // query rows of one item, at least kMinTileQ
  int32_t short_tile_q = 64;       // the same for short sequences: those of at most short_keys keys, which is 0 or more
  int32_t short_keys = -1;         // tiles of tile_kv, so that they are the end of the list; -1: none is short
  int32_t tile_kv = 128;           // keys per step of the kernel's main loop, at least kMinTileKV
  int32_t item_overhead = 2;       // cost of starting an item, in key tiles
  int32_t min_item_cost = 8;       // cheaper items take several heads until they cost this much, in key tiles
  int64_t group_bytes = 32 << 20;  // K and V of the heads that run side by side should fit this cache
};

MLA_HOST_DEVICE bool is_short(const Config& config, int32_t len_k) { return len_k <= config.short_keys; }

MLA_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

MLA_HOST_DEVICE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// An upper bound on the number of items for any backend, known without reading cu_seqlens.
MLA_HOST_DEVICE int64_t max_items(int64_t max_tokens_q, int64_t batch, int64_t num_heads) {
  // ceil(len / tile) <= floor(len / tile) + 1, and only sequences with rows count.
  return (max_tokens_q / kMinTileQ + (batch < max_tokens_q ? batch : max_tokens_q)) * num_heads;
}

// Keys [0, result) are seen by at least one of the query rows [0, row_end) of a sequence; bottom-right causal.
MLA_HOST_DEVICE int32_t visible_keys(bool causal, int32_t len_q, int32_t len_k, int32_t row_end) {
  return causal ? (int32_t)clamp((int64_t)row_end + len_k - len_q, 0, len_k) : len_k;
}

// Modelled time of one head of an item, in key tiles.
MLA_HOST_DEVICE int64_t item_cost(const Config& config, int32_t keys) {
  return config.item_overhead + ceil_div(keys, config.tile_kv);
}

// Heads that one item computes one after the other: 1 for long work, more where starting an item would dominate.
MLA_HOST_DEVICE int32_t heads_per_item(const Config& config, int32_t num_heads, int32_t len_k) {
  return (int32_t)clamp(config.min_item_cost / item_cost(config, len_k), 1, num_heads);
}

// Heads whose keys and values share the cache while all query tiles of a sequence pass over them.
MLA_HOST_DEVICE int32_t heads_per_group(const Config& config, int32_t num_heads, int32_t len_k, int64_t bytes_per_key) {
  const int64_t per_head = len_k * bytes_per_key;
  return per_head == 0 ? num_heads : (int32_t)clamp(config.group_bytes / per_head, 1, num_heads);
}

// Query rows [q_begin, q_begin + q_rows) of sequence `seq` against its keys [kv_begin, kv_end), for heads
// [head_begin, head_begin + head_count). Rows and keys count from the sequence's start. An item without keys
// writes the empty result. split_slot is -1 where one item sees all the keys of its rows.
struct WorkItem {
  int32_t seq;
  int32_t q_begin;
  int32_t q_rows;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t head_begin;
  int32_t head_count;
  int32_t split_slot;
};

// The items of one sequence, in order: heads in groups that share the cache; in a group the query tile with the most
// keys first; a tile's heads in a row. Each item follows from its index alone, so they can be written in parallel.
struct SequenceWork {
  int32_t len_q, len_k, num_heads;
  int32_t tile_q;
  int32_t num_tiles;
  int32_t group;            // heads of a group
  int32_t step;             // heads of an item
  int32_t items_per_group;  // of a whole group
  int32_t num_items;
};

MLA_HOST_DEVICE SequenceWork sequence_work(const Config& config, int32_t num_heads, int64_t bytes_per_key,
                                           int32_t len_q, int32_t len_k) {
  SequenceWork work;
  work.len_q = len_q;
  work.len_k = len_k;
  work.num_heads = num_heads;
  work.tile_q = is_short(config, len_k) ? config.short_tile_q : config.tile_q;
  work.num_tiles = (int32_t)ceil_div(len_q, work.tile_q);
  work.group = heads_per_group(config, num_heads, len_k, bytes_per_key);
  work.step = heads_per_item(config, num_heads, len_k);
  work.items_per_group = work.num_tiles * (int32_t)ceil_div(work.group, work.step);
  const int32_t last_group = num_heads % work.group;
  work.num_items =
      num_heads / work.group * work.items_per_group + work.num_tiles * (int32_t)ceil_div(last_group, work.step);
  return work;
}

MLA_HOST_DEVICE WorkItem item_of_sequence(const SequenceWork& work, bool causal, int32_t seq, int32_t index) {
  const int32_t group_begin = index / work.items_per_group * work.group;
  const int32_t group_end = group_begin + work.group < work.num_heads ? group_begin + work.group : work.num_heads;
  const int32_t items_per_tile = (int32_t)ceil_div(group_end - group_begin, work.step);
  const int32_t inside = index % work.items_per_group;
  const int32_t tile = work.num_tiles - 1 - inside / items_per_tile;
  const int32_t head = group_begin + inside % items_per_tile * work.step;

  WorkItem item;
  item.seq = seq;
  item.q_begin = tile * work.tile_q;
  item.q_rows = (int32_t)clamp(work.len_q - item.q_begin, 0, work.tile_q);
  item.kv_begin = 0;
  item.kv_end = visible_keys(causal, work.len_q, work.len_k, item.q_begin + item.q_rows);
  item.head_begin = head;
  item.head_count = (int32_t)clamp(group_end - head, 1, work.step);
  item.split_slot = -1;
  return item;
}

// A quarter-octave scale: it keeps the sort linear and leaves sequences of about the same work in memory order.
// `tiles` >= 0.
constexpr int32_t kNumRanks = 4 * 32;
MLA_HOST_DEVICE int32_t length_rank(int64_t tiles) {
  if (tiles < 4) return (int32_t)tiles;
  int32_t octave = 0;
  while ((tiles >> octave) >= 8) ++octave;  // tiles >> octave is in [4, 8)
  return 4 * octave + (int32_t)(tiles >> octave);
}

// Sequences are ordered by this rank, descending, and by index where it is equal: longest first, and those last whose
// first rows see few keys, so that the list ends in small items and CTAs finish together. (By length alone, a batch of
// cached prefixes and one long prompt took 4 % longer.)
MLA_HOST_DEVICE int32_t sequence_rank(const Config& config, bool causal, int32_t len_q, int32_t len_k) {
  if (is_short(config, len_k)) return 0;
  const int32_t first_rows = len_q < config.tile_q ? len_q : config.tile_q;
  const int64_t first = ceil_div(visible_keys(causal, len_q, len_k, first_rows), config.tile_kv);
  const int64_t last = ceil_div(visible_keys(causal, len_q, len_k, len_q), config.tile_kv);
  return length_rank(8 * first + last);
}

}  // namespace mla_prefill::plan
