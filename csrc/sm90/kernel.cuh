// Ragged MLA prefill on Hopper: TMA loads, wgmma products, warp-specialised and persistent. Read it from the bottom up:
// prefill_kernel -> Producer::run, and Consumer::run (the main loop) -> key_tile.
//
// A CTA works as a team of a producer warp and two consumer warpgroups of 64 query rows each, and on the plan's short
// items, after the others, as two teams of one consumer each, where the variant has a tile for them. A producer takes
// items from the plan, hands each of their tiles over through shared memory and loads Q, K and V; the consumers compute
//
//   S = Q K^T  (wgmma, both from shared memory)      P = exp2(S - reference)  in registers      O += P V
//
// from the first key tile to the last, where the mask is. QK of the next key tile is issued before the softmax of this
// one.
#pragma once

#include "cuda_softmax.cuh"
#include "cuda_split.cuh"
#include "params.h"
#include "sm90/config.h"
#include "sm90/epilogue.cuh"
#include "sm90/ptx.h"
#include "sm90/tensor_map.h"
#include "sm90/wgmma.h"

namespace mla_prefill::sm90 {

struct KeyMaps {
  CUtensorMap k, k_pe, v;
};

struct KernelParams {
  CUtensorMap q, out;             // in boxes of kWarpgroupRows rows
  KeyMaps long_keys, short_keys;  // in boxes of kTileKV rows
  PrefillParams problem;
  int32_t* plan;     // header and items; the header's counters move
  float4* partials;  // partials_bytes(), or nullptr where no item can be split
  bool split_k;
};

// Which part of the plan's list a team works on, and which of its workers it is.
struct Share {
  int32_t first, end;  // tickets: items, and pieces of the split ones
  int32_t worker, num_workers;
  int32_t handed_out;  // tickets that workers have without drawing: the first ones, one each, or none
  int32_t *ticket, *finished;
  int32_t pieces;         // tickets below it are of split items
  int32_t beside_pieces;  // what leads from the others to their items
  int32_t timeline;       // where the plan would have the stamp of ticket 0, in ints; 0: no stamps are wanted
};

template <typename Variant>
__device__ __forceinline__ Share share_of_long(plan::Header& header) {
  const int32_t pieces = plan::num_pieces(header.split_end), split_items = header.split_end[plan::kNumSplitClasses - 1];
  const int32_t end = Variant::kHasShortTile ? header.first_short : header.num_items;
  return {0,
          end - split_items + pieces,
          (int32_t)blockIdx.x,
          (int32_t)gridDim.x,
          (int32_t)gridDim.x,
          &header.ticket[0],
          &header.finished[0],
          pieces,
          split_items - pieces,
          header.timeline};
}

template <typename Variant>
__device__ __forceinline__ Share share_of_short(plan::Header& header, int team) {
  constexpr int kTeams = Variant::ShortTile::kTeams;
  const int32_t stamps_before = share_of_long<Variant>(header).end + (int32_t)gridDim.x - header.first_short;
  return {header.first_short,
          header.num_items,
          (int32_t)blockIdx.x * kTeams + team,
          (int32_t)gridDim.x * kTeams,
          header.first_short > 0 ? 0 : (int32_t)gridDim.x * kTeams,  // after long items they come one by one
          &header.ticket[1],
          &header.finished[1],
          0,
          0,
          header.timeline == 0 ? 0 : header.timeline + stamps_before * plan::kStampInts};
}

// A position in a ring of shared-memory stages.
template <int kStages>
struct Ring {
  static_assert((kStages & (kStages - 1)) == 0, "a power of two");
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t parity() const { return count / kStages & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

// ---- Producer -------------------------------------------------------------------------------------------------------

// One warp. All lanes follow the control flow, one of them issues.
template <typename T, typename Variant, typename Config>
struct Producer {
  using Tensors = sm90::Tensors<T, Variant, Config>;
  static constexpr int kBoxesQK = Variant::kBoxesQK, kBoxesV = Variant::kBoxesV;
  static constexpr uint32_t kBoxBytesKV = Config::kTileKV * kBoxColumns * sizeof(T);

  struct Item {
    int32_t q_row, q_rows, k_row, len_k, keys, last_key, head_begin, head_count;
  };
  struct KeyTiles {
    int32_t first, end;
    int32_t piece;  // of Tile
  };

  const KernelParams& p;
  const KeyMaps& keys;
  const Share share;
  Tensors& smem;
  Channels<Config>& channels;
  const bool leader = threadIdx.x % 32 == 0;
  Ring<Config::kStages> k_ring, v_ring;
  Ring<kTileSlots> tile_ring;
  uint32_t q_parity = 0;

  // In two steps, so that the first one's wait can be put to use.
  __device__ __forceinline__ int32_t draw() { return leader ? atomicAdd(share.ticket, 1) : 0; }
  __device__ __forceinline__ int32_t ticket_of(int32_t drawn) const {
    return share.first + share.handed_out + __shfl_sync(~0u, drawn, 0);
  }

  __device__ __forceinline__ Item read_item(int32_t ticket) {
    const int4* words = reinterpret_cast<const int4*>(p.plan + plan::kItemsBegin) + (int64_t)piece_of(ticket).item * 2;
    const int4 a = words[0], b = words[1];  // seq, q_begin, q_rows, kv_begin; kv_end, heads
    const int32_t q_begin = p.problem.cu_seqlens_q[a.x], q_end = p.problem.cu_seqlens_q[a.x + 1];
    const int32_t k_begin = p.problem.cu_seqlens_k[a.x], k_end = p.problem.cu_seqlens_k[a.x + 1];
    const int32_t len_k = k_end - k_begin;
    const int32_t last_key = p.problem.causal ? a.y + len_k - (q_end - q_begin) : INT32_MAX / 2;
    return {q_begin + a.y, a.z, k_begin, len_k, b.x, last_key, b.y, b.z};
  }

  // The header is read for split items alone: on the way to the others' it would cost about 1 % of 1024 keys' work.
  __device__ __forceinline__ plan::Piece piece_of(int32_t ticket) const {
    if (!Config::kSplits || ticket >= share.pieces) return {ticket + share.beside_pieces, 0, 1};
    return plan::piece_of_ticket(reinterpret_cast<const plan::Header*>(p.plan)->split_end, ticket);
  }

  __device__ __forceinline__ KeyTiles key_tiles_of(const Item& item, int32_t ticket) const {
    const uint32_t kv_tiles = (item.keys + Config::kTileKV - 1) / Config::kTileKV;
    if (!Config::kSplits || ticket >= share.pieces) return {0, (int32_t)kv_tiles, kWhole};
    const plan::Piece piece = piece_of(ticket);
    return {(int32_t)(kv_tiles * piece.index / (uint32_t)piece.num_splits),
            (int32_t)(kv_tiles * (piece.index + 1) / (uint32_t)piece.num_splits), ticket};
  }

  // Rows past the sequence's end are not read and arrive as zeros: row `rows` of the sequence is where the map's bound
  // lies (see tensor_map.h).
  __device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t full, int column, int head,
                                           int32_t first_row, int32_t rows, int32_t row) {
    tma_load(to, map, full, column, head, kRaggedOrigin - rows + row, first_row + rows, kRaggedOrigin);
  }

  // Rows of one consumer after the other: none waits until the other has let go of its own.
  __device__ __forceinline__ void load_q(const Item& item, int head) {
#pragma unroll
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      const uint32_t full = smem_address(&channels.q_full[consumer]);
      const int row = consumer * kWarpgroupRows;
      barrier_wait(smem_address(&channels.q_empty[consumer]), q_parity ^ 1);
      if (leader) {
        barrier_arrive_expect(full, kBoxesQK * kRowsBoxBytes<T>);
#pragma unroll
        for (int box = 0; box < kBoxesQK; ++box) {
          load_box(smem_address(smem.q[box][row]), &p.q, full, box * kBoxColumns, head, item.q_row, item.q_rows, row);
        }
      }
    }
    q_parity ^= 1;
  }

