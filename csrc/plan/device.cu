// A counting sort, of items rather than sequences: sequences are counted in groups of one rank, and sums over the
// groups, and over a group's sequences in memory order, say where each one and its items go. Then every item is written
// from its own index. Up to kAloneBatch sequences take one launch, whose CTAs each sort for themselves, in shared
// memory, so that none waits for another; more take three, whose CTAs sort a chunk each. Code and lengths come from
// device memory and a call is short: loops are not unrolled, and the rules are evaluated in one place, once a sequence.
#include "plan/device.h"

namespace mla_prefill::plan {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMostCtas = 512;
constexpr int64_t kMostChunks = 128;
constexpr int64_t kAloneBatch = 512;
constexpr int kNumGroups = kNumRanks;  // in the order of the list: ranks descend
static_assert(kNumGroups < kThreads, "a thread for each group, and one for the end");

struct Sum {
  int32_t sequences, items;
};

__device__ Sum operator+(Sum a, Sum b) { return {a.sequences + b.sequences, a.items + b.items}; }

// Loads and stores of 16 bytes.
template <typename T>
struct alignas(16) Words {
  T value;
};

struct Sequence {
  SequenceWork work;
  int32_t group;  // -1: no query rows
  Sum before;     // in its group, of the same chunk
};

// In shared memory or in the scratch.
struct Lists {
  Sequence* sequences;  // [batch]
  Sum* counts;          // [num_chunks][kNumGroups]
  Sum* total;           // of all sequences
  int32_t* order;       // [batch] sequences with query rows, in the order of the list
  int32_t* first_item;  // [batch] of each of them
};

struct Arguments {
  Config config;
  Problem problem;
  int32_t* buffer;
  int32_t capacity;
  int32_t num_ctas;  // that write items
  int32_t num_chunks;
  int32_t chunk_size;  // sequences, a multiple of kThreads
  int32_t* scratch;
};

__device__ Lists lists_in_scratch(const Arguments& args) {
  Sum* const total = reinterpret_cast<Sum*>(args.scratch);
  Sum* const counts = total + 1;
  int32_t* const order = reinterpret_cast<int32_t*>(counts + args.num_chunks * kNumGroups);
  int32_t* const first_item = order + args.problem.batch;
  return {reinterpret_cast<Sequence*>(first_item + args.problem.batch), counts, total, order, first_item};
}

__device__ Sequence sequence_at(const Config& config, const Problem& p, int32_t index) {
  const int32_t len_q = p.cu_seqlens_q[index + 1] - p.cu_seqlens_q[index];
  const int32_t len_k = p.cu_seqlens_k[index + 1] - p.cu_seqlens_k[index];
  Sequence sequence = {};
  sequence.group = -1;
  if (len_q > 0) {
    sequence.work = sequence_work(config, p.num_heads, p.causal, p.bytes_per_key, len_q, len_k);
    sequence.group = kNumRanks - 1 - sequence_rank(config, p.num_heads, p.causal, len_q, len_k);
  }
  return sequence;
}

// The sum of `value` over the lanes of `alike` up to this one: each takes over the sum of the lane before it, and which
// one was before that. All lanes of the warp call it.
__device__ Sum sum_alike(Sum value, uint32_t alike) {
  const uint32_t lower = alike & ((1u << threadIdx.x % 32) - 1);
  int32_t before = lower > 0 ? log2_floor((int32_t)lower) : -1;
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
    const Sum sum = {shuffle(value.sequences, before), shuffle(value.items, before)};
    const int32_t next = shuffle(before, before);
    if (before >= 0) {
      value = value + sum;
      before = next;
    }
  }
  return value;
}

// Inclusive sum over the CTA.
__device__ Sum scan(Sum value) {
  __shared__ Sum warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
    const Sum other = {shuffle_up(value.sequences, step), shuffle_up(value.items, step)};
    if (lane >= step) value = value + other;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < warp; ++i) value = value + warp_sums[i];
  return value;
}

