// Flash attention on the CPU, transposed: vectors run along query rows. For a strip of rows
//
//   S[key][row] = K Q^T        broadcasts elements of K, keeps Q^T in L1
//   P = exp2(S - max)          per row = per lane: no shuffles
//   O^T[dim][row] += V^T P     broadcasts elements of V
//
// so keys are never padded or read past a sequence's end, and a tail of rows costs idle lanes only. The sections below
// follow the data; the last one, the work item, drives them.
//
// Layouts in scratch, all float (R = rows of a strip = kLanes * number of vectors):
//   q  [dim_qk][R]                      scaled by log2(e) * softmax scale, so that exp2 serves
//   k  [key / kKeyGroup][dim_qk / 16][kKeyGroup][16]
//   v  [dim_v / 16][kTileKeys][16]
//   s  [key][R]
//   o  [dim_v][R]
// Dims are padded with zeros to multiples of 16.
#pragma once

#include "cpu/isa.h"
#include "cpu/simd.h"

namespace mla_prefill::cpu::MLA_CPU_ISA {
namespace {

// Register blocking. The scores keep kKeyGroup x 2 vectors of accumulators, the outputs kDimGroup x 2: with AVX-512
// 24 and 16 of 32 registers, otherwise 12 and 8 of 16. Wider, and the compiler spills.
constexpr int kKeyGroup = kLanes == 16 ? 12 : 6;
constexpr int kKeyStep = kKeyGroup / 3;  // keys are computed in multiples of it
constexpr int kDimGroup = kLanes == 16 ? 8 : 4;
constexpr int kStrip = 2 * kLanes;  // rows of a strip; a last one of at most kLanes rows uses one vector
static_assert(kTileKeys % kKeyGroup == 0 && kChunk % kDimGroup == 0 && kChunk % kLanes == 0, "tiles must divide");

int64_t chunks(int64_t dim) { return (dim + kChunk - 1) / kChunk; }

struct Scratch {
  float* q;  // one after the other for the strips of an item, like o, max and sum
  float* o;
  float* max;
  float* sum;
  float* k;
  float* v;
  float* s;
};

// ---- Staging: widen, join, transpose --------------------------------------------------------------------------------

template <DType kType>
const Element<kType>* row_of(const ConstRows& tensor, int64_t row, int64_t head) {
  return static_cast<const Element<kType>*>(tensor.data) + row * tensor.row_stride + head * tensor.head_stride;
}

// Elements [d, d + kLanes) of a row of `dim`, zeros behind its end.
template <DType kType>
MLA_INLINE Floats load_dims(const Element<kType>* row, int64_t d, int64_t dim) {
  return d + kLanes <= dim ? load_as_float<kType>(row + d) : load_as_float<kType>(row + d, dim - d);
}

// The same of a row that consists of `head` with `split` elements and `tail` with the rest.
template <DType kType>
MLA_INLINE Floats load_dims(const Element<kType>* head, const Element<kType>* tail, int64_t split, int64_t d,
                            int64_t dim) {
  if (d + kLanes <= split) return load_as_float<kType>(head + d);
  if (d >= split) return load_dims<kType>(tail, d - split, dim - split);
  Element<kType> joined[kLanes] = {};
  for (int64_t i = 0; i < kLanes && d + i < dim; ++i) joined[i] = d + i < split ? head[d + i] : tail[d + i - split];
  return load_as_float<kType>(joined);
}

// Q^T of a strip, whose first row is `row` of the tensor.
template <DType kType, int kVecs>
void stage_queries(const PrefillParams& params, int64_t row, int rows, int64_t head, float* q) {
  const float factor = params.scale * params.q_descale.of(head) * params.k_descale.of(head) * kLog2E;
  for (int v = 0; v < kVecs; ++v) {
    const Element<kType>* src = row_of<kType>(params.q, row + v * kLanes, head);
    for (int64_t d = 0; d < chunks(params.dim_qk) * kChunk; d += kLanes) {
      Floats block[kLanes];
      MLA_UNROLL(16)
      for (int i = 0; i < kLanes; ++i) {
        const bool real = v * kLanes + i < rows;
        block[i] = real ? load_dims<kType>(src + i * params.q.row_stride, d, params.dim_qk) : Floats{};
      }
      transpose(block);
      MLA_UNROLL(16)
      for (int i = 0; i < kLanes; ++i) store(q + ((d + i) * kVecs + v) * kLanes, block[i] * factor);
    }
  }
}

template <DType kType>
void stage_keys(const PrefillParams& params, int64_t row, int keys, int64_t head, float* k) {
  const int64_t num_chunks = chunks(params.dim_qk);
  for (int j = 0; j < keys || j % kKeyStep != 0; ++j) {
    const bool real = j < keys;  // or one of the zeros that fill the last key group
    const Element<kType>* nope = row_of<kType>(params.k, row + (real ? j : 0), head);
    const Element<kType>* rope = row_of<kType>(params.k_pe, row + (real ? j : 0), head);
    float* dst = k + (j / kKeyGroup * num_chunks * kKeyGroup + j % kKeyGroup) * kChunk;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk, dst += kKeyGroup * kChunk) {
      MLA_UNROLL(4)
      for (int i = 0; i < kChunk; i += kLanes) {
        const int64_t d = chunk * kChunk + i;
        store(dst + i, real ? load_dims<kType>(nope, rope, params.dim_k, d, params.dim_qk) : Floats{});
      }
    }
  }
}

template <DType kType>
void stage_values(const PrefillParams& params, int64_t row, int keys, int64_t head, float* v) {
  for (int j = 0; j < keys; ++j) {
    const Element<kType>* src = row_of<kType>(params.v, row + j, head);
    float* dst = v + j * kChunk;
    for (int64_t chunk = 0; chunk < chunks(params.dim_v); ++chunk, dst += kTileKeys * kChunk) {
      MLA_UNROLL(4)
      for (int i = 0; i < kChunk; i += kLanes) store(dst + i, load_dims<kType>(src, chunk * kChunk + i, params.dim_v));
    }
  }
}

// What is staged next, brought into L2 while the present tile is computed: rows lie too far apart for the hardware to
// guess them, and without this staging waits for memory longer than it works.
class Upcoming {
 public:
  // `size` bytes of each of `rows` rows, spread over that many steps.
  void add(const void* data, int64_t stride, int64_t size, int64_t rows, int64_t steps) {
    parts_[num_parts_++] = {static_cast<const char*>(data), stride, size, rows, (rows + steps - 1) / steps};
  }
  void prefetch_step() {
    for (int n = 0; n < num_parts_; ++n) {
      Part& part = parts_[n];
      for (int64_t i = 0; i < part.rows_per_step && part.rows > 0; ++i, --part.rows, part.data += part.stride) {
        for (int64_t byte = 0; byte < part.size; byte += 64) __builtin_prefetch(part.data + byte, 0, 2);
      }
    }
  }

