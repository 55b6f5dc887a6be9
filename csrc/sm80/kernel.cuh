// Ragged prefill with mma.sync, for every NVIDIA GPU of compute capability 8.0 and above. Read it from the bottom up:
// prefill_kernel -> Cta::run -> run_tile (the main loops) -> run_key_tile.
//
// A persistent CTA takes items from the plan. Its warps own 16 or 32 query rows each and compute
//
//   S = Q K^T  (both from shared memory)      P = exp2(S - reference)  in registers      O += P V  (P from registers)
//
// from the first key tile, which sets the references, to the last, where the mask is. Tiles of K and V come with
// cp.async: V while S is computed, the next K while the softmax and O are, or with V where it has a buffer. Tiles
// between them have a loop of their own, in which the copies are issued beside the products. The loads of the next tile
// of work start before this one is written.
#pragma once

#include "cuda_softmax.cuh"
#include "cuda_split.cuh"
#include "params.h"
#include "sm80/config.h"
#include "sm80/copy.cuh"
#include "sm80/epilogue.cuh"
#include "sm80/layout.h"
#include "sm80/ptx.h"

namespace mla_prefill::sm80 {

struct KernelParams {
  PrefillParams problem;
  int32_t* plan;                               // header and items; the header's counters move
  float4* partials;                            // partials_bytes(), or nullptr where no item can be split
  float scale_log2;                            // above 0
  float factor;                                // of the scores before it: 1, or -1 or 0 for a scale below or of 0
  bool q_in_chunks, k_in_chunks, v_in_chunks;  // base and strides are multiples of 16 bytes
  bool out_aligned;                            // of 8 bytes
  bool q_whole, kv_whole;                      // whole tiles can be copied as such, with these strides of rows:
  int32_t q_stride, k_stride, k_right_stride, v_stride;
};

template <typename T, typename Config>
struct Cta {
  static constexpr int kRowTiles = Config::kRowTiles;
  static constexpr int kTileKV = Config::kTileKV;
  static constexpr bool kAhead = Config::kStagesK > 1;
  static constexpr int kBlocksS = kTileKV / 8, kBlocksV = Config::kHeadDimV / 8;
  static constexpr int kSizeS = kBlocksS * 4, kSizeO = kBlocksV * 4;  // of a lane's part of an m16 tile
  static constexpr int kLeft = Config::kHeadDimQK < kLeftColumns ? Config::kHeadDimQK : kLeftColumns;
  static constexpr int kStepsQK = Config::kHeadDimQK / 16, kStepsPV = kTileKV / 16;
  using LayoutQK = TileLayout<Config::kHeadDimQK>;
  using LayoutV = TileLayout<Config::kHeadDimV>;
  using WholeQ = WholeCopy<Config::kTileQ, Config::kHeadDimQK, Config::kThreads>;
  using WholeK = WholeCopy<kTileKV, Config::kHeadDimQK, Config::kThreads, kLeft>;
  using WholeV = WholeCopy<kTileKV, Config::kHeadDimV, Config::kThreads>;

  const KernelParams& params;
  const PrefillParams& p;
  SharedStorage<Config>& smem;
  float o[kRowTiles][kSizeO];
  OnlineSoftmax<T> softmax[kRowTiles];

  __device__ Cta(const KernelParams& kernel_params, SharedStorage<Config>& storage)
      : params(kernel_params), p(kernel_params.problem), smem(storage) {}

  __device__ __forceinline__ static int lane() { return computed_here(threadIdx.x) % 32; }

  // The warp's first row in the tile.
  __device__ __forceinline__ static int warp_row() { return computed_here(threadIdx.x) / 32 * Config::kWarpRows; }

  __device__ __forceinline__ plan::Header& header() const { return *smem.header; }

  // ---- The work ----

  __device__ __forceinline__ static int32_t rows_of_tile(const Work& work) { return min(work.q_rows, Config::kTileQ); }

  __device__ __forceinline__ static int32_t keys_of_tile(const Work& work) {
    return max(min(work.keys, work.last_key + rows_of_tile(work)), 0);
  }

