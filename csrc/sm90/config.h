// Tiles, shared memory and roles of the Hopper kernel, a template over q's and k's head dim.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace mla_prefill::sm90 {

constexpr int kHeadDimV = 128;
constexpr int kHeadDimRope = 64;  // of k_pe, where K is split

// Whether the kernel is compiled for these head dims.
constexpr bool takes_dims(int32_t dim_qk, int32_t dim_v) {
  return (dim_qk == 192 || dim_qk == 128) && dim_v == kHeadDimV;
}

// Tensors lie in shared memory as boxes of 64 columns: 128 bytes, the width of the swizzle. K's boxes are loaded one by
// one, so that those of k_nope and a last one of k_pe make a key as well as all of one tensor.
constexpr int kBoxColumns = 64;
constexpr int kBoxesV = kHeadDimV / kBoxColumns;
static_assert(kHeadDimRope == kBoxColumns, "k_pe is the last box");

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;  // query rows of one consumer warpgroup: wgmma's M

// A CTA has one producer warpgroup and two consumer warpgroups. They form teams of a producer warp and its consumers.
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
constexpr int kProducerRegisters = 56;  // with 40 it spills
constexpr int kConsumerRegisters = 224;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (1 + kConsumers),
              "setmaxnreg hands around what the CTA was launched with");

template <int kTileQ_, int kTileKV_>
struct TileConfig {
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileKV = kTileKV_;
  static constexpr int kStages = 2;                           // of K and of V
  static constexpr int kConsumers = kTileQ / kWarpgroupRows;  // of a team
  static constexpr int kTeams = sm90::kConsumers / kConsumers;
  // Two consumers take turns: one's softmax runs while the other's products do.
  static constexpr bool kPingPong = kConsumers == 2;
  // Of the next tile, into the L2. It costs 8 % on items of one key tile.
  static constexpr bool kPrefetchQ = kConsumers == 2;
  // Short sequences have no split items.
  static constexpr bool kSplits = kConsumers == 2;

  static_assert(kTileQ % kWarpgroupRows == 0 && kTeams * kConsumers == sm90::kConsumers, "all consumers have a team");
};

using LongTile = TileConfig<128, 128>;  // one team
using ShortTile = TileConfig<64, 64>;   // two, side by side

// What the kernel wants of its plan.
inline plan::Config plan_config() {
  plan::Config config;
  config.tile_q = LongTile::kTileQ;
  config.tile_kv = LongTile::kTileKV;
  config.short_tile_q = ShortTile::kTileQ;
  config.short_keys = LongTile::kTileKV;
  config.max_splits = plan::kMaxSplits;
  config.split_items = 132;
  config.min_split_keys = 32 * LongTile::kTileKV;
  return config;
}

enum class WarpRole { kProducer, kConsumer };  // warpgroup 0, and the others

// One tile of work on its way from the producer to the consumers.
struct alignas(16) Tile {
  int32_t q_row;     // of the tensors
  int32_t q_rows;    // rows from q_row on that belong to the sequence, at least 1
  int32_t keys;      // the tile's rows see keys [0, keys) of the sequence at most
  int32_t last_key;  // of row 0 under the causal mask; of row r it is last_key + r
  int32_t head;
  int32_t first_kv_tile, end_kv_tile;  // at least one key tile; an end of kNoMoreTiles ends the team's work
  int32_t piece;                       // its ticket, where the item is split; kWhole where it is not
};
static_assert(sizeof(Tile) == 32, "two 16-byte words");
constexpr int32_t kNoMoreTiles = -1;
constexpr int32_t kWhole = -1;

template <typename T, int kHeadDimQK, typename Config>
struct alignas(1024) Tensors {
  static constexpr int kBoxesQK = kHeadDimQK / kBoxColumns;
  static_assert(kHeadDimQK % kBoxColumns == 0, "whole boxes");

  T q[kBoxesQK][Config::kTileQ][kBoxColumns];
  T k[Config::kStages][kBoxesQK][Config::kTileKV][kBoxColumns];
  T v[Config::kStages][kBoxesV][Config::kTileKV][kBoxColumns];
};

template <typename Config>
struct Channels {
  Tile tiles[2];
  uint64_t q_full[Config::kConsumers], q_empty[Config::kConsumers];  // each consumer has its own rows of Q
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
  uint64_t v_full[Config::kStages], v_empty[Config::kStages];
  uint64_t tile_full[2], tile_empty[2];
};

template <typename T, int kHeadDimQK>
struct alignas(1024) SharedStorage {
  union {
    Tensors<T, kHeadDimQK, LongTile> long_tensors;
    Tensors<T, kHeadDimQK, ShortTile> short_tensors[ShortTile::kTeams];
  };
  Channels<LongTile> long_channels;
  Channels<ShortTile> short_channels[ShortTile::kTeams];
  uint64_t long_items_done;
  int32_t has_short_items;
};

template <typename T, int kHeadDimQK>
constexpr int kSharedBytes = sizeof(SharedStorage<T, kHeadDimQK>) + 1024;  // the base is aligned in the kernel
static_assert(kSharedBytes<uint16_t, 192> <= 227 * 1024, "shared memory of a CTA");
static_assert(kSharedBytes<uint16_t, 128> <= 227 * 1024, "shared memory of a CTA");

}  // namespace mla_prefill::sm90