 private:
  struct Part {
    const char* data;
    int64_t stride, size, rows, rows_per_step;
  };
  Part parts_[3];
  int num_parts_ = 0;
};

// ---- S = K Q^T ------------------------------------------------------------------------------------------------------

template <int kKeys, int kVecs>
void score_group(const float* q, const float* k, int64_t num_chunks, float* s) {
  Floats acc[kKeys][kVecs] = {};
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    for (int d = 0; d < kChunk; ++d) {
      Floats row[kVecs];
      MLA_UNROLL(2)
      for (int v = 0; v < kVecs; ++v) row[v] = load(q + (d * kVecs + v) * kLanes);
      MLA_UNROLL(12)
      for (int i = 0; i < kKeys; ++i) {
        const Floats key = splat(k[i * kChunk + d]);
        MLA_UNROLL(2)
        for (int v = 0; v < kVecs; ++v) acc[i][v] += key * row[v];
      }
    }
    q += kChunk * kVecs * kLanes;
    k += kChunk * kKeyGroup;
  }
  MLA_UNROLL(12)
  for (int i = 0; i < kKeys; ++i) {
    MLA_UNROLL(2)
    for (int v = 0; v < kVecs; ++v) store(s + (i * kVecs + v) * kLanes, acc[i][v]);
  }
}

