// Items whose keys are cut into pieces: each CTA leaves its piece's result in device memory, the last one to come
// combines them, in the order of the keys whoever it is. Every warp has its own rows and meets the same warp of the
// other CTAs, so that nothing but warps waits.
#pragma once

#include "plan/plan.h"
#include "sm90/config.h"
#include "sm90/ptx.h"
#include "sm90/softmax.cuh"

namespace mla_prefill::sm90 {

constexpr int kWarps = kConsumers * kWarpgroupThreads / 32;
static_assert(kWarps == plan::kWarpsThatMeet, "the plan has room for the warps of a CTA");

// A lane's part of a piece: its accumulators, then maximum and sum of its two rows; a warp's lies word by word.
constexpr int accumulator_words(int head_dim_v) { return head_dim_v / 2 / 4; }
constexpr int piece_words(int head_dim_v) { return accumulator_words(head_dim_v) + 1; }
constexpr int64_t partials_bytes(int head_dim_v) {
  return (int64_t)plan::kSplitSlots * kWarps * piece_words(head_dim_v) * 32 * sizeof(float4);
}

// Where warps meet: how often the slot was used before in this launch, times kRound, plus the pieces that have come.
constexpr int32_t kRound = 2 * plan::kMaxSplits;

template <int kHeadDimV>
__device__ __forceinline__ float4* partial_of(float4* partials, int32_t slot, int warp) {
  return partials + ((int64_t)slot * kWarps + warp) * piece_words(kHeadDimV) * 32 + threadIdx.x % 32;
}

// Replaces o and the softmax's state by those of the whole item, if this warp is the last; otherwise returns false.
template <int kTileKV, int kSize>
__device__ __forceinline__ bool combine_pieces(int32_t* plan, float4* partials, int32_t ticket, int warp, float scale,
                                               float (&o)[kSize], OnlineSoftmax<kTileKV>& softmax) {
  constexpr int kHeadDimV = 2 * kSize, kAccumulatorWords = accumulator_words(kHeadDimV);
  const plan::Header& header = *reinterpret_cast<const plan::Header*>(plan);
  int32_t* const meetings = plan + plan::kHeaderInts;
  const plan::Piece piece = plan::piece_of_ticket(header.split_end, ticket);
  const int32_t first = ticket - piece.index, first_slot = first % plan::kSplitSlots;
  const int32_t round = first / plan::kSplitSlots * kRound;
  int32_t* const meeting = meetings + first_slot * plan::kWarpsThatMeet + warp;
  const bool leader = threadIdx.x % 32 == 0;

  // The slots are free when the item that had them before is done. Its pieces have lower tickets, so they are running.
  if (round > 0) {
    while (leader && load_acquire(meeting) < round) __nanosleep(100);
    __syncwarp();
  }
  float4* const mine = partial_of<kHeadDimV>(partials, first_slot + piece.index, warp);
#pragma unroll
  for (int i = 0; i < kAccumulatorWords; ++i) {
    __stcg(mine + i * 32, make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]));
  }
  __stcg(mine + kAccumulatorWords * 32, make_float4(softmax.max[0], softmax.sum[0], softmax.max[1], softmax.sum[1]));
  __syncwarp();
  int32_t before = 0;
  if (leader) before = add_acquire_release(meeting, 1) - round;
  if (__shfl_sync(~0u, before, 0) != piece.num_splits - 1) return false;
  __syncwarp();

  float top[2] = {-INFINITY, -INFINITY};
#pragma unroll 4
  for (int i = 0; i < piece.num_splits; ++i) {
    const float4 state = __ldcg(partial_of<kHeadDimV>(partials, first_slot + i, warp) + kAccumulatorWords * 32);
    top[0] = fmaxf(top[0], state.x);
    top[1] = fmaxf(top[1], state.z);
  }
  softmax.sum[0] = softmax.sum[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) o[i] = 0.0f;
  // With more accumulators than 64 there are not the registers to have all words of a piece on their way.
  constexpr int kWordsAtOnce = kSize > 64 ? 4 : kAccumulatorWords;
#pragma unroll
  for (int begin = 0; begin < kAccumulatorWords; begin += kWordsAtOnce) {
#pragma unroll 1
    for (int i = 0; i < piece.num_splits; ++i) {
      const float4* const from = partial_of<kHeadDimV>(partials, first_slot + i, warp);
      const float4 state = __ldcg(from + kAccumulatorWords * 32);
      const float weight[2] = {rescaling(state.x, top[0], scale), rescaling(state.z, top[1], scale)};
      if (begin == 0) {
        softmax.sum[0] = fmaf(weight[0], state.y, softmax.sum[0]);
        softmax.sum[1] = fmaf(weight[1], state.w, softmax.sum[1]);
      }
#pragma unroll
      for (int j = begin; j < begin + kWordsAtOnce; ++j) {
        const float4 x = __ldcg(from + j * 32);
        o[4 * j] = fmaf(weight[0], x.x, o[4 * j]);
        o[4 * j + 1] = fmaf(weight[0], x.y, o[4 * j + 1]);
        o[4 * j + 2] = fmaf(weight[1], x.z, o[4 * j + 2]);
        o[4 * j + 3] = fmaf(weight[1], x.w, o[4 * j + 3]);
      }
    }
  }
  softmax.max[0] = top[0];
  softmax.max[1] = top[1];

  // The slots are free: for the next round, or where this launch has no more, for the next launch.
  __syncwarp();
  if (leader) {
    const int32_t pieces = plan::num_pieces(header.split_end);
    for (int i = 0; i < piece.num_splits; ++i) {
      const bool last_round = first + i + plan::kSplitSlots >= pieces;
      store_release(meeting + i * plan::kWarpsThatMeet, last_round ? 0 : round + kRound);
    }
  }
  return true;
}

}  // namespace mla_prefill::sm90