  // Q is read once, from device memory: early, so that load_q finds it in the L2.
  __device__ __forceinline__ void prefetch_q(const Item& item, int head) {
    if constexpr (Config::kPrefetchQ) {
      if (!leader) return;
#pragma unroll
      for (int row = 0; row < Config::kTileQ; row += kWarpgroupRows) {
#pragma unroll
        for (int box = 0; box < kBoxesQK; ++box) {
          tma_prefetch(&p.q, box * kBoxColumns, head, kRaggedOrigin - item.q_rows + row, item.q_row + item.q_rows,
                       kRaggedOrigin);
        }
      }
    }
  }

  __device__ __forceinline__ void load_k(const Item& item, int head, int kv_tile) {
    const uint32_t full = smem_address(&channels.k_full[k_ring.stage()]), to = smem_address(smem.k[k_ring.stage()]);
    const int32_t row = kv_tile * Config::kTileKV;
    barrier_wait(smem_address(&channels.k_empty[k_ring.stage()]), k_ring.parity() ^ 1);
    if (leader) {
      barrier_arrive_expect(full, kBoxesQK * kBoxBytesKV);
      constexpr int kLast = kBoxesQK - 1;
#pragma unroll
      for (int box = 0; box < kLast; ++box) {
        load_box(to + box * kBoxBytesKV, &keys.k, full, box * kBoxColumns, head, item.k_row, item.len_k, row);
      }
      // The last 64 columns: of the same tensor, or k_pe, a tensor of one head.
      load_box(to + kLast * kBoxBytesKV, p.split_k ? &keys.k_pe : &keys.k, full, p.split_k ? 0 : kLast * kBoxColumns,
               p.split_k ? 0 : head, item.k_row, item.len_k, row);
    }
    k_ring.advance();
  }

