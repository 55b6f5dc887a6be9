// Ragged MLA prefill on CDNA: a persistent block of four waves takes items from the plan. Read it from the bottom up:
// prefill_kernel -> Block::run -> run_head (the main loop) -> key_tile.
//
// A wave owns 32 query rows and computes everything transposed,
//
//   S^T = K Q^T  (32 keys x 32 rows)      P^T = exp2(S^T - reference)  in registers      O^T += V^T P^T
//
// because the layout of the result S^T is that of the operand P^T: weights never leave their lane. K and V come through
// shared memory, shared by the four waves; the next tile is on its way from global memory while this one is computed.
#pragma once

#include "hip/config.h"
#include "hip/epilogue.h"
#include "hip/gcn.h"
#include "hip/softmax.h"
#include "params.h"

namespace mla_prefill::hip {

struct KernelParams {
  PrefillParams problem;  // k_pe is set for keys in one tensor too: its last columns
  int32_t* plan;          // header and items; the header's counters move
  int32_t num_blocks;     // of the launch
};

// ---- Keys and values ------------------------------------------------------------------------------------------------

// Consecutive rows of one head, read tile by tile.
struct RowStream {
  const char* next;        // row 0 of the next tile
  int32_t row_bytes;       // from row to row
  int32_t last_row_bytes;  // of the last row

  __device__ __forceinline__ void start(const ConstRows& tensor, int64_t row, int64_t head, int32_t width) {
    next = static_cast<const char*>(tensor.data) + (row * tensor.row_stride + head * tensor.head_stride) * 2;
    row_bytes = (int32_t)tensor.row_stride * 2;
    last_row_bytes = width * 2;
  }

  // The next tile, of which `rows` rows are there.
  __device__ __forceinline__ __amdgpu_buffer_rsrc_t take(int32_t rows) {
    const auto buffer = make_buffer(next, rows > 0 ? (rows - 1) * row_bytes + last_row_bytes : 0);
    next += (int64_t)kTileKV * row_bytes;
    return buffer;
  }
};

// Moves key tiles from global memory through the block's registers to shared memory. Rows past the end arrive as zeros.
struct KeyLoader {
  static constexpr int kChunksNope = kHeadDimNope / kLaneElements, kChunksRope = kHeadDimRope / kLaneElements;
  static constexpr int kRowsNope = kThreads / kChunksNope, kRowsRope = kThreads / kChunksRope;  // loaded at once
  static constexpr int kPiecesNope = kTileKV / kRowsNope;
  static_assert(kRowsRope == kTileKV, "k_pe is one 16-byte piece per thread");
  static constexpr int kQuad = 4;  // a thread loads 4 keys x 4 columns of V and transposes them
  static constexpr int kQuadsV = kHeadDimV / kQuad;
  static_assert(kTileKV / kQuad * kQuadsV == kThreads, "V is one 4 x 4 square per thread");

  SharedStorage& smem;
  const int thread;
  RowStream k_nope, k_pe, v;
  int32_t keys_left;
  u32x4 nope_piece[kPiecesNope], rope_piece;
  u32x2 v_piece[kQuad];

  __device__ KeyLoader(SharedStorage& storage, int thread_index) : smem(storage), thread(thread_index) {}

  __device__ __forceinline__ void start(const PrefillParams& p, int64_t first_key, int32_t keys, int head) {
    k_nope.start(p.k, first_key, head, kHeadDimNope);
    k_pe.start(p.k_pe, first_key, head, kHeadDimRope);
    v.start(p.v, first_key, head, kHeadDimV);
    keys_left = keys;
  }

  __device__ __forceinline__ void load_next() {
    const int32_t rows = keys_left < kTileKV ? keys_left : kTileKV;
    keys_left -= rows;
    const auto nope_buffer = k_nope.take(rows), rope_buffer = k_pe.take(rows), v_buffer = v.take(rows);
#pragma unroll
    for (int i = 0; i < kPiecesNope; ++i) {
      const uint32_t row = thread / kChunksNope + i * kRowsNope;
      nope_piece[i] = load_16_bytes(nope_buffer, row * k_nope.row_bytes + thread % kChunksNope * 16);
    }
    rope_piece = load_16_bytes(rope_buffer, thread / kChunksRope * k_pe.row_bytes + thread % kChunksRope * 16);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const uint32_t row = thread / kQuadsV * kQuad + i;
      v_piece[i] = load_8_bytes(v_buffer, row * v.row_bytes + thread % kQuadsV * 8);
    }
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int i = 0; i < kPiecesNope; ++i) {
      const int row = thread / kChunksNope + i * kRowsNope;
      *reinterpret_cast<u32x4*>(&smem.k[row][thread % kChunksNope * kLaneElements]) = nope_piece[i];
    }
    *reinterpret_cast<u32x4*>(&smem.k[thread / kChunksRope][kHeadDimNope + thread % kChunksRope * kLaneElements]) =
        rope_piece;