// Fills sequences [begin, end) and the chunk's counts. Each warp has a share, and counts it behind the warps before it.
__device__ void count(const Config& config, const Problem& p, int32_t begin, int32_t end, Sequence* sequences,
                      Sum* counts) {
  __shared__ Sum places[kNumGroups][kWarps + 1];  // one more: lanes with different groups meet different banks
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int group = lane; group < kNumGroups; group += 32) places[group][warp] = {};
  sync_warp();
  const int32_t share = (int32_t)((uint32_t)(end - begin + kThreads - 1) / kThreads) * 32;
  const int32_t from = begin + warp * share;
#pragma unroll 1
  for (int32_t base = from; base < from + share && base < end; base += 32) {
    const int32_t index = base + lane;
    Sequence sequence = {};
    sequence.group = -1;
    if (index < end) sequence = sequence_at(config, p, index);
    const bool counted = sequence.group >= 0;
    const uint32_t alike = lanes_alike(sequence.group);
    const Sum sum = sum_alike({1, sequence.work.num_items}, alike);
    if (counted) sequence.before = places[sequence.group][warp];
    sync_warp();
    if (counted && alike >> lane == 1) places[sequence.group][warp] = sequence.before + sum;  // the last one of them
    sequence.before = sequence.before + Sum{sum.sequences - 1, sum.items - sequence.work.num_items};
    if (index < end) sequences[index] = sequence;
    sync_warp();
  }
  __syncthreads();
  if (threadIdx.x < kNumGroups) {
    Sum sum = {};
#pragma unroll 1
    for (int i = 0; i < kWarps; ++i) {
      const Sum of_warp = places[threadIdx.x][i];
      places[threadIdx.x][i] = sum;
      sum = sum + of_warp;
    }
    counts[threadIdx.x] = sum;
  }
  __syncthreads();
#pragma unroll 1
  for (int32_t index = from + lane; index < from + share && index < end; index += 32) {
    Sequence& sequence = sequences[index];
    if (sequence.group >= 0) sequence.before = sequence.before + places[sequence.group][warp];
  }
}

// Fills order and first_item for the chunk's sequences [begin, end), once all chunks are counted, and total.
__device__ void place(const Arguments& args, int32_t chunk, int32_t num_chunks, int32_t begin, int32_t end,
                      const Lists& lists) {
  __shared__ Sum starts[kNumGroups + 1];
  Sum before = {}, all = {};
  const int group = threadIdx.x;
  if (group < kNumGroups) {
#pragma unroll 4
    for (int32_t i = 0; i < num_chunks; ++i) {
      const Sum count = lists.counts[i * kNumGroups + group];
      if (i < chunk) before = before + count;
      all = all + count;
    }
  }
  const Sum through = scan(all);
  const Sum start = {through.sequences - all.sequences, through.items - all.items};
  if (group <= kNumGroups) starts[group] = start + before;
  if (group == kNumGroups) *lists.total = start;
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) {  // of chunk 0, which has nothing before it
    Header header = {};
    header.version = kVersion;
    header.num_items = min(starts[kNumGroups].items, args.capacity);
    header.capacity = args.capacity;
    header.batch = args.problem.batch;
    header.num_heads = args.problem.num_heads;
    header.causal = args.problem.causal;
    header.tile_q = args.config.tile_q;
    header.tile_kv = args.config.tile_kv;
    const bool has_short = args.config.short_keys >= 0;  // then they are the last group
    header.first_short = min(starts[has_short ? kNumGroups - 1 : kNumGroups].items, args.capacity);
    for (int i = 0; i < kNumSplitClasses; ++i) {
      header.split_end[i] = min(starts[(i + 1) * kRanksPerSplitClass].items, args.capacity);
    }
    *reinterpret_cast<Words<Header>*>(args.buffer) = {header};
  }
#pragma unroll 1
  for (int32_t index = begin + (int32_t)threadIdx.x; index < end; index += kThreads) {
    const Sequence& sequence = lists.sequences[index];
    if (sequence.group < 0) continue;
    const Sum at = starts[sequence.group] + sequence.before;
    lists.order[at.sequences] = index;
    lists.first_item[at.sequences] = at.items;
  }
}