  __device__ __forceinline__ void load_v(const Item& item, int head, int kv_tile) {
    const uint32_t full = smem_address(&channels.v_full[v_ring.stage()]), to = smem_address(smem.v[v_ring.stage()]);
    const int32_t row = kv_tile * Config::kTileKV;
    barrier_wait(smem_address(&channels.v_empty[v_ring.stage()]), v_ring.parity() ^ 1);
    if (leader) {
      barrier_arrive_expect(full, kBoxesV * kBoxBytesKV);
#pragma unroll
      for (int box = 0; box < kBoxesV; ++box) {
        load_box(to + box * kBoxBytesKV, &keys.v, full, box * kBoxColumns, head, item.k_row, item.len_k, row);
      }
    }
    v_ring.advance();
  }

  // The finished rows' stage: the consumers see to it, but for what the rows are merged into. (Pieces have no use for
  // it.)
  __device__ __forceinline__ void pass_out(const Item& item, int head) {
    if (p.problem.accumulate) {
      const uint32_t full = smem_address(&channels.v_full[v_ring.stage()]), to = smem_address(smem.v[v_ring.stage()]);
      barrier_wait(smem_address(&channels.v_empty[v_ring.stage()]), v_ring.parity() ^ 1);
      if (leader) {
        barrier_arrive_expect(full, Config::kConsumers * kBoxesV * kRowsBoxBytes<T>);
#pragma unroll
        for (int i = 0; i < Config::kConsumers * kBoxesV; ++i) {
          load_box(to + i * kRowsBoxBytes<T>, &p.out, full, i % kBoxesV * kBoxColumns, head, item.q_row, item.q_rows,
                   i / kBoxesV * kWarpgroupRows);
        }
      }
    }
    v_ring.advance();
  }

  __device__ __forceinline__ void publish(const Item& item, int head, const KeyTiles& tiles) {
    barrier_wait(smem_address(&channels.tile_empty[tile_ring.stage()]), tile_ring.parity() ^ 1);
    if (leader) {
      channels.tiles[tile_ring.stage()] = {item.q_row, item.q_rows, item.keys, item.last_key,
                                           head,       tiles.first, tiles.end, tiles.piece};
      barrier_arrive(smem_address(&channels.tile_full[tile_ring.stage()]));
    }
    tile_ring.advance();
  }

  // The item after this one, in three steps over the last key tiles of this one, so that none waits for the one before.
  // Not earlier: a long item would hold on to the next while other CTAs run out of work.
  struct Next {
    int32_t steps = 0, drawn = 0, index = 0;
    Item item = {};
  };

