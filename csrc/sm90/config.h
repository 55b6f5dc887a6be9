// Head dims, tiles, shared memory and roles of the Hopper kernel.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace mla_prefill::sm90 {

constexpr int kHeadDimRope = 64;  // of k_pe, where K is split

// Tensors lie in shared memory as boxes of 64 columns: 128 bytes, the width of the swizzle. K's boxes are loaded one by
// one, so that those of k_nope and a last one of k_pe make a key as well as all of one tensor.
constexpr int kBoxColumns = 64;
static_assert(kHeadDimRope == kBoxColumns, "k_pe is the last box");

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;  // query rows of one consumer warpgroup: wgmma's M

template <typename T>
constexpr uint32_t kRowsBoxBytes = kWarpgroupRows * kBoxColumns * sizeof(T);  // of a consumer's rows of q and of out

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
  // Finished rows leave through a stage of V, and what they are merged into comes through it, where they fit one.
  static constexpr bool kStoresByTma = kTileKV >= kTileQ;
  // Short sequences have no split items.
  static constexpr bool kSplits = kConsumers == 2;

  static_assert(kTileQ % kWarpgroupRows == 0 && kTeams * kConsumers == sm90::kConsumers, "all consumers have a team");
};

struct NoTile {
  static constexpr int kTeams = 0;
};

// A variant of the kernel: head dims of q and k and of v, and the tiles whose tensors fit.
template <int kHeadDimQK_, int kHeadDimV_, typename LongTile_, typename ShortTile_>
struct KernelVariant {
  static constexpr int kHeadDimQK = kHeadDimQK_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBoxesQK = kHeadDimQK / kBoxColumns;
  static constexpr int kBoxesV = kHeadDimV / kBoxColumns;
  using LongTile = LongTile_;    // one team
  using ShortTile = ShortTile_;  // two, side by side, for short items; with NoTile they are taken like long ones
  static constexpr bool kHasShortTile = ShortTile::kTeams > 0;

  static_assert(kHeadDimQK % kBoxColumns == 0 && kHeadDimV % kBoxColumns == 0, "whole boxes");
};

using Dims192 = KernelVariant<192, 128, TileConfig<128, 128>, TileConfig<64, 64>>;
using Dims128 = KernelVariant<128, 128, TileConfig<128, 128>, TileConfig<64, 64>>;
// O takes 128 registers of a thread: S and P of 80 keys fit beside it, and two stages of their K and V beside Q.
using Dims256 = KernelVariant<256, 256, TileConfig<128, 80>, NoTile>;

// Calls function(Variant) for head dims. False where the kernel is not compiled for them.
template <typename Function>
constexpr bool with_variant(int32_t dim_qk, int32_t dim_v, Function&& function) {
  const auto suits = [&](auto variant) {
    if (dim_qk != variant.kHeadDimQK || dim_v != variant.kHeadDimV) return false;
    function(variant);
    return true;
  };
  return suits(Dims192{}) || suits(Dims128{}) || suits(Dims256{});
}

constexpr bool takes_dims(int32_t dim_qk, int32_t dim_v) {
  return with_variant(dim_qk, dim_v, [](auto) {});
}

// What the kernel wants of its plan. For other head dims, which it refuses later, any will do.
inline plan::Config plan_config(int32_t dim_qk, int32_t dim_v) {
  plan::Config config;
  with_variant(dim_qk, dim_v, [&](auto variant) {
    using Variant = decltype(variant);
    config.tile_q = Variant::LongTile::kTileQ;
    config.tile_kv = Variant::LongTile::kTileKV;
    if constexpr (Variant::kHasShortTile) {
      config.short_tile_q = Variant::ShortTile::kTileQ;
      config.short_keys = Variant::LongTile::kTileKV;
    }
  });
  config.max_splits = plan::kMaxSplits;
  config.split_items = 132;
  config.min_split_keys = 4096;
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
constexpr int kTileSlots = 4;  // the one at work, the next one, and some room for the producer to run ahead

template <typename T, typename Variant, typename Config>
struct alignas(1024) Tensors {
  T q[Variant::kBoxesQK][Config::kTileQ][kBoxColumns];
  T k[Config::kStages][Variant::kBoxesQK][Config::kTileKV][kBoxColumns];
  T v[Config::kStages][Variant::kBoxesV][Config::kTileKV][kBoxColumns];
};

template <typename Config>
struct Channels {
  Tile tiles[kTileSlots];
  uint64_t q_full[Config::kConsumers], q_empty[Config::kConsumers];  // each consumer has its own rows of Q
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
  uint64_t v_full[Config::kStages], v_empty[Config::kStages];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
};

template <typename T, typename Variant, bool kHasShortTile = Variant::kHasShortTile>
struct alignas(1024) SharedStorage {
  using LongTile = typename Variant::LongTile;
  using ShortTile = typename Variant::ShortTile;

  union {
    Tensors<T, Variant, LongTile> long_tensors;
    Tensors<T, Variant, ShortTile> short_tensors[ShortTile::kTeams];
  };
  Channels<LongTile> long_channels;
  Channels<ShortTile> short_channels[ShortTile::kTeams];
  uint64_t long_items_done;
  int32_t has_short_items;
};

template <typename T, typename Variant>
struct alignas(1024) SharedStorage<T, Variant, false> {
  Tensors<T, Variant, typename Variant::LongTile> long_tensors;
  Channels<typename Variant::LongTile> long_channels;
};

template <typename T, typename Variant>
constexpr int kSharedBytes = sizeof(SharedStorage<T, Variant>);
static_assert(kSharedBytes<uint16_t, Dims192> <= 227 * 1024, "shared memory of a CTA");
static_assert(kSharedBytes<uint16_t, Dims128> <= 227 * 1024, "shared memory of a CTA");
static_assert(kSharedBytes<uint16_t, Dims256> <= 227 * 1024, "shared memory of a CTA");

}  // namespace mla_prefill::sm90
