// Sequences are sorted by rank with a stable counting sort, then every item is written from its own index. Each CTA
// sorts for itself (they all find the same, so that none waits for another) and writes its share of the items. Loops
// are not unrolled: the code is cold at each step, and comes from device memory.
#include "plan/device.h"

namespace mla_prefill::plan {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMostCtas = 128;

struct Scratch {
  int32_t* order;       // [batch] sequences with query rows, longest first
  int32_t* first_item;  // [batch + 1] of each of them; the last entry is the number of items
};

struct Lengths {
  int32_t q, k;
};

__device__ Lengths lengths_of(const Problem& p, int32_t seq) {
  return {p.cu_seqlens_q[seq + 1] - p.cu_seqlens_q[seq], p.cu_seqlens_k[seq + 1] - p.cu_seqlens_k[seq]};
}

// -1 for a sequence without query rows.
__device__ int32_t rank_of(const Config& config, const Problem& p, int32_t seq) {
  const Lengths len = lengths_of(p, seq);
  return len.q > 0 ? sequence_rank(config, p.num_heads, p.causal, len.q, len.k) : -1;
}

// Inclusive sum over the CTA; `total` gets the sum of all threads.
__device__ int32_t scan(int32_t value, int32_t (&warp_sums)[kWarps], int32_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan_warp = [lane](int32_t sum) {
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = shuffle_up(sum, step);
      if (lane >= step) sum += other;
    }
    return sum;
  };
  value = scan_warp(value);
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = scan_warp(warp_sums[lane]);
  __syncthreads();
  *total = warp_sums[kWarps - 1];
  const int32_t before = warp == 0 ? 0 : warp_sums[(warp + kWarps - 1) % kWarps];
  __syncthreads();
  return before + value;
}

// Fills scratch.order; returns how many sequences it holds. Each warp has a share of the sequences, which it counts by
// rank, and then writes behind those of higher ranks and of the warps before it.
__device__ int32_t sort_sequences(const Config& config, const Problem& p, const Scratch& scratch,
                                  int32_t (&warp_sums)[kWarps]) {
  __shared__ int32_t places[kNumRanks][kWarps + 1];  // one more: lanes with different ranks meet different banks
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t share = ceil_div(ceil_div(p.batch, kWarps), 32) * 32;
  const uint32_t from = (uint32_t)warp * share, to = from + share, all = p.batch;
  const int32_t begin = (int32_t)(from < all ? from : all), end = (int32_t)(to < all ? to : all);
#pragma unroll 1
  for (int i = threadIdx.x; i < kNumRanks * (kWarps + 1); i += kThreads) places[0][i] = 0;
  __syncthreads();
  int32_t num_sequences = 0;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const bool counted = pass > 0;
    if (counted) {  // from counts to places: ranks descend, warps ascend
      constexpr int kPerThread = kNumRanks * kWarps / kThreads;
      static_assert(kPerThread * kThreads == kNumRanks * kWarps, "each thread has as many counts");
      int32_t* counts[kPerThread];
      int32_t sum = 0;
      for (int i = 0; i < kPerThread; ++i) {
        const int index = threadIdx.x * kPerThread + i;
        counts[i] = &places[kNumRanks - 1 - index / kWarps][index % kWarps];
        sum += *counts[i];
      }
      int32_t place = scan(sum, warp_sums, &num_sequences) - sum;
      for (int i = 0; i < kPerThread; ++i) {
        const int32_t count = *counts[i];
        *counts[i] = place;
        place += count;
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int32_t base = begin; base < end; base += 32) {
      const int32_t seq = base + lane;
      const int32_t rank = seq < end ? rank_of(config, p, seq) : -1;
      const uint32_t alike = lanes_alike(rank), alike_before = alike & ((1u << lane) - 1);
      const int32_t next = rank >= 0 ? places[rank][warp] : 0;
      sync_warp();
      if (rank >= 0 && alike_before == 0) places[rank][warp] = next + __popc(alike);
      if (rank >= 0 && counted) scratch.order[next + __popc(alike_before)] = seq;
      sync_warp();
    }
    __syncthreads();
  }
  return num_sequences;
}