// Rounds the number of keys up to kKeyStep; the staged tile holds zeros there.
template <int kVecs>
void scores(const float* q, const float* k, int keys, int64_t num_chunks, Upcoming& next, float* s) {
  while (keys > 2 * kKeyStep) {
    next.prefetch_step();
    score_group<kKeyGroup, kVecs>(q, k, num_chunks, s);
    keys -= kKeyGroup;
    k += num_chunks * kChunk * kKeyGroup;
    s += kKeyGroup * kVecs * kLanes;
  }
  if (keys > kKeyStep) {
    score_group<2 * kKeyStep, kVecs>(q, k, num_chunks, s);
  } else if (keys > 0) {
    score_group<kKeyStep, kVecs>(q, k, num_chunks, s);
  }
}

// ---- softmax --------------------------------------------------------------------------------------------------------

// Row r of the strip sees key j of the tile iff j <= last_key + r.
template <int kVecs>
void mask(int keys, int64_t last_key, float* s) {
  for (int64_t j = last_key < 0 ? 0 : last_key + 1; j < keys; ++j) {
    for (int v = 0; v < kVecs; ++v) {
      float* p = s + (j * kVecs + v) * kLanes;
      const Ints row = Ints{MLA_IOTA} + v * kLanes;
      store(p, row >= (int32_t)(j - last_key) ? load(p) : splat(-kInfinity));
    }
  }
}

// Scores become weights relative to the new row maximum; `correction` is what the earlier sums must be scaled by.
template <int kVecs>
void softmax(int keys, float* s, float* row_max, float* row_sum, Floats* correction) {
  Floats new_max[kVecs], reference[kVecs], sum[kVecs] = {};
  for (int v = 0; v < kVecs; ++v) new_max[v] = load(row_max + v * kLanes);
  for (int j = 0; j < keys; ++j) {
    for (int v = 0; v < kVecs; ++v) new_max[v] = max(new_max[v], load(s + (j * kVecs + v) * kLanes));
  }
  for (int v = 0; v < kVecs; ++v) {
    // A row that has seen no key has maximum -inf: any finite reference makes its weights 0, where -inf would make NaN.
    reference[v] = new_max[v] == -kInfinity ? Floats{} : new_max[v];
    correction[v] = exp2(load(row_max + v * kLanes) - reference[v]);
    store(row_max + v * kLanes, new_max[v]);
  }
  for (int j = 0; j < keys; ++j) {
    for (int v = 0; v < kVecs; ++v) {
      float* p = s + (j * kVecs + v) * kLanes;
      const Floats weight = exp2(load(p) - reference[v]);
      store(p, weight);
      sum[v] += weight;
    }
  }
  for (int v = 0; v < kVecs; ++v) store(row_sum + v * kLanes, load(row_sum + v * kLanes) * correction[v] + sum[v]);
}

// ---- O^T = O^T * correction + V^T P ---------------------------------------------------------------------------------