// This CTA's share of the buffer behind the header, once all sequences are placed.
__device__ void write_items(const Arguments& args, const Lists& lists) {
  auto* const items = reinterpret_cast<Words<WorkItem>*>(args.buffer + kItemsBegin);
  const int32_t first = blockIdx.x * kThreads + threadIdx.x, stride = args.num_ctas * kThreads;
  const Sum total = *lists.total;
  const int32_t listed = min(total.items, args.capacity);
  const int32_t first_step = total.sequences > 0 ? 1 << log2_floor(total.sequences) : 0;
#pragma unroll 1
  for (int32_t i = first; i < kItemsBegin - kHeaderInts; i += stride) args.buffer[kHeaderInts + i] = 0;
#pragma unroll 1
  for (int32_t index = first; index < args.capacity; index += stride) {
    Words<WorkItem> item = {};  // behind the list zeros, so that equal lengths give equal plans
    if (index < listed) {
      int32_t place = 0;  // of the sequence whose items include this one
#pragma unroll 1
      for (int32_t step = first_step; step > 0; step /= 2) {
        if (place + step < total.sequences && lists.first_item[place + step] <= index) place += step;
      }
      const int32_t sequence = lists.order[place];
      item.value = item_of_sequence(lists.sequences[sequence].work, args.problem.causal, sequence,
                                    index - lists.first_item[place]);
    }
    items[index] = item;
  }
}

__global__ __launch_bounds__(kThreads) void plan_kernel(Arguments args) {
  __shared__ Sequence sequences[kAloneBatch];
  __shared__ int32_t order[kAloneBatch], first_item[kAloneBatch];
  __shared__ Sum counts[kNumGroups], total;
  const Lists lists = {sequences, counts, &total, order, first_item};
  const int32_t batch = args.problem.batch;
  count(args.config, args.problem, 0, batch, sequences, counts);
  place(args, 0, 1, 0, batch, lists);
  __syncthreads();
  write_items(args, lists);
}

__device__ int32_t end_of_chunk(const Arguments& args, int32_t begin) {
  return begin < args.problem.batch - args.chunk_size ? begin + args.chunk_size : args.problem.batch;
}

__global__ __launch_bounds__(kThreads) void count_kernel(Arguments args) {
  const Lists lists = lists_in_scratch(args);
  const int32_t begin = blockIdx.x * args.chunk_size;
  count(args.config, args.problem, begin, end_of_chunk(args, begin), lists.sequences,
        lists.counts + blockIdx.x * kNumGroups);
}

__global__ __launch_bounds__(kThreads) void place_kernel(Arguments args) {
  const int32_t begin = blockIdx.x * args.chunk_size;
  place(args, blockIdx.x, args.num_chunks, begin, end_of_chunk(args, begin), lists_in_scratch(args));
}

__global__ __launch_bounds__(kThreads) void write_kernel(Arguments args) { write_items(args, lists_in_scratch(args)); }

}  // namespace

int64_t scratch_ints(int64_t batch) {
  constexpr int64_t kSumInts = sizeof(Sum) / sizeof(int32_t), kSequenceInts = sizeof(Sequence) / sizeof(int32_t);
  return batch <= kAloneBatch ? 0 : kSumInts * (1 + kMostChunks * kNumGroups) + (2 + kSequenceInts) * batch;
}

cudaError_t write_on_device(const Config& config, const Problem& problem, int32_t* buffer, int64_t capacity,
                            int32_t* scratch, cudaStream_t stream) {
  const auto parts = [](int64_t size, int64_t of, int64_t most) { return clamp((size + of - 1) / of, 1, most); };
  Arguments args = {config, problem, buffer, (int32_t)capacity, 0, 1, problem.batch, scratch};
  args.num_ctas = (int32_t)parts(capacity, kThreads, kMostCtas);
  if (problem.batch <= kAloneBatch) {
    plan_kernel<<<args.num_ctas, kThreads, 0, stream>>>(args);
  } else {
    args.chunk_size = (int32_t)parts(problem.batch, kThreads * kMostChunks, INT32_MAX) * kThreads;
    args.num_chunks = (int32_t)parts(problem.batch, args.chunk_size, kMostChunks);
    count_kernel<<<args.num_chunks, kThreads, 0, stream>>>(args);
    place_kernel<<<args.num_chunks, kThreads, 0, stream>>>(args);
    write_kernel<<<args.num_ctas, kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace mla_prefill::plan