  // The last key that a row of the tile sees.
  __device__ __forceinline__ static int32_t limit(const Work& work, int32_t row) {
    return min(work.last_key + row, work.keys - 1);
  }

  // Whether the warp's rows see any key from first_key on.
  __device__ __forceinline__ static bool is_active(const Work& work, int32_t first_key) {
    const int32_t last_row = min(warp_row() + Config::kWarpRows, rows_of_tile(work)) - 1;
    return warp_row() <= last_row && first_key <= limit(work, last_row);
  }

  // The pieces of an item are one tile each, whose rows meet those of the others. Items of more rows, from a plan for
  // other head dims, are taken whole.
  __device__ __forceinline__ Tickets tickets() const {
    const bool has_pieces = header().tile_q <= Config::kTileQ;
    const int32_t pieces = has_pieces ? plan::num_pieces(header().split_end) : 0;
    const int32_t split_items = has_pieces ? header().split_end[plan::kNumSplitClasses - 1] : 0;
    Tickets tickets = {header().num_items - split_items + pieces, pieces, split_items - pieces, {}};
    for (int i = 0; i < plan::kNumSplitClasses; ++i) tickets.split_end[i] = header().split_end[i];
    return tickets;
  }

  __device__ __forceinline__ Work first_of_ticket(int32_t ticket) const {
    if (ticket >= smem.tickets.end) return {};
    const bool is_piece = ticket < smem.tickets.pieces;
    plan::Piece piece = {ticket + smem.tickets.beside_pieces, 0, 1};
    if (is_piece) piece = plan::piece_of_ticket(smem.tickets.split_end, ticket);
    const int4* const words = reinterpret_cast<const int4*>(params.plan + plan::kItemsBegin) + (int64_t)piece.item * 2;
    const int4 a = words[0], b = words[1];  // seq, q_begin, q_rows, kv_begin; kv_end, heads
    const int32_t q_begin = p.cu_seqlens_q[a.x], q_end = p.cu_seqlens_q[a.x + 1];
    const int32_t k_begin = p.cu_seqlens_k[a.x], k_end = p.cu_seqlens_k[a.x + 1];
    int32_t begin = a.w, end = b.x;
    if (is_piece) {
      const uint32_t tiles = (b.x - a.w + kTileKV - 1) / kTileKV, splits = piece.num_splits;
      begin = a.w + (int32_t)(tiles * piece.index / splits) * kTileKV;
      end = min(a.w + (int32_t)(tiles * (piece.index + 1) / splits) * kTileKV, b.x);
    }
    const int32_t last_key = p.causal ? a.y + (k_end - k_begin) - (q_end - q_begin) - begin : INT32_MAX / 2;
    return {q_begin + a.y, a.z,       k_begin + begin,           end - begin, last_key, b.y,
            b.y,           b.y + b.z, is_piece ? ticket : kWhole};
  }

  // How many key tiles, from the first on, need neither mask nor factor, since all rows see all keys, and can be copied
  // whole, like the one after them.
  __device__ __forceinline__ int32_t plain_tiles(const Work& work) const {
    if (!kAhead || !params.kv_whole || params.factor != 1.0f) return 0;
    return max(min((limit(work, 0) + 1) / kTileKV, keys_of_tile(work) / kTileKV - 1), 0);
  }

  // With what all threads need and one computes.
  __device__ __forceinline__ Work completed(Work work) const {
    work.tiles = (keys_of_tile(work) + kTileKV - 1) / kTileKV;
    work.plain_tiles = plain_tiles(work);
    work.k = row_of(p.k, work.k_row, work.head);
    work.k_right = row_of(p.k_pe, work.k_row, work.head);
    work.v = row_of(p.v, work.k_row, work.head);
    return work;
  }

  __device__ __forceinline__ static bool is_last_of_item(const Work& work) {
    return work.head + 1 == work.head_end && work.q_rows <= Config::kTileQ;
  }

