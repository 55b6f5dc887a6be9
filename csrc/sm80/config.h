// Tiles and shared memory of the portable NVIDIA kernel, for every pair of head dims it is compiled for.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace mla_prefill::sm80 {

constexpr int kMaxHeadDim = 256;
constexpr int kHeadDimMultiple = 8;  // elements of a 16-byte chunk: none lies across the end of a tensor's row

// Columns of K in whole tiles that come from k; those after them come from k_pe, also where they are one tensor.
constexpr int kLeftColumns = 128;

// Query rows of a warp are kRowTiles m16 tiles. Two of them use each fragment of K and V twice, which halves what is
// read from shared memory. Their accumulators fit up to 128 columns of V.
template <int kHeadDimQK_, int kHeadDimV_, int kWarps_, int kRowTiles_, int kTileKV_, int kCtasPerSm_,
          int kStagesK_ = 1>
struct TileConfig {
  static constexpr int kHeadDimQK = kHeadDimQK_;  // narrower heads are padded with zeros, in shared memory only
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kWarpRows = kRowTiles * 16;
  static constexpr int kTileQ = kWarps * kWarpRows;
  static constexpr int kTileKV = kTileKV_;
  static constexpr int kCtasPerSm = kCtasPerSm_;  // where shared memory suffices
  static constexpr int kStagesK = kStagesK_;      // 2: K is loaded a whole key tile ahead

  static_assert(kTileQ >= plan::kMinTileQ && kTileKV >= plan::kMinTileKV, "what the plan's bounds count on");
  static_assert(kTileKV % 16 == 0 && kHeadDimQK % 32 == 0 && kHeadDimV % 32 == 0, "whole fragments and swizzle groups");
  // Accumulators of O and S, without anything else.
  static_assert(kRowTiles * (kHeadDimV + kTileKV) / 2 <= 192, "registers of a thread");
  static_assert(kCtasPerSm * kThreads <= 256, "255 registers for each thread");
};

// Query rows of one head that a CTA computes at once. In shared memory, since registers are short.
struct Work {
  int32_t q_row;     // of the tensors
  int32_t q_rows;    // rows of the item from q_row on; 0: there is no more work
  int32_t k_row;     // of the tensors; keys count from here
  int32_t keys;      // the item's rows see keys [0, keys) at most
  int32_t last_key;  // of row 0 under the causal mask; of row r it is last_key + r
  int32_t head, head_begin, head_end;
  int32_t piece;                    // its ticket, where the item is split; kWhole where it is not
  int32_t tiles, plain_tiles;       // key tiles, and those with a loop of their own, tile 0 aside
  const uint16_t *k, *k_right, *v;  // row k_row of the head; k_right: from column kLeftColumns on
};
constexpr int32_t kWhole = -1;

// The tickets of the plan's list. In shared memory too: reading the header on the way to each item takes long.
struct Tickets {
  int32_t end;
  int32_t pieces;         // tickets below it are of split items
  int32_t beside_pieces;  // what leads from the others to their items
  int32_t split_end[plan::kNumSplitClasses];
};

template <typename Config>
struct alignas(128) SharedStorage {
  uint16_t q[Config::kTileQ][Config::kHeadDimQK];
  uint16_t k[Config::kStagesK][Config::kTileKV][Config::kHeadDimQK];
  uint16_t v[Config::kTileKV][Config::kHeadDimV];
  alignas(16) float references[Config::kWarps][8][2 * Config::kRowTiles];  // of the softmax: those of a quad's rows
  Work work[2];                                                            // this tile's and the next one's, in turn
  int32_t drawn;                                                           // the next item's ticket
  Tickets tickets;
  plan::Header* header;  // the plan's; here, for an address in registers would stay there
};

using Config64 = TileConfig<64, 64, 4, 2, 64, 2>;
using Config96 = TileConfig<96, 64, 4, 2, 64, 2>;
using Config128 = TileConfig<128, 128, 4, 2, 64, 2>;
using Config192 = TileConfig<192, 128, 4, 2, 64, 2, 2>;
using Config192Small = TileConfig<192, 128, 4, 2, 48, 2>;
using Config256 = TileConfig<256, 256, 8, 1, 64, 1>;
using Config256Small = TileConfig<256, 256, 4, 1, 64, 1>;