    const int quad = thread / kQuadsV;  // of keys: 4 quad .. 4 quad + 3
    uint64_t (*const to)[2] = smem.v[quad / 4][quad % 2];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const uint32_t key[kQuad] = {v_piece[0][word], v_piece[1][word], v_piece[2][word], v_piece[3][word]};
      const u32x2 even = {low_halves(key[0], key[1]), low_halves(key[2], key[3])};
      const u32x2 odd = {high_halves(key[0], key[1]), high_halves(key[2], key[3])};
      const int column = thread % kQuadsV * kQuad + 2 * word;
      to[place_of_column(column)][quad / 2 % 2] = __builtin_bit_cast(uint64_t, even);
      to[place_of_column(column + 1)][quad / 2 % 2] = __builtin_bit_cast(uint64_t, odd);
    }
  }

  // Where a column of V lies. Lanes that write are four columns apart, lanes that read are neighbours: in this order
  // both spread over all banks.
  __device__ __forceinline__ static int place_of_column(int column) { return column ^ (column / 4 % 8); }
};

// ---- Block ----------------------------------------------------------------------------------------------------------

struct Item {
  int64_t q_row, k_row;  // first of the tensors
  int32_t q_rows;
  int32_t keys;      // the item's rows see keys [0, keys) of the sequence at most
  int32_t last_key;  // of row 0 under the causal mask; of row r it is last_key + r
  int32_t head_begin, head_count;
};

template <typename T>
struct Block {
  SharedStorage& smem;
  const int thread = __builtin_amdgcn_workitem_id_x();
  const int lane = thread % kWaveSize;
  const int column = lane % 32, half = lane / 32;
  const int wave = uniform(thread / kWaveSize);

  KeyLoader loader;
  u32x4 q[kStepsQK];  // the lane's half of its query row
  f32x16 o[kBlocksV];
  OnlineSoftmax<T> softmax;

  __device__ explicit Block(SharedStorage& storage) : smem(storage), loader(storage, thread) {}

  __device__ __forceinline__ static const KernelParams& params() { return reload_arguments<KernelParams>(); }

  __device__ __forceinline__ static Item read_item(const KernelParams& p, int32_t index) {
    const plan::WorkItem& item = reinterpret_cast<const plan::WorkItem*>(p.plan + plan::kItemsBegin)[index];
    const int32_t *cu_q = p.problem.cu_seqlens_q + item.seq, *cu_k = p.problem.cu_seqlens_k + item.seq;
    const int32_t len_q = cu_q[1] - cu_q[0], len_k = cu_k[1] - cu_k[0];
    const int32_t last_key = p.problem.causal ? item.q_begin + len_k - len_q : INT32_MAX / 2;
    return {
        (int64_t)cu_q[0] + item.q_begin, cu_k[0], item.q_rows, item.kv_end, last_key, item.head_begin, item.head_count};
  }

  __device__ __forceinline__ void load_q(const PrefillParams& p, const Item& item, int head) {
    const int32_t rows = item.q_rows - wave * kWaveRows;  // none for some waves of a short tile
    RowStream stream;
    stream.start(p.q, item.q_row + wave * kWaveRows, head, kHeadDimQK);
    const auto buffer = stream.take(rows);
    const uint32_t offset = column * stream.row_bytes + half * 16;
#pragma unroll
    for (int step = 0; step < kStepsQK; ++step) q[step] = load_16_bytes(buffer, offset + step * kStepDepth * 2);
  }

  __device__ __forceinline__ f32x16 scores() const {
    f32x16 s = {};
#pragma unroll
    for (int step = 0; step < kStepsQK; ++step) {
      const u32x4 k = *reinterpret_cast<const u32x4*>(&smem.k[column][step * kStepDepth + half * kLaneElements]);
      s = multiply_add<T>(k, q[step], s);
    }
    return s;
  }