  __device__ __forceinline__ void prepare_next(Next& next, int32_t tiles_left) {
    if (next.steps == 0 && tiles_left <= 3) {
      next.drawn = draw();
      next.steps = 1;
    }
    if (next.steps == 1 && tiles_left <= 2) {
      next.index = ticket_of(next.drawn);
      if (next.index < share.end) next.item = read_item(next.index);
      next.steps = 2;
    }
    if (next.steps == 2 && tiles_left <= 1) {
      if (next.index < share.end) prefetch_q(next.item, next.item.head_begin);
      next.steps = 3;
    }
  }

  // The consumers are then at the last key tiles of the ticket before.
  __device__ __forceinline__ void stamp(int32_t ticket) const {
    if (!leader || share.timeline == 0) return;
    plan::Stamp* const stamps = reinterpret_cast<plan::Stamp*>(p.plan + share.timeline);
    stamps[ticket] = {share.worker, sm_index(), global_nanoseconds()};
  }

  // When the consumers are through with all products; the last tile's epilogue is still to come.
  __device__ __forceinline__ void stamp_end() const {
    if (share.timeline == 0) return;
    Ring<Config::kStages> last = v_ring;
    last.count += Config::kStages - (Config::kStoresByTma ? 2 : 1);  // of the last V, behind which rows have a place
    barrier_wait(smem_address(&channels.v_empty[last.stage()]), last.parity() ^ 1);
    stamp(share.end + share.worker);
  }

  __device__ __forceinline__ void run() {
    int32_t index = share.handed_out > 0 ? share.first + share.worker : ticket_of(draw());
    Item item = {};
    if (index < share.end) item = read_item(index);
    while (index < share.end) {
      stamp(index);
      const int heads = item.keys > 0 ? item.head_count : 0;  // items without keys are finish_empty_items' work
      const KeyTiles tiles = key_tiles_of(item, index);
      Next next;
      int32_t tiles_left = heads * (tiles.end - tiles.first);
      for (int i = 0; i < heads; ++i) {
        const int head = item.head_begin + i;
        publish(item, head, tiles);
        load_k(item, head, tiles.first);
        load_q(item, head);
        prepare_next(next, --tiles_left);
        if (i + 1 < heads) prefetch_q(item, head + 1);
        for (int j = tiles.first + 1; j < tiles.end; ++j) {
          load_k(item, head, j);
          load_v(item, head, j - 1);
          prepare_next(next, --tiles_left);
        }
        load_v(item, head, tiles.end - 1);
        if (Config::kStoresByTma) pass_out(item, head);
      }
      prepare_next(next, tiles_left);  // an item without keys
      index = next.index;
      item = next.item;
    }
    publish(item, 0, {0, kNoMoreTiles, kWhole});
    stamp_end();
    // The last worker to finish resets the counters, so that the plan serves the next layer. Where there was nothing to
    // draw they have not moved, and short items need not wait for this.
    if (leader && share.first < share.end && atomicAdd(share.finished, 1) == share.num_workers - 1) {
      *share.ticket = 0;
      *share.finished = 0;
    }
  }
};

// ---- Rows without keys ----------------------------------------------------------------------------------------------

constexpr int kEmptyItemsWarp = 2;

// A warp beside the producers' walks over the list and writes the empty result for items whose rows see no key.
template <typename T, int kHeadDimV>
__device__ __forceinline__ void finish_empty_items(const KernelParams& p) {
  const plan::Header& header = *reinterpret_cast<const plan::Header*>(p.plan);
  const plan::WorkItem* items = reinterpret_cast<const plan::WorkItem*>(p.plan + plan::kItemsBegin);
  const int32_t lane = threadIdx.x % 32;
  for (int32_t base = (int32_t)blockIdx.x * 32; base < header.num_items; base += (int32_t)gridDim.x * 32) {
    const bool is_empty = base + lane < header.num_items && items[base + lane].kv_end == 0;
    for (uint32_t found = __ballot_sync(~0u, is_empty); found != 0; found &= found - 1) {
      const plan::WorkItem item = items[base + __ffs(found) - 1];
      const int64_t row = (int64_t)p.problem.cu_seqlens_q[item.seq] + item.q_begin;
      write_empty_rows<T, kHeadDimV>(p.problem, row, item.q_rows, item.head_begin, item.head_count);
    }
  }
}

// ---- Consumer -------------------------------------------------------------------------------------------------------

struct RowLimits {
  int32_t last_key[2];  // that a thread's two rows see
};

// Key tiles from `first` up to `unmasked_end` are seen whole by every row of a warpgroup.
struct SeenKeys {
  RowLimits limits;
  int first, unmasked_end;
};

enum NamedBarrier { kTurnOfFirst = 1, kTurnOfSecond, kRowsOfFirst, kRowsOfSecond };  // 0 is __syncthreads

template <typename T, typename Variant, typename Config>
struct Consumer {
  using Tensors = sm90::Tensors<T, Variant, Config>;
  static constexpr int kHeadDimQK = Variant::kHeadDimQK, kHeadDimV = Variant::kHeadDimV;
  static constexpr int kTileKV = Config::kTileKV;
  static constexpr uint32_t kStepBytes = 16 * sizeof(T);  // 16 elements: the depth of one wgmma
  static constexpr uint32_t kBoxBytesQ = Config::kTileQ * kBoxColumns * sizeof(T);
  static constexpr uint32_t kBoxBytesKV = kTileKV * kBoxColumns * sizeof(T);
  static constexpr int kStepsPerBox = kBoxColumns / 16;
  // With 256 columns there are not the registers for more.
  static constexpr int kWordsAtOnce = kHeadDimV > 128 ? 4 : accumulator_words(kHeadDimV);