  // The next head, or all heads of the next rows.
  __device__ __forceinline__ static Work next_of_item(Work work) {
    if (++work.head == work.head_end) {
      work.head = work.head_begin;
      work.q_row += Config::kTileQ;
      work.q_rows -= Config::kTileQ;
      work.last_key += Config::kTileQ;
    }
    return work;
  }

  // By its offset in bytes: the only register that the main loop spends on it.
  __device__ __forceinline__ Work& work_at(uint32_t offset) const {
    return *reinterpret_cast<Work*>(reinterpret_cast<char*>(smem.work) + offset);
  }

  // The next tile of work, in two steps over the last key tiles of this one, so that neither waits for the one before.
  // Not earlier: a long item would hold on to the next while other CTAs run out of work.
  __device__ __forceinline__ void prepare_next(const Work& work, Work& next, bool draw, bool read) {
    if (threadIdx.x != 0) return;
    if (draw && is_last_of_item(work)) smem.drawn = (int32_t)gridDim.x + atomicAdd(&header().ticket[0], 1);
    if (read) next = completed(is_last_of_item(work) ? first_of_ticket(smem.drawn) : next_of_item(work));
  }

  // ---- Loads ----

  __device__ __forceinline__ uint32_t address_of_k(int32_t tile) const {
    return smem_address(smem.k[tile % Config::kStagesK]);
  }

  __device__ __forceinline__ WholeK whole_k(const Work& work, int32_t tile) const {
    return {computed_here(threadIdx.x),
            address_of_k(tile),
            {work.k, params.k_stride},
            {work.k_right, params.k_right_stride},
            tile * kTileKV};
  }

  __device__ __forceinline__ WholeV whole_v(const Work& work, int32_t tile) const {
    const WholeRows v = {work.v, params.v_stride};
    return {computed_here(threadIdx.x), smem_address(smem.v), v, v, tile * kTileKV};
  }

  __device__ __forceinline__ void load_q(const Work& work) {
    const RowSource q = {row_of(p.q, work.q_row, work.head), p.q.row_stride, p.dim_qk};
    if (params.q_whole && work.q_rows >= Config::kTileQ) {
      const WholeRows rows = {q.data, params.q_stride};
      copy_all(WholeQ(computed_here(threadIdx.x), smem_address(smem.q), rows, rows, 0));
    } else {
      TileCopy<Config::kTileQ, Config::kHeadDimQK, Config::kThreads>::copy(smem_address(smem.q), q, {q.data, 0, 0},
                                                                           work.q_rows, params.q_in_chunks);
    }
  }

  template <bool kWholeTiles>
  __device__ __forceinline__ void load_k(const Work& work, int32_t tile) {
    if constexpr (kWholeTiles) {
      copy_all(whole_k(work, tile));
    } else {
      const int32_t row = tile * kTileKV;
      TileCopy<kTileKV, Config::kHeadDimQK, Config::kThreads>::copy(
          address_of_k(tile), rows_from(work.k, p.k.row_stride, row, p.dim_k),
          rows_from(work.k_right, p.k_pe.row_stride, row, p.dim_qk - p.dim_k), keys_of_tile(work) - row,
          params.k_in_chunks);
    }
  }

  template <bool kWholeTiles>
  __device__ __forceinline__ void load_v(const Work& work, int32_t tile) {
    if constexpr (kWholeTiles) {
      copy_all(whole_v(work, tile));
    } else {
      const int32_t row = tile * kTileKV;
      const RowSource v = rows_from(work.v, p.v.row_stride, row, p.dim_v);
      TileCopy<kTileKV, Config::kHeadDimV, Config::kThreads>::copy(smem_address(smem.v), v, {v.data, 0, 0},
                                                                   keys_of_tile(work) - row, params.v_in_chunks);
    }
  }

  // A group of copies each.
  template <bool kWholeTiles>
  __device__ __forceinline__ void load_v_and_next_k(const Work& work, int32_t tile) {
    load_v<kWholeTiles>(work, tile);
    commit_copies();
    if (kAhead && tile + 1 < work.tiles) load_k<kWholeTiles>(work, tile + 1);
    commit_copies();
  }