  __device__ __forceinline__ void add_values(const uint32_t (&weights)[8]) {
#pragma unroll
    for (int step = 0; step < kStepsPV; ++step) {
      const u32x4 w = {weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3]};
#pragma unroll
      for (int block = 0; block < kBlocksV; ++block) {
        const int place = block * 32 + KeyLoader::place_of_column(column);
        o[block] = multiply_add<T>(*reinterpret_cast<const u32x4*>(smem.v[step][half][place]), w, o[block]);
      }
    }
  }

  // `last_key` is the lane's, and counts from the first key of the tile.
  __device__ __forceinline__ void key_tile(bool masked, int32_t last_key) {
    __builtin_amdgcn_s_setprio(1);
    f32x16 s = scores();
    __builtin_amdgcn_s_setprio(0);
    if (masked) mask(s, last_key - 4 * half);
    uint32_t weights[8];
    softmax.update(s, weights, o, lane);
    __builtin_amdgcn_s_setprio(1);
    add_values(weights);
    __builtin_amdgcn_s_setprio(0);
  }

  __device__ __forceinline__ void run_head(const Item& item, int head) {
    const PrefillParams& p = params().problem;
    load_q(p, item, head);
    softmax.start(p.scale);
#pragma unroll
    for (int block = 0; block < kBlocksV; ++block) o[block] = f32x16(0.0f);

    // The wave's first and last row see keys up to these; rows past the item's see none.
    const int32_t first_row = wave * kWaveRows;
    const bool has_rows = first_row < item.q_rows;
    const auto limit = [&](int32_t row) {
      return item.last_key + row < item.keys ? item.last_key + row : item.keys - 1;
    };
    const int32_t last_of_all = limit(first_row), last_of_any = has_rows ? limit(first_row + kWaveRows - 1) : -1;
    const int32_t last_of_lane = limit(first_row + column);

    const int32_t tiles = (item.keys + kTileKV - 1) / kTileKV;
    loader.start(p, item.k_row, item.keys, head);
    if (tiles > 0) loader.load_next();
    for (int32_t tile = 0; tile < tiles; ++tile) {
      sync_block();  // all waves are done with the tile before
      loader.store();
      sync_block();
      if (tile + 1 < tiles) loader.load_next();
      const int32_t first_key = tile * kTileKV;
      if (first_key > last_of_any) continue;
      key_tile(first_key + kTileKV - 1 > last_of_all, last_of_lane - first_key);
    }

    float sum = softmax.sum.x + softmax.sum.y;
    sum += other_half(sum, lane);
    const float lse = sum == 0.0f ? -kInf : (softmax.reference + log2_approx(sum)) * kLn2;
    const int32_t row = first_row + column;
    if (row < item.q_rows) write_row<T>(params().problem, item.q_row + row, head, half, o, sum, lse);
  }

  __device__ __forceinline__ void run(const KernelParams& p) {
    plan::Header& header = *reinterpret_cast<plan::Header*>(p.plan);
    const int32_t num_items = header.num_items, num_blocks = p.num_blocks;
    int32_t index = __builtin_amdgcn_workgroup_id_x();
    while (index < num_items) {
      const Item item = read_item(params(), index);
      for (int32_t i = 0; i < item.head_count; ++i) run_head(item, item.head_begin + i);
      // Not drawn earlier: a long item would hold on to the next while other blocks run out of work. The compute unit's
      // other block fills the wait.
      if (thread == 0) smem.next_item = atomic_add(&header.ticket[0], 1);
      sync_block();
      index = num_blocks + uniform(smem.next_item);
      sync_block();
    }
    // The last block to finish resets the counters, so that the plan serves the next layer.
    if (thread == 0 && atomic_add(&header.finished[0], 1) == num_blocks - 1) {
      header.ticket[0] = 0;
      header.finished[0] = 0;
    }
  }
};

template <typename T>
__global__ __launch_bounds__(kThreads)
    __attribute__((amdgpu_waves_per_eu(kBlocksPerCu, kBlocksPerCu))) void prefill_kernel(const KernelParams params) {
  __shared__ SharedStorage smem;
  Block<T>(smem).run(params);
}

}  // namespace mla_prefill::hip
