// Tiles and shared memory of the AMD kernel, for head dims (nope, rope, v) = (128, 64, 128).
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace mla_prefill::hip {

constexpr int kHeadDimNope = 128;
constexpr int kHeadDimRope = 64;
constexpr int kHeadDimQK = kHeadDimNope + kHeadDimRope;
constexpr int kHeadDimV = 128;

constexpr int kWaveSize = 64;
constexpr int kWaves = 4;
constexpr int kThreads = kWaves * kWaveSize;
constexpr int kWaveRows = 32;  // query rows of one wave: the columns of a 32 x 32 MFMA
constexpr int kTileQ = kWaves * kWaveRows;
constexpr int kTileKV = 32;  // keys per step: the rows of a 32 x 32 MFMA

// Two blocks per compute unit: while one's waves are in their softmax, the other's keep the matrix cores busy. Each
// SIMD then has two waves of at most 256 registers.
constexpr int kBlocksPerCu = 2;

// A lane's operand of one matrix step: 8 elements, 16 bytes. Two 32x32x8 instructions, or one 32x32x16 on gfx950.
constexpr int kLaneElements = 8;
constexpr int kStepDepth = 2 * kLaneElements;  // the two halves of a wave hold different 8 of 16
constexpr int kStepsQK = kHeadDimQK / kStepDepth;
constexpr int kStepsPV = kTileKV / kStepDepth;
constexpr int kBlocksV = kHeadDimV / 32;  // 32 x 32 blocks of O^T

// What the kernel wants of its plan. Costs count in tiles of 32 keys here, a quarter of the default's.
inline plan::Config plan_config() {
  plan::Config config;
  config.tile_q = kTileQ;
  config.tile_kv = kTileKV;
  config.item_overhead = 8;
  config.min_item_cost = 32;
  return config;
}

// Byte offsets inside a tile are 32 bits wide.
constexpr int64_t kMaxRowStride = (int64_t)1 << 24;

// Rows of K are padded to an odd number of 16-byte words: eight rows at one column lie in eight different places of the
// 32 banks, so that reading a fragment has no conflict.
constexpr int kPaddedRowK = kHeadDimQK + kLaneElements;
static_assert(kPaddedRowK / kLaneElements % 2 == 1, "an odd number of 16-byte words");

// V lies transposed, in quads: four keys of one column, 8 bytes. The two quads that a lane multiplies in one step are
// neighbours: [step][half of the wave][column][which of the two].
struct alignas(16) SharedStorage {
  uint16_t k[kTileKV][kPaddedRowK];
  uint64_t v[kStepsPV][2][kHeadDimV][2];
  int32_t next_item;
};
static_assert(kBlocksPerCu * sizeof(SharedStorage) <= 64 * 1024, "LDS of a compute unit");

}  // namespace mla_prefill::hip