  const KernelParams& p;
  Tensors& smem;
  Channels<Config>& channels;
  const int index;  // of the consumer in its team
  const int thread = threadIdx.x % kWarpgroupThreads;
  const bool leader = thread == 0;
  const float scale_log2 = p.problem.scale * kLog2E;

  Ring<Config::kStages> k_ring, v_ring;
  Ring<kTileSlots> tile_ring;
  uint32_t q_low, k_low, v_low;  // descriptors of stage 0

  float s[kTileKV / 2];           // scores of two rows of the thread, then weights
  uint32_t weights[kTileKV / 4];  // the same, packed
  float o[kHeadDimV / 2];
  OnlineSoftmax<T> softmax;

  __device__ Consumer(const KernelParams& params, Tensors& tensors, Channels<Config>& team, int consumer)
      : p(params), smem(tensors), channels(team), index(consumer) {
    q_low = uniform(descriptor_low_k_major(smem_address(smem.q) + index * kWarpgroupRows * 128));
    k_low = uniform(descriptor_low_k_major(smem_address(smem.k)));
    v_low = uniform(descriptor_low_mn_major(smem_address(smem.v), kBoxBytesKV));
  }

  // Issues S = Q K^T for the K stage in turn.
  __device__ __forceinline__ void issue_qk() {
    const uint32_t k = k_low + k_ring.stage() * (uint32_t)(sizeof(smem.k[0]) >> 4);
    wgmma_fence();
    fence_registers(s);
#pragma unroll
    for (int step = 0; step < kHeadDimQK / 16; ++step) {
      const uint32_t box = step / kStepsPerBox, inside = step % kStepsPerBox * kStepBytes;
      wgmma_ss<T>(s, descriptor(q_low + ((box * kBoxBytesQ + inside) >> 4)),
                  descriptor(k + ((box * kBoxBytesKV + inside) >> 4)), step > 0);
    }
    wgmma_commit();
  }