template <int kVecs>
void value_group(const float* v, const float* p, int keys, const Floats* correction, bool first, float* o) {
  Floats acc[kDimGroup][kVecs] = {};
  if (!first) {
    MLA_UNROLL(8)
    for (int i = 0; i < kDimGroup; ++i) {
      MLA_UNROLL(2)
      for (int n = 0; n < kVecs; ++n) acc[i][n] = load(o + (i * kVecs + n) * kLanes) * correction[n];
    }
  }
  for (int j = 0; j < keys; ++j) {
    Floats weight[kVecs];
    MLA_UNROLL(2)
    for (int n = 0; n < kVecs; ++n) weight[n] = load(p + n * kLanes);
    MLA_UNROLL(8)
    for (int i = 0; i < kDimGroup; ++i) {
      const Floats value = splat(v[i]);
      MLA_UNROLL(2)
      for (int n = 0; n < kVecs; ++n) acc[i][n] += value * weight[n];
    }
    v += kChunk;
    p += kVecs * kLanes;
  }
  MLA_UNROLL(8)
  for (int i = 0; i < kDimGroup; ++i) {
    MLA_UNROLL(2)
    for (int n = 0; n < kVecs; ++n) store(o + (i * kVecs + n) * kLanes, acc[i][n]);
  }
}

// On a strip's first tile o holds nothing yet.
template <int kVecs>
void weigh_values(const float* v, const float* p, int keys, int64_t num_chunks, const Floats* correction, bool first,
                  float* o) {
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    for (int d = 0; d < kChunk; d += kDimGroup) {
      value_group<kVecs>(v + chunk * kTileKeys * kChunk + d, p, keys, correction, first,
                         o + (chunk * kChunk + d) * kVecs * kLanes);
    }
  }
}

// ---- One strip against one tile of keys -----------------------------------------------------------------------------

struct Strip {
  int rows;
  float* q;
  float* o;
  float* max;
  float* sum;
};

struct Tile {
  const float* k;
  const float* v;
  float* s;
  int64_t qk_chunks;
  int64_t v_chunks;
};

template <int kVecs>
void attend(const Strip& strip, const Tile& tile, int keys, int64_t last_key_of_row_0, bool first, Upcoming& next) {
  scores<kVecs>(strip.q, tile.k, keys, tile.qk_chunks, next, tile.s);
  mask<kVecs>(keys, last_key_of_row_0, tile.s);
  Floats correction[kVecs];
  softmax<kVecs>(keys, tile.s, strip.max, strip.sum, correction);
  weigh_values<kVecs>(tile.v, tile.s, keys, tile.v_chunks, correction, first, strip.o);
}

// ---- Epilogue -------------------------------------------------------------------------------------------------------

// out = own * O + running * out, per row. Both 0 writes zeros.
struct Weights {
  float own[kStrip];
  float running[kStrip];
  bool keep[kStrip];  // out stays as it is
};

// Writes lse, and says how the strip's result enters out.
void finish_softmax(const PrefillParams& params, const Strip& strip, int64_t row, int64_t head, Weights& weights) {
  constexpr float kLn2 = 0.693147180559945309f;
  const float v_descale = params.v_descale.of(head);
  for (int i = 0; i < strip.rows; ++i) {
    const float sum = strip.sum[i];
    const bool empty = sum == 0;  // the row saw no key
    float lse = empty ? -kInfinity : (strip.max[i] + __builtin_log2f(sum)) * kLn2;
    float own = empty ? 0.0f : v_descale / sum;
    float* lse_at =
        params.lse.data ? params.lse.data + head * params.lse.head_stride + (row + i) * params.lse.row_stride : nullptr;
    weights.running[i] = 0;
    weights.keep[i] = false;
    if (params.accumulate) {
      const float running_lse = *lse_at;
      const bool dead = running_lse == kInfinity || running_lse == -kInfinity;  // whatever out holds
      weights.keep[i] = empty && !dead;
      if (!empty && !dead) {
        const float top = running_lse > lse ? running_lse : lse;
        const float running = __builtin_expf(running_lse - top);
        const float added = __builtin_expf(lse - top);
        weights.running[i] = running / (running + added);
        own *= added / (running + added);
        lse = top + __builtin_logf(running + added);
      }
    }
    weights.own[i] = own;
    if (lse_at && !weights.keep[i]) *lse_at = lse;
  }
  for (int i = strip.rows; i < kStrip; ++i) weights.own[i] = 0;
}

