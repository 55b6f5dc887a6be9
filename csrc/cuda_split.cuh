// Items whose keys are cut into pieces: each CTA leaves its piece's result in device memory, the last one to come
// combines them, in the order of the keys whoever it is. Each 16 query rows of an item are one warp's, which meets
// those that have the same rows in other CTAs, so that nothing but warps waits.
#pragma once

#include <cstdint>

#include "cuda_rows.cuh"
#include "params.h"
#include "plan/plan.h"

namespace mla_prefill {

constexpr int kRowsThatMeet = plan::kMostSplitRows / plan::kRowGroups;
static_assert(kRowsThatMeet == 16, "the rows of an accumulator of mma.m16n8k16, or of a warp in one of wgmma.m64");

// A lane's part of the 16 rows of a piece: its accumulators, then reference and sum of its two rows; a warp's lies word
// by word.
constexpr int accumulator_words(int head_dim_v) { return head_dim_v / 2 / 4; }
constexpr int piece_words(int head_dim_v) { return accumulator_words(head_dim_v) + 1; }

// Device memory for the results of pieces; 0 where no plan has any, whichever kernel and head dims it was made for.
inline int64_t partials_bytes(const PrefillParams& p, int head_dim_v) {
  if (!plan::may_split(p.num_heads, p.total_k)) return 0;
  return (int64_t)plan::kSplitSlots * plan::kRowGroups * piece_words(head_dim_v) * 32 * sizeof(float4);
}

// Where warps meet: how often the slot was used before in this launch, times kRound, plus the pieces that have come.
constexpr int32_t kRound = 2 * plan::kMaxSplits;

__device__ __forceinline__ int32_t load_acquire(const int32_t* at) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(int32_t* at, int32_t value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ int32_t add_acquire_release(int32_t* at, int32_t value) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(value) : "memory");
  return before;
}

template <int kHeadDimV>
__device__ __forceinline__ float4* partial_of(float4* partials, int32_t slot, int group) {
  return partials + ((int64_t)slot * plan::kRowGroups + group) * piece_words(kHeadDimV) * 32 + threadIdx.x % 32;
}

// Replaces a lane's part of rows [16 group, 16 group + 16) of a piece by that of the whole item, if this warp is the
// last; otherwise returns false. Of o[4 i .. 4 i + 3] the first two are of the lane's first row, the last two of its
// second; `reference` and `sum` are of its weights, 2^(x - reference). `split_end` is the header's. Loads kWordsAtOnce
// words of a piece at once.
template <int kWordsAtOnce, int kSize>
__device__ __forceinline__ bool combine_pieces(int32_t* plan, const int32_t (&split_end)[plan::kNumSplitClasses],
                                               float4* partials, int32_t ticket, int group, float (&o)[kSize],
                                               float (&reference)[2], float (&sum)[2]) {
  constexpr int kHeadDimV = 2 * kSize, kAccumulatorWords = accumulator_words(kHeadDimV);
  static_assert(kAccumulatorWords % kWordsAtOnce == 0, "");
  int32_t* const meetings = plan + plan::kHeaderInts;
  const plan::Piece piece = plan::piece_of_ticket(split_end, ticket);
  const int32_t first = ticket - piece.index, first_slot = first % plan::kSplitSlots;
  const int32_t round = first / plan::kSplitSlots * kRound;
  int32_t* const meeting = meetings + first_slot * plan::kRowGroups + group;
  const bool leader = threadIdx.x % 32 == 0;

  // The slots are free when the item that had them before is done. Its pieces have lower tickets, so they are running.
  if (round > 0) {
    while (leader && load_acquire(meeting) < round) __nanosleep(100);
    __syncwarp();
  }
  float4* const mine = partial_of<kHeadDimV>(partials, first_slot + piece.index, group);
#pragma unroll
  for (int i = 0; i < kAccumulatorWords; ++i) {
    __stcg(mine + i * 32, make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]));
  }
  __stcg(mine + kAccumulatorWords * 32, make_float4(reference[0], sum[0], reference[1], sum[1]));
  __syncwarp();
  int32_t before = 0;
  if (leader) before = add_acquire_release(meeting, 1) - round;
  if (__shfl_sync(~0u, before, 0) != piece.num_splits - 1) return false;
  __syncwarp();

  float top[2] = {-INFINITY, -INFINITY};
#pragma unroll 4
  for (int i = 0; i < piece.num_splits; ++i) {
    const float4 state = __ldcg(partial_of<kHeadDimV>(partials, first_slot + i, group) + kAccumulatorWords * 32);
    top[0] = fmaxf(top[0], state.x);
    top[1] = fmaxf(top[1], state.z);
  }
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) o[i] = 0.0f;
#pragma unroll
  for (int begin = 0; begin < kAccumulatorWords; begin += kWordsAtOnce) {
#pragma unroll 1
    for (int i = 0; i < piece.num_splits; ++i) {
      const float4* const from = partial_of<kHeadDimV>(partials, first_slot + i, group);
      const float4 state = __ldcg(from + kAccumulatorWords * 32);
      const float weight[2] = {exp2_approx(state.x - top[0]), exp2_approx(state.z - top[1])};
      if (begin == 0) {
        sum[0] = fmaf(weight[0], state.y, sum[0]);
        sum[1] = fmaf(weight[1], state.w, sum[1]);
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
  reference[0] = top[0];
  reference[1] = top[1];

  // The slots are free: for the next round, or where this launch has no more, for the next launch.
  __syncwarp();
  if (leader) {
    const int32_t pieces = plan::num_pieces(split_end);
    for (int i = 0; i < piece.num_splits; ++i) {
      const bool last_round = first + i + plan::kSplitSlots >= pieces;
      store_release(meeting + i * plan::kRowGroups, last_round ? 0 : round + kRound);
    }
  }
  return true;
}

}  // namespace mla_prefill