  // Issues O += P V for the V stage in turn.
  __device__ __forceinline__ void issue_pv() {
    const uint32_t v = v_low + v_ring.stage() * (uint32_t)(sizeof(smem.v[0]) >> 4);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileKV / 16; ++step) {
      wgmma_rs<T>(o, weights + 4 * step, descriptor(v + (step * 16 * 128 >> 4)));
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void release_k() {
    if (leader) barrier_arrive(smem_address(&channels.k_empty[k_ring.stage()]));
    k_ring.advance();
  }

  __device__ __forceinline__ void release_v() {
    if (leader) barrier_arrive(smem_address(&channels.v_empty[v_ring.stage()]));
    v_ring.advance();
  }

  __device__ __forceinline__ void release_q() {
    if (leader) barrier_arrive(smem_address(&channels.q_empty[index]));
  }

  // Of the tiles that were taken, the last one (1) or one before it. They keep their slots until their last
  // products, to be read again: there are not the registers to hold them.
  __device__ __forceinline__ Tile& taken(uint32_t back) const {
    return channels.tiles[(tile_ring.count - back) % kTileSlots];
  }

  __device__ __forceinline__ void take_tile() {
    barrier_wait(smem_address(&channels.tile_full[tile_ring.stage()]), tile_ring.parity());
    tile_ring.advance();
  }

  // Waits for Q and the first K of the last one taken, if it is one: `end` is its end_kv_tile.
  __device__ __forceinline__ void wait_for_first_k(int end) {
    if (end == kNoMoreTiles) return;
    barrier_wait(smem_address(&channels.q_full[index]), (tile_ring.count - 1) % 2);
    barrier_wait(smem_address(&channels.k_full[k_ring.stage()]), k_ring.parity());
  }

  __device__ __forceinline__ void hide_keys(const RowLimits& limits, int j) {
    const int column = j * kTileKV + thread % 4 * 2;
    mask(s, {limits.last_key[0] - column, limits.last_key[1] - column});
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kTileKV / 4; ++i) weights[i] = pack<T>(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void wait_turn() {
    if (Config::kPingPong) named_barrier_sync(index == 0 ? kTurnOfFirst : kTurnOfSecond, 2 * kWarpgroupThreads);
  }

  __device__ __forceinline__ void pass_turn() {
    if (Config::kPingPong) named_barrier_arrive(index == 0 ? kTurnOfSecond : kTurnOfFirst, 2 * kWarpgroupThreads);
  }

  // QK of key tile j, PV of tile j - 1 behind it, softmax of j while they run.
  template <bool kMasked>
  __device__ __forceinline__ void key_tile(const RowLimits& limits, int j, bool is_last) {
    barrier_wait(smem_address(&channels.k_full[k_ring.stage()]), k_ring.parity());
    wait_turn();
    fence_registers(o);
    issue_qk();
    barrier_wait(smem_address(&channels.v_full[v_ring.stage()]), v_ring.parity());
    issue_pv();
    pass_turn();
    wgmma_wait<1>();
    fence_registers(s);
    release_k();
    if (is_last) release_q();
    if (kMasked) hide_keys(limits, j);
    if (__any_sync(~0u, softmax.shift(s, scale_log2))) {
      wgmma_wait<0>();
      fence_registers(o);
      softmax.raise(s, o);
    }
    softmax.weigh(s, 0, kTileKV / 8);
    wgmma_wait<0>();
    fence_registers(o);
    release_v();
    pack_weights();
  }

  __device__ void run() {
    take_tile();
    int end = uniform(taken(1).end_kv_tile);
    if (end == kNoMoreTiles) return;
    if (Config::kPingPong && index == 1) named_barrier_arrive(kTurnOfFirst, 2 * kWarpgroupThreads);
    wait_for_first_k(end);
    issue_qk();  // unconditionally, from here on: a branch around a wgmma would serialise all of them
    wgmma_wait<0>();
    fence_registers(s);
#pragma unroll 1
    while (end != kNoMoreTiles) {
      const SeenKeys seen = seen_keys(end);
      int j = seen.first;
      release_k();
      if (j == end - 1) release_q();
      if (j >= seen.unmasked_end) hide_keys(seen.limits, j);
      softmax.first(s, scale_log2);
      softmax.weigh(s, 0, kTileKV / 8);
      pack_weights();
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.0f;

      ++j;
#pragma unroll 1
      for (; j < seen.unmasked_end; ++j) key_tile<false>(seen.limits, j, j == end - 1);
#pragma unroll 1
      for (; j < end; ++j) key_tile<true>(seen.limits, j, j == end - 1);

      barrier_wait(smem_address(&channels.v_full[v_ring.stage()]), v_ring.parity());
      fence_registers(o);
      issue_pv();
      // What the finished rows need, and which tile is next, is seen to while that runs.
      take_tile();
      const Tile finished = taken(2);
      end = uniform(taken(1).end_kv_tile);
      const RowSums sums = sums_of_rows();
      barrier_arrive(smem_address(&channels.tile_empty[(tile_ring.count - 2) % kTileSlots]));
      const bool by_tma = Config::kStoresByTma && uniform(finished.piece) == kWhole;
      RowWeights row_weights[2];
      if (by_tma) finish_rows(p.problem, finished, first_row(), thread, sums, row_weights);
      wait_for_out();
      wgmma_wait<0>();
      fence_registers(o);
      release_v();
      if (by_tma) {
        store_by_tma(finished, row_weights);
      } else {
        write_finished(finished, sums);
      }
      wait_for_first_k(end);
      issue_qk();
      if (by_tma) store_lse_of_rows(p.problem, finished, first_row(), thread, row_weights);
      // Inside the iteration: accumulators in flight across a loop's back edge make ptxas serialise every wgmma.
      wgmma_wait<0>();
      fence_registers(s);
      release_out();
    }
    if (Config::kPingPong && index == 0) named_barrier_sync(kTurnOfFirst, 2 * kWarpgroupThreads);
  }

  __device__ __forceinline__ RowSums sums_of_rows() const {
    RowSums sums;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums.sum[r] = softmax.total(r);
      sums.lse[r] = softmax.lse(r, sums.sum[r]);
    }
    return sums;
  }

  // ---- Finished rows ----

  __device__ __forceinline__ int first_row() const { return index * kWarpgroupRows; }

  // Where they leave by TMA, the stage of V behind a tile's last one is theirs. What they are merged into comes there
  // as V does; if there is nothing, it is waited for as the producer would, and one lane passes its turn in v_full and
  // waits for that, since synccheck faults a phase that nobody waits for. Either way it is given back like one that
  // was read.
  __device__ __forceinline__ void wait_for_out() {
    if (!Config::kStoresByTma) return;
    Ring<Config::kStages> ring = v_ring;  // at the tile's last V
    ring.advance();
    if (p.problem.accumulate) {
      barrier_wait(smem_address(&channels.v_full[ring.stage()]), ring.parity());
    } else {
      barrier_wait(smem_address(&channels.v_empty[ring.stage()]), ring.parity() ^ 1);
      if (leader && index == 0) {
        barrier_arrive(smem_address(&channels.v_full[ring.stage()]));
        barrier_wait(smem_address(&channels.v_full[ring.stage()]), ring.parity());
      }
    }
  }

  __device__ __forceinline__ void release_out() {
    if (!Config::kStoresByTma) return;
    if (leader) tma_stores_have_read();
    release_v();
  }

  __device__ __forceinline__ void store_by_tma(const Tile& tile, const RowWeights (&row_weights)[2]) {
    const uint32_t boxes = smem_address(smem.v[v_ring.stage()]) + index * Variant::kBoxesV * kRowsBoxBytes<T>;
    if (p.problem.accumulate) {
      stage_rows<T, true>(boxes, thread, o, row_weights);
    } else {
      stage_rows<T, false>(boxes, thread, o, row_weights);
    }
    tma_store_fence();
    named_barrier_sync(threadIdx.x < 2 * kWarpgroupThreads ? kRowsOfFirst : kRowsOfSecond, kWarpgroupThreads);
    if (!leader) return;
#pragma unroll
    for (int box = 0; box < Variant::kBoxesV; ++box) {
      // As in load_box: rows past the sequence's end are out of bounds, and not written.
      tma_store(&p.out, boxes + box * kRowsBoxBytes<T>, box * kBoxColumns, tile.head,
                kRaggedOrigin - tile.q_rows + first_row(), tile.q_row + tile.q_rows, kRaggedOrigin);
    }
    tma_commit_stores();
  }

  // From registers: rows that don't fit a stage, and those of a split item once its other pieces have come.
  __device__ __forceinline__ void write_finished(const Tile& tile, RowSums sums) {
    if (Config::kSplits && tile.piece != kWhole) {
      const int warp = index * (kWarpgroupThreads / 32) + thread / 32;
      if (!combine_pieces<kWordsAtOnce>(p.plan, reinterpret_cast<const plan::Header*>(p.plan)->split_end, p.partials,
                                        tile.piece, warp, o, softmax.reference, softmax.sum)) {
        return;
      }
      sums = sums_of_rows();
    }
    write_tile<T>(p.problem, tile, first_row(), thread, o, sums);
  }

  // Of the last tile taken, whose end_kv_tile is `end`.
  __device__ __forceinline__ SeenKeys seen_keys(int end) const {
    const Tile& tile = taken(1);
    const int row = first_row() + fragment_row(thread);
    const int seen_by_all = min(tile.last_key + first_row() + 1, tile.keys);
    return {{min(tile.keys - 1, tile.last_key + row), min(tile.keys - 1, tile.last_key + row + 8)},
            uniform(tile.first_kv_tile),
            uniform(min(max(seen_by_all, 0) / kTileKV, end))};
  }
};

// ---- Kernel ---------------------------------------------------------------------------------------------------------

template <typename Config>
__device__ __forceinline__ void init_channels(Channels<Config>& channels) {
  const auto init = [](uint64_t& barrier, uint32_t arrivals) { barrier_init(smem_address(&barrier), arrivals); };
  for (int i = 0; i < Config::kConsumers; ++i) {
    init(channels.q_full[i], 1);
    init(channels.q_empty[i], 1);
  }
  for (int i = 0; i < Config::kStages; ++i) {
    init(channels.k_full[i], 1);
    init(channels.k_empty[i], Config::kConsumers);
    init(channels.v_full[i], 1);
    init(channels.v_empty[i], Config::kConsumers);
  }
  for (int i = 0; i < kTileSlots; ++i) {
    init(channels.tile_full[i], 1);
    init(channels.tile_empty[i], Config::kConsumers * kWarpgroupThreads);
  }
}

// The long items' tensors and the short ones' share their memory: both teams' producers and all consumers meet between.
template <typename Variant>
constexpr int kThreadsThatMeet = kConsumers * kWarpgroupThreads + Variant::ShortTile::kTeams * 32;

__device__ __forceinline__ void meet_after_long_items(uint64_t& barrier) {
  barrier_arrive(smem_address(&barrier));
  barrier_wait(smem_address(&barrier), 0);
}

template <typename T, typename Variant>
__global__ __launch_bounds__(kThreads, 1) void prefill_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  using Storage = SharedStorage<T, Variant>;
  using LongTile = typename Variant::LongTile;
  using ShortTile = typename Variant::ShortTile;
  auto& smem = *reinterpret_cast<Storage*>(smem_raw);
  plan::Header& header = *reinterpret_cast<plan::Header*>(params.plan);