  // Of Q and the first K, into memory that nobody reads any more.
  __device__ __forceinline__ void start_loads(const Work& work) {
    if (work.tiles == 0) return;
    load_q(work);
    if (params.kv_whole && keys_of_tile(work) >= kTileKV) {
      load_k<true>(work, 0);
    } else {
      load_k<false>(work, 0);
    }
  }

  // ---- Products ----

  // beside(step) is called in each step, between the fragments of Q and the products.
  template <typename Beside>
  __device__ __forceinline__ void scores(float (&s)[kRowTiles][kSizeS], int32_t tile, Beside beside) const {
    const MatrixRow a = row_by_row(lane()), b = column_by_column(lane());
    const uint32_t q_from = smem_address(smem.q) + LayoutQK::offset(warp_row() + a.row, a.chunk);
    const uint32_t k_from = address_of_k(tile) + LayoutQK::offset(b.row, b.chunk);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < kSizeS; ++i) s[m][i] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < kStepsQK; ++step) {
      uint32_t q[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        load_matrices(q[m], LayoutQK::at_step(q_from, step) + m * 16 * LayoutQK::kRowBytes);
      }
      beside(step);
#pragma unroll
      for (int n = 0; n < kBlocksS; n += 2) {
        uint32_t k[4];
        load_matrices(k, LayoutQK::at_step(k_from, step) + n * 8 * LayoutQK::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_add<T>(s[m] + 4 * n, q[m], k[0], k[1]);
          multiply_add<T>(s[m] + 4 * n + 4, q[m], k[2], k[3]);
        }
      }
    }
  }

  // Takes the weights of two blocks of columns from `begin` on, and packs them as operand A.
  template <int kSize>
  __device__ __forceinline__ static void weigh(OnlineSoftmax<T> (&softmax)[kRowTiles], float (&s)[kRowTiles][kSize],
                                               int begin, uint32_t (&weights)[kRowTiles][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      softmax[m].weigh(s[m], begin, 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[m][i] = pack<T>(s[m][4 * begin + 2 * i], s[m][4 * begin + 2 * i + 1]);
    }
  }

  // O += P V, each step's exponentials beside the products of the step before. `weights` has the first step's.
  __device__ __forceinline__ void add_values(float (&s)[kRowTiles][kSizeS], uint32_t (&weights)[kRowTiles][4]) {
    const MatrixRow b = row_by_row(lane());
    const uint32_t v_from = smem_address(smem.v) + LayoutV::offset(b.row, b.chunk);
#pragma unroll
    for (int step = 0; step < kStepsPV; ++step) {
      if (step > 0) weigh(softmax, s, 2 * step, weights);
#pragma unroll
      for (int n = 0; n < kBlocksV; n += 2) {
        uint32_t v[4];
        load_matrices_transposed(v, LayoutV::at_step(v_from, n / 2) + step * 16 * LayoutV::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_add<T>(o[m] + 4 * n, weights[m], v[0], v[1]);
          multiply_add<T>(o[m] + 4 * n + 4, weights[m], v[2], v[3]);
        }
      }
    }
  }

  // ---- One tile ----

  // The scores of a plain tile, with the copies of V and then of the next K beside the products: a round for each step.
  __device__ __forceinline__ void scores_and_loads(float (&s)[kRowTiles][kSizeS], const Work& work,
                                                   int32_t tile) const {
    WholeV v = whole_v(work, tile);
    WholeK k = whole_k(work, tile + 1);
    constexpr int kRounds = WholeV::kRounds + WholeK::kRounds;
    static_assert(kRounds < kStepsQK, "the first fragments do not wait for addresses of copies");
    scores(s, tile, [&](int step) {
      const int round = step - 1;
      if (round >= 0 && round < WholeV::kRounds) {
        copy_round(v);
      } else if (round >= WholeV::kRounds && round < kRounds) {
        copy_round(k);
      }
      if (round + 1 == WholeV::kRounds || round + 1 == kRounds) commit_copies();
    });
  }

  // What is done with scores before their softmax.
  __device__ __forceinline__ void apply_factor_and_mask(float (&s)[kRowTiles][kSizeS], const Work& work,
                                                        int32_t first_key) const {
    if (params.factor != 1.0f) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < kSizeS; ++i) s[m][i] *= params.factor;
      }
    }
    if (first_key + kTileKV - 1 > limit(work, warp_row())) {
      const int32_t row = warp_row() + accumulator_row(lane(), 0);
      const int32_t column = first_key + accumulator_column(lane(), 0);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int32_t last[2] = {limit(work, row + m * 16) - column, limit(work, row + m * 16 + 8) - column};
        mask(s[m], last);
      }
    }
  }

  // References lie in shared memory: registers hold them from scores to exponents alone.
  __device__ __forceinline__ float* references_of_quad() const {
    const uint32_t thread = computed_here(threadIdx.x);
    return smem.references[thread / 32][thread % 32 / 4];
  }

  __device__ __forceinline__ void load_references() {
    const float* const references = references_of_quad();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) softmax[m].reference[r] = references[2 * m + r];
    }
  }

  __device__ __forceinline__ void store_references() {
    __syncwarp();
    if (lane() % 4 == 0) {
      float* const references = references_of_quad();
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) references[2 * m + r] = softmax[m].reference[r];
      }
    }
    __syncwarp();
  }

  // Turns the scores of the first tile into exponents and takes the weights of its first 16 keys.
  __device__ __forceinline__ void softmax_of_first_tile(float (&s)[kRowTiles][kSizeS],
                                                        uint32_t (&weights)[kRowTiles][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) softmax[m].first(s[m], params.scale_log2);
    store_references();
    weigh_first(s, weights, softmax);
  }

  // The same for the tiles after it. Weights of the first 16 keys do not wait for the vote on the references: it seldom
  // raises one, and then they are taken again.
  __device__ __forceinline__ void softmax_of_next_tile(float (&s)[kRowTiles][kSizeS],
                                                       uint32_t (&weights)[kRowTiles][4]) {
    load_references();
    bool must_raise = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) must_raise |= softmax[m].shift(s[m], params.scale_log2);
    OnlineSoftmax<T> weighed[kRowTiles];
    weigh_first(s, weights, weighed);
    if (__any_sync(~0u, must_raise)) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) softmax[m].raise(s[m], o[m]);
      store_references();
      weigh_first(s, weights, weighed);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) softmax[m].sum[r] = weighed[m].sum[r];
    }
  }

  // The weights of the first 16 keys, and the softmax after them.
  __device__ __forceinline__ void weigh_first(const float (&s)[kRowTiles][kSizeS], uint32_t (&weights)[kRowTiles][4],
                                              OnlineSoftmax<T> (&weighed)[kRowTiles]) const {
    float w[kRowTiles][8];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) w[m][i] = s[m][i];
      weighed[m] = softmax[m];
    }
    weigh(weighed, w, 0, weights);
  }

  // One key tile. kPlain: one of the plain_tiles(). A warp that sees none of its keys takes part in the copies alone.
  template <bool kPlain>
  __device__ __forceinline__ void run_key_tile(const Work& work, Work& next, int32_t tile) {
    const int32_t first_key = tile * kTileKV;
    const bool active = kPlain ? warp_row() < work.q_rows : is_active(work, first_key);
    float s[kRowTiles][kSizeS];
    uint32_t weights[kRowTiles][4];
    wait_for_copies();
    __syncthreads();  // K is there, and Q; the V before it is not read any more, nor is the tile before
    if (!kPlain || !active) load_v_and_next_k<kPlain>(work, tile);
    prepare_next(work, next, tile == max(work.tiles - 3, 0), tile == max(work.tiles - 2, 0));
    if (active) {
      if constexpr (kPlain) {
        scores_and_loads(s, work, tile);
      } else {
        scores(s, tile, [](int) {});
        apply_factor_and_mask(s, work, first_key);
      }
      if (!kPlain && tile == 0) softmax_of_first_tile(s, weights);
      if (kPlain || tile > 0) softmax_of_next_tile(s, weights);
    }
    wait_for_all_groups_but_last();
    __syncthreads();  // V is there, and `next`; K is not read any more, nor is Q after the last one
    // Not before the softmax: its addresses would spill there.
    if (!kAhead && tile + 1 < work.tiles) load_k<false>(work, tile + 1);
    if (active) add_values(s, weights);
  }

  // Computes `work`, of which Q and the first K are on their way, and starts the loads of `next`.
  __device__ __forceinline__ void run_tile(const Work& work, Work& next) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < kSizeO; ++i) o[m][i] = 0.0f;
      softmax[m].start();
    }
    store_references();

    if (work.tiles == 0) {
      __syncthreads();  // `next` was the tile before, which is written now
      prepare_next(work, next, true, true);
      __syncthreads();
    }