template <DType kType, int kVecs>
void write_strip(const PrefillParams& params, const Strip& strip, int64_t row, int64_t head) {
  constexpr DType kOut = kType == DType::kFloat8E4M3 ? DType::kBFloat16 : kType;
  Weights weights;
  finish_softmax(params, strip, row, head, weights);
  auto* out =
      static_cast<Element<kOut>*>(params.out.data) + row * params.out.row_stride + head * params.out.head_stride;
  for (int v = 0; v < kVecs; ++v) {
    const Floats own = load(weights.own + v * kLanes);
    for (int64_t d = 0; d < params.dim_v; d += kLanes) {
      Floats block[kLanes];
      MLA_UNROLL(16)
      for (int i = 0; i < kLanes; ++i) {
        // Where a row saw no key, o may never have been written: select, don't multiply.
        block[i] = own == 0.0f ? Floats{} : load(strip.o + ((d + i) * kVecs + v) * kLanes) * own;
      }
      transpose(block);
      MLA_UNROLL(16)
      for (int i = 0; i < kLanes; ++i) {
        const int r = v * kLanes + i;
        if (r >= strip.rows || weights.keep[r]) continue;
        Element<kOut>* dst = out + r * params.out.row_stride;
        if (weights.running[r] != 0) block[i] += load_dims<kOut>(dst, d, params.dim_v) * weights.running[r];
        if (d + kLanes <= params.dim_v) {
          store_from_float<kOut>(dst + d, block[i]);
        } else {
          store_from_float<kOut>(dst + d, block[i], params.dim_v - d);
        }
      }
    }
  }
}

// ---- A work item ----------------------------------------------------------------------------------------------------

template <DType kType>
void run_head(const PrefillParams& params, const plan::WorkItem& item, int64_t head, const Scratch& scratch) {
  const int64_t first_row = params.cu_seqlens_q[item.seq];
  const int64_t first_key = params.cu_seqlens_k[item.seq];
  const int64_t len_q = params.cu_seqlens_q[item.seq + 1] - first_row;
  const int64_t len_k = params.cu_seqlens_k[item.seq + 1] - first_key;
  const int64_t qk_chunks = chunks(params.dim_qk);
  const int64_t v_chunks = chunks(params.dim_v);
  const int num_strips = (item.q_rows + kStrip - 1) / kStrip;
  const auto strip_at = [&](int index) -> Strip {
    const int rest = item.q_rows - index * kStrip;
    return {rest < kStrip ? rest : kStrip, scratch.q + index * qk_chunks * kChunk * kStrip,
            scratch.o + index * v_chunks * kChunk * kStrip, scratch.max + index * kStrip, scratch.sum + index * kStrip};
  };

  for (int index = 0; index < num_strips; ++index) {
    const Strip strip = strip_at(index);
    const int64_t row = first_row + item.q_begin + index * kStrip;
    if (item.kv_begin < item.kv_end) {
      strip.rows <= kLanes ? stage_queries<kType, 1>(params, row, strip.rows, head, strip.q)
                           : stage_queries<kType, 2>(params, row, strip.rows, head, strip.q);
    }
    for (int i = 0; i < kStrip; ++i) {
      strip.max[i] = -kInfinity;
      strip.sum[i] = 0;
    }
  }

  const Tile tile = {scratch.k, scratch.v, scratch.s, qk_chunks, v_chunks};
  const auto tile_keys = [&](int64_t key) {
    return (int)(item.kv_end - key < kTileKeys ? item.kv_end - key : kTileKeys);
  };
  for (int64_t key = item.kv_begin; key < item.kv_end; key += kTileKeys) {
    const int keys = tile_keys(key);
    stage_keys<kType>(params, first_key + key, keys, head, scratch.k);
    stage_values<kType>(params, first_key + key, keys, head, scratch.v);
    Upcoming next;
    const int64_t next_key = key + kTileKeys;
    if (next_key < item.kv_end) {
      const int64_t steps = num_strips * (kTileKeys / kKeyGroup);
      const auto add = [&](const ConstRows& tensor, int64_t dim) {
        constexpr int64_t kSize = sizeof(Element<kType>);
        next.add(row_of<kType>(tensor, first_key + next_key, head), tensor.row_stride * kSize, dim * kSize,
                 tile_keys(next_key), steps);
      };
      add(params.k, params.dim_k);
      if (params.dim_k < params.dim_qk) add(params.k_pe, params.dim_qk - params.dim_k);
      add(params.v, params.dim_v);
    }
    for (int index = 0; index < num_strips; ++index) {
      const Strip strip = strip_at(index);
      const int64_t last_key_of_row_0 =
          params.causal ? item.q_begin + index * kStrip + len_k - len_q - key : (int64_t)keys - 1;
      const int64_t visible = last_key_of_row_0 + strip.rows;  // of the strip's last row
      if (visible <= 0) continue;
      const int strip_keys = visible < keys ? (int)visible : keys;
      const bool first = key == item.kv_begin;
      strip.rows <= kLanes ? attend<1>(strip, tile, strip_keys, last_key_of_row_0, first, next)
                           : attend<2>(strip, tile, strip_keys, last_key_of_row_0, first, next);
    }
  }

  for (int index = 0; index < num_strips; ++index) {
    const Strip strip = strip_at(index);
    const int64_t row = first_row + item.q_begin + index * kStrip;
    strip.rows <= kLanes ? write_strip<kType, 1>(params, strip, row, head)
                         : write_strip<kType, 2>(params, strip, row, head);
  }
}