// What of a configuration is known at run time.
struct Variant {
  int32_t head_dim_qk, head_dim_v;
  int32_t tile_q, tile_kv;
  int32_t ctas_per_sm;
  int32_t shared_bytes;
};

template <typename Config>
constexpr Variant variant_of() {
  return {Config::kHeadDimQK, Config::kHeadDimV,  Config::kTileQ,
          Config::kTileKV,    Config::kCtasPerSm, (int32_t)sizeof(SharedStorage<Config>)};
}

// Calls f(Config{}) for each configuration, narrow heads first, and for one pair of dims the one that needs the most
// shared memory first.
template <typename Function>
constexpr void for_each_config(Function f) {
  f(Config64{});
  f(Config96{});
  f(Config128{});
  f(Config192{});
  f(Config192Small{});
  f(Config256{});
  f(Config256Small{});
}

// Shared memory that a CTA may have: 99 KB (compute capability 8.6, 8.9, 12.0), 163 KB (8.0, 8.7), 227 KB (9.0, 10.0).
// An SM has 1 KB more, and each CTA costs 1 KB beside its own.
constexpr int32_t kSmallestSharedBytes = 99 * 1024, kSharedBytesOf80 = 163 * 1024, kSharedBytesOf90 = 227 * 1024;
constexpr int32_t kReservedBytes = 1024;

// Whether as many CTAs as it asks for fit an SM.
constexpr bool fits(const Variant& variant, int32_t shared_bytes) {
  return variant.ctas_per_sm * (variant.shared_bytes + kReservedBytes) <= shared_bytes + kReservedBytes;
}

static_assert(sizeof(SharedStorage<Config64>) <= kSmallestSharedBytes, "");
static_assert(sizeof(SharedStorage<Config96>) <= kSmallestSharedBytes, "");
static_assert(sizeof(SharedStorage<Config128>) <= kSmallestSharedBytes, "");
static_assert(sizeof(SharedStorage<Config192Small>) <= kSmallestSharedBytes, "the last of its dims fits every device");
static_assert(sizeof(SharedStorage<Config256Small>) <= kSmallestSharedBytes, "the last of its dims fits every device");
static_assert(fits(variant_of<Config192Small>(), kSharedBytesOf80), "two CTAs per SM on 8.0");
static_assert(fits(variant_of<Config192>(), kSharedBytesOf90), "two CTAs per SM on 9.0");
static_assert(fits(variant_of<Config256>(), kSharedBytesOf80), "8.0");

// The configuration for these head dims on a device whose CTAs may have `shared_bytes`: of the narrowest dims that hold
// them, the first of which as many CTAs fit as it asks for, or else the last. -1: the dims are too wide.
inline int choose_variant(int32_t dim_qk, int32_t dim_v, int32_t shared_bytes) {
  int index = 0, chosen = -1;
  Variant of_chosen = {};
  for_each_config([&](auto config) {
    constexpr Variant variant = variant_of<decltype(config)>();
    const bool holds = dim_qk <= variant.head_dim_qk && dim_v <= variant.head_dim_v;
    const bool same_dims = variant.head_dim_qk == of_chosen.head_dim_qk && variant.head_dim_v == of_chosen.head_dim_v;
    if (holds && (chosen < 0 || (same_dims && !fits(of_chosen, shared_bytes)))) {
      chosen = index;
      of_chosen = variant;
    }
    ++index;
  });
  return chosen;
}

inline Variant variant_at(int chosen) {
  int index = 0;
  Variant found = {};
  for_each_config([&](auto config) {
    if (index++ == chosen) found = variant_of<decltype(config)>();
  });
  return found;
}

// What the kernel wants of its plan. Costs count in key tiles, which are smaller than the default's. The CTAs of an
// H200 are the measure of the pieces, whatever the device: they decide about the bits of a result.
inline plan::Config plan_config(const Variant& variant) {
  plan::Config config;
  const int32_t smaller = config.tile_kv / variant.tile_kv;
  config.tile_q = variant.tile_q;
  config.short_tile_q = variant.tile_q;
  config.tile_kv = variant.tile_kv;
  config.item_overhead *= smaller;
  config.min_item_cost *= smaller;
  config.max_splits = plan::kMaxSplits;
  config.split_items = variant.ctas_per_sm * 132;
  config.min_split_keys = 2048;
  return config;
}

}  // namespace mla_prefill::sm80
