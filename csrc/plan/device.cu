// Sequences are sorted by rank with a stable counting sort, then every item is written from its own index. Each CTA
// sorts for itself (they all find the same, so that none waits for another) and writes its share of the items.
#include "plan/device.h"

namespace mla_prefill::plan {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kCtas = 32;

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
  if (seq >= p.batch) return -1;
  const Lengths len = lengths_of(p, seq);
  return len.q > 0 ? sequence_rank(config, p.num_heads, p.causal, len.q, len.k) : -1;
}

// Inclusive sum over the CTA; `total` gets the sum of all threads.
__device__ int32_t scan(int32_t value, int32_t (&warp_sums)[kWarps], int32_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = shuffle_up(value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  int32_t before = 0, all = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += warp_sums[i];
    all += warp_sums[i];
  }
  __syncthreads();
  *total = all;
  return before + value;
}

// Fills scratch.order; returns how many sequences it holds.
__device__ int32_t sort_sequences(const Config& config, const Problem& p, const Scratch& scratch) {
  __shared__ int32_t begin[kNumRanks];            // where the next sequence of a rank goes
  __shared__ int32_t in_warp[kWarps][kNumRanks];  // sequences of a rank per warp of this round, then before that warp
  __shared__ int32_t num_sequences;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  for (int rank = threadIdx.x; rank < kNumRanks; rank += kThreads) begin[rank] = 0;
  __syncthreads();
  for (int32_t seq = threadIdx.x; seq < p.batch; seq += kThreads) {
    const int32_t rank = rank_of(config, p, seq);
    if (rank >= 0) atomicAdd(&begin[rank], 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t offset = 0;
    for (int rank = kNumRanks - 1; rank >= 0; --rank) {
      const int32_t count = begin[rank];
      begin[rank] = offset;
      offset += count;
    }
    num_sequences = offset;
  }
  __syncthreads();

  for (int32_t base = 0; base < p.batch; base += kThreads) {
    for (int i = threadIdx.x; i < kWarps * kNumRanks; i += kThreads) in_warp[0][i] = 0;
    __syncthreads();
    const int32_t seq = base + threadIdx.x;
    const int32_t rank = rank_of(config, p, seq);
    const uint32_t alike = lanes_alike(rank);
    const int32_t place = __popc(alike & ((1u << lane) - 1));
    if (rank >= 0 && place == 0) in_warp[warp][rank] = __popc(alike);
    __syncthreads();
    for (int r = threadIdx.x; r < kNumRanks; r += kThreads) {
      int32_t next = begin[r];
      for (int w = 0; w < kWarps; ++w) {
        const int32_t count = in_warp[w][r];
        in_warp[w][r] = next;
        next += count;
      }
      begin[r] = next;
    }
    __syncthreads();
    if (rank >= 0) scratch.order[in_warp[warp][rank] + place] = seq;
    __syncthreads();
  }
  return num_sequences;
}

__device__ SequenceWork work_of(const Config& config, const Problem& p, int32_t seq) {
  const Lengths len = lengths_of(p, seq);
  return sequence_work(config, p.num_heads, p.causal, p.bytes_per_key, len.q, len.k);
}

__global__ __launch_bounds__(kThreads) void plan_kernel(Config config, Problem p, int32_t* buffer, int32_t capacity,
                                                        Scratch scratch) {
  __shared__ int32_t warp_sums[kWarps];
  __shared__ int32_t first_short, split_end[kNumSplitClasses];
  if (threadIdx.x == 0) first_short = INT32_MAX;
  if (threadIdx.x < kNumSplitClasses) split_end[threadIdx.x] = 0;
  const int32_t num_sequences = sort_sequences(config, p, scratch);
  __syncthreads();

  int32_t num_items = 0;
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

  for (int32_t i = blockIdx.x * kThreads + threadIdx.x; i < kItemsBegin - kHeaderInts; i += kCtas * kThreads) {
    buffer[kHeaderInts + i] = 0;
  }
  WorkItem* items = reinterpret_cast<WorkItem*>(buffer + kItemsBegin);
  for (int32_t index = listed + blockIdx.x * kThreads + threadIdx.x; index < capacity; index += kCtas * kThreads) {
    items[index] = {};  // so that equal lengths give equal plans
  }
  for (int32_t index = blockIdx.x * kThreads + threadIdx.x; index < listed; index += kCtas * kThreads) {
    int32_t low = 0, high = num_sequences;  // the sequence whose items include this one
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
  plan_kernel<<<kCtas, kThreads, 0, stream>>>(config, problem, buffer, (int32_t)capacity,
                                              {scratch, scratch + problem.batch});
  return cudaGetLastError();
}

}  // namespace mla_prefill::plan