// Without a base, only to learn the size.
int64_t carve(const PrefillParams& params, int32_t q_rows, float* base, Scratch* scratch) {
  const int64_t rows = ((int64_t)q_rows + kStrip - 1) / kStrip * kStrip;
  const int64_t dim_qk = chunks(params.dim_qk) * kChunk;
  const int64_t dim_v = chunks(params.dim_v) * kChunk;
  int64_t size = 0;
  const auto take = [&](int64_t floats) {
    float* p = base ? base + size : nullptr;
    size += floats;
    return p;
  };
  scratch->q = take(rows * dim_qk);
  scratch->o = take(rows * dim_v);
  scratch->max = take(rows);
  scratch->sum = take(rows);
  scratch->k = take(kTileKeys * dim_qk);
  scratch->v = take(kTileKeys * dim_v);
  scratch->s = take(kTileKeys * kStrip);
  return size;
}

int64_t scratch_floats(const PrefillParams& params, int32_t q_rows) {
  Scratch scratch;
  return carve(params, q_rows, nullptr, &scratch);
}

template <DType kType>
void run_heads(const PrefillParams& params, const plan::WorkItem& item, const Scratch& scratch) {
  for (int32_t i = 0; i < item.head_count; ++i) run_head<kType>(params, item, item.head_begin + i, scratch);
}

void run_item(const PrefillParams& params, const plan::WorkItem& item, float* base) {
  Scratch scratch;
  carve(params, item.q_rows, base, &scratch);
  switch (params.dtype) {
    case DType::kFloat32: return run_heads<DType::kFloat32>(params, item, scratch);
    case DType::kBFloat16: return run_heads<DType::kBFloat16>(params, item, scratch);
    case DType::kFloat16: return run_heads<DType::kFloat16>(params, item, scratch);
    case DType::kFloat8E4M3: return run_heads<DType::kFloat8E4M3>(params, item, scratch);
  }
}

}  // namespace

#define MLA_STRING(x) #x
#define MLA_EXPANDED_STRING(x) MLA_STRING(x)
const Kernel kKernel = {MLA_EXPANDED_STRING(MLA_CPU_ISA), scratch_floats, run_item};

}  // namespace mla_prefill::cpu::MLA_CPU_ISA