__device__ SequenceWork work_of(const Config& config, const Problem& p, int32_t seq) {
  const Lengths len = lengths_of(p, seq);
  return sequence_work(config, p.num_heads, p.causal, p.bytes_per_key, len.q, len.k);
}

__global__ __launch_bounds__(kThreads, 1) void plan_kernel(Config config, Problem p, int32_t* buffer, int32_t capacity,
                                                           int32_t num_ctas, Scratch scratch) {
  __shared__ int32_t warp_sums[kWarps];
  __shared__ int32_t first_short, split_end[kNumSplitClasses];
  if (threadIdx.x == 0) first_short = INT32_MAX;
  if (threadIdx.x < kNumSplitClasses) split_end[threadIdx.x] = 0;
  const int32_t num_sequences = sort_sequences(config, p, scratch, warp_sums);
  __syncthreads();

  int32_t num_items = 0;
#pragma unroll 1
  for (int32_t base = 0; base < num_sequences; base += kThreads) {
    const int32_t i = base + threadIdx.x;
    SequenceWork work = {};
    if (i < num_sequences) work = work_of(config, p, scratch.order[i]);
    int32_t added;
    const int32_t end = num_items + scan(work.num_items, warp_sums, &added);
    if (i < num_sequences) {
      scratch.first_item[i] = end - work.num_items;
      if (is_short(config, work.len_k)) atomicMin(&first_short, end - work.num_items);
      if (work.num_splits > 1) atomicMax(&split_end[kNumSplitClasses - log2_floor(work.num_splits)], end);
    }
    num_items += added;
  }
  if (threadIdx.x == 0) scratch.first_item[num_sequences] = num_items;
  __syncthreads();
  const int32_t listed = min(num_items, capacity);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    Header header = {};
    header.version = kVersion;
    header.num_items = listed;
    header.capacity = capacity;
    header.batch = p.batch;
    header.num_heads = p.num_heads;
    header.causal = p.causal;
    header.tile_q = config.tile_q;
    header.tile_kv = config.tile_kv;
    header.first_short = min(first_short, listed);
    for (int i = 0, before = 0; i < kNumSplitClasses; ++i) {
      before = max(before, min(split_end[i], listed));
      header.split_end[i] = before;
    }
    *reinterpret_cast<Header*>(buffer) = header;
  }

#pragma unroll 1
  for (int32_t i = blockIdx.x * kThreads + threadIdx.x; i < kItemsBegin - kHeaderInts; i += num_ctas * kThreads) {
    buffer[kHeaderInts + i] = 0;
  }
  WorkItem* items = reinterpret_cast<WorkItem*>(buffer + kItemsBegin);
#pragma unroll 1
  for (int32_t index = listed + blockIdx.x * kThreads + threadIdx.x; index < capacity; index += num_ctas * kThreads) {
    items[index] = {};  // so that equal lengths give equal plans
  }
#pragma unroll 1
  for (int32_t index = blockIdx.x * kThreads + threadIdx.x; index < listed; index += num_ctas * kThreads) {
    int32_t low = 0, high = num_sequences;  // the sequence whose items include this one
#pragma unroll 1
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (scratch.first_item[middle] <= index ? low : high) = middle;
    }
    const int32_t seq = scratch.order[low];
    items[index] = item_of_sequence(work_of(config, p, seq), p.causal, seq, index - scratch.first_item[low]);
  }
}

}  // namespace

int64_t scratch_ints(int64_t batch) { return 2 * batch + 1; }

cudaError_t write_on_device(const Config& config, const Problem& problem, int32_t* buffer, int64_t capacity,
                            int32_t* scratch, cudaStream_t stream) {
  const int32_t num_ctas = (int32_t)clamp((capacity + kThreads - 1) / kThreads, 1, kMostCtas);
  plan_kernel<<<num_ctas, kThreads, 0, stream>>>(config, problem, buffer, (int32_t)capacity, num_ctas,
                                                 {scratch, scratch + problem.batch});
  return cudaGetLastError();
}

}  // namespace mla_prefill::plan
