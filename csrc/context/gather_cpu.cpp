#include <algorithm>
#include <cstring>

#include "context/context.h"
#include "numeric.h"

namespace mla_prefill::context {
namespace {

// The cache row of a token, or nullptr where the block table or the cache has none.
const uint8_t* cache_row(const GatherParams& p, int32_t request, int64_t position, int64_t element_bytes) {
  const int64_t block = position / p.block_size;
  if (block >= p.max_blocks) return nullptr;
  const int64_t id = p.block_table[request * p.block_table_stride + block];
  if (id < 0 || id >= p.num_blocks) return nullptr;
  const int64_t offset = id * p.block_stride + position % p.block_size * p.slot_stride;
  return static_cast<const uint8_t*>(p.cache) + offset * element_bytes;
}

template <typename T>
void dequantize(const uint8_t* from, int32_t count, float scale, T* to) {
  for (int32_t i = 0; i < count; ++i) to[i] = from_float<T>(to_float(Float8E4M3{from[i]}) * scale);
}

template <typename T>
void copy_row(const GatherParams& p, const uint8_t* row, T* out) {
  switch (p.layout) {
    case CacheLayout::kPlain: std::memcpy(out, row, p.dim * sizeof(T)); return;
    case CacheLayout::kFp8E4M3: dequantize(row, p.dim, p.k_scale ? *p.k_scale : 1.0f, out); return;
    case CacheLayout::kFp8DsMla: {
      const uint8_t* scales = row + kDsMlaLatent;
      const uint8_t* rope = scales + kDsMlaLatent / kDsMlaTile * sizeof(float);
      for (int32_t tile = 0; tile < kDsMlaLatent / kDsMlaTile; ++tile) {
        float scale;
        std::memcpy(&scale, scales + tile * sizeof scale, sizeof scale);
        dequantize(row + tile * kDsMlaTile, kDsMlaTile, scale, out + tile * kDsMlaTile);
      }
      for (int32_t i = 0; i < kDsMlaRope; ++i) {
        BFloat16 value;
        std::memcpy(&value, rope + i * sizeof value, sizeof value);
        out[kDsMlaLatent + i] = from_float<T>(to_float(value));
      }
      return;
    }
  }
}

template <typename T>
void gather(const GatherParams& p, const Parallel& parallel) {
  const int64_t element_bytes = p.layout == CacheLayout::kPlain ? sizeof(T) : 1;
  const int64_t first = p.cu_seqlens[0];
  parallel.run(p.cu_seqlens[p.batch] - first, [&](int64_t begin, int64_t end) {
    // The request that holds row first + begin: the last one that starts at or before it.
    int32_t request =
        (int32_t)(std::upper_bound(p.cu_seqlens, p.cu_seqlens + p.batch + 1, first + begin) - p.cu_seqlens) - 1;
    for (int64_t row = first + begin; row < first + end; ++row) {
      while (row >= p.cu_seqlens[request + 1]) ++request;
      T* out = static_cast<T*>(p.out) + row * p.out_stride;
      const int64_t position = (int64_t)p.starts[request] + (row - p.cu_seqlens[request]);
      if (const uint8_t* cached = cache_row(p, request, position, element_bytes)) {
        copy_row(p, cached, out);
      } else {
        std::fill(out, out + p.dim, from_float<T>(0.0f));
      }
    }
  });
}

}  // namespace

void gather_on_cpu(const GatherParams& params, const Parallel& parallel) {
  switch (params.out_dtype) {
    case DType::kFloat32: return gather<float>(params, parallel);
    case DType::kBFloat16: return gather<BFloat16>(params, parallel);
    case DType::kFloat16: return gather<Float16>(params, parallel);
    case DType::kFloat8E4M3: break;  // refused by the op
  }
}

}  // namespace mla_prefill::context