#pragma unroll 1
    for (int32_t tile = 0; tile < work.tiles; tile = (int32_t)computed_here(tile + 1)) {
      run_key_tile<false>(work, next, tile);
      if constexpr (kAhead) {
#pragma unroll 1
        while (tile + 1 < work.plain_tiles) run_key_tile<true>(work, next, ++tile);
      }
    }
    start_loads(next);
    write_tile(work);
  }

  // False: the rows of m16 tile m wait for other pieces of the item.
  __device__ __forceinline__ bool combine(int32_t ticket, int m) {
    static_assert(kRowsThatMeet == 16, "an m16 tile");
    constexpr int kWordsAtOnce = 4;
    return combine_pieces<kWordsAtOnce>(params.plan, smem.tickets.split_end, params.partials, ticket,
                                        warp_row() / 16 + m, o[m], softmax[m].reference, softmax[m].sum);
  }

  __device__ __forceinline__ void write_tile(const Work& work) {
    load_references();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if (work.piece != kWhole && !combine(work.piece, m)) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t row_in_tile = warp_row() + m * 16 + accumulator_row(lane(), 2 * r);
        const int64_t row = (int64_t)work.q_row + row_in_tile;
        const float total = softmax[m].total(r);
        RowWeights weights = weights_of_row(total, softmax[m].lse(r, total), row_in_tile < rows_of_tile(work));
        float* const lse = lse_of_row(p, row, work.head);
        if (p.accumulate) merge_with_running(weights, total, lse);
        if (p.lse.data) store_lse(weights, lse);
        write_row<T>(p, row, work.head, o[m], r, weights, params.out_aligned);
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      smem.header = reinterpret_cast<plan::Header*>(params.plan);
      smem.tickets = tickets();
      smem.work[0] = completed(first_of_ticket((int32_t)blockIdx.x));
    }
    __syncthreads();
    start_loads(smem.work[0]);
#pragma unroll 1
    for (uint32_t at = computed_here(0); work_at(at).q_rows > 0; at = computed_here(at ^ sizeof(Work))) {
      run_tile(work_at(at), work_at(at ^ sizeof(Work)));
    }
    // The last CTA to finish resets the counters, so that the plan serves the next layer.
    if (threadIdx.x == 0 && atomicAdd(&header().finished[0], 1) == (int32_t)gridDim.x - 1) {
      header().ticket[0] = 0;
      header().finished[0] = 0;
    }
  }
};

// What a device before 9.0 never chooses, since too few of its CTAs would fit, is not compiled for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int32_t kMostSharedBytes = kSharedBytesOf80;
#else
constexpr int32_t kMostSharedBytes = kSharedBytesOf90;
#endif

template <typename T, typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             Config::kCtasPerSm) void prefill_kernel(const __grid_constant__ KernelParams params) {
  if constexpr (fits(variant_of<Config>(), kMostSharedBytes)) {
    extern __shared__ __align__(128) uint8_t shared_memory[];
    Cta<T, Config>(params, *reinterpret_cast<SharedStorage<Config>*>(shared_memory)).run();
  }
}

}  // namespace mla_prefill::sm80