  if (threadIdx.x == 0) {
    if (smem_address(smem_raw) % 1024 != 0) __trap();  // boxes would lie askew in the swizzle
    init_channels(smem.long_channels);
    if constexpr (Variant::kHasShortTile) {
      for (auto& channels : smem.short_channels) init_channels(channels);
      barrier_init(smem_address(&smem.long_items_done), kThreadsThatMeet<Variant>);
    }
    barrier_init_fence();
  }
  wait_for_kernel_before();
  __syncthreads();

  const int warpgroup = uniform(threadIdx.x / kWarpgroupThreads);
  const WarpRole role = warpgroup == 0 ? WarpRole::kProducer : WarpRole::kConsumer;
  if (role == WarpRole::kProducer) {
    give_up_registers<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      if constexpr (Variant::kHasShortTile) smem.has_short_items = header.first_short < header.num_items;
      Producer<T, Variant, LongTile>{params, params.long_keys, share_of_long<Variant>(header), smem.long_tensors,
                                     smem.long_channels}
          .run();
    }
    if (warp < ShortTile::kTeams) {
      if constexpr (Variant::kHasShortTile) {
        meet_after_long_items(smem.long_items_done);
        if (smem.has_short_items) {
          Producer<T, Variant, ShortTile>{params, params.short_keys, share_of_short<Variant>(header, warp),
                                          smem.short_tensors[warp], smem.short_channels[warp]}
              .run();
        }
      }
    } else if (warp == kEmptyItemsWarp) {
      finish_empty_items<T, Variant::kHeadDimV>(params);
    }
  } else {
    claim_registers<kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    Consumer<T, Variant, LongTile>(params, smem.long_tensors, smem.long_channels, consumer).run();
    if constexpr (Variant::kHasShortTile) {
      meet_after_long_items(smem.long_items_done);
      if (smem.has_short_items) {
        Consumer<T, Variant, ShortTile>(params, smem.short_tensors[consumer], smem.short_channels[consumer], 0).run();
      }
    }
  }
}

}  // namespace mla_prefill::sm90
