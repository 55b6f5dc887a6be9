// Eight lanes per row find its request and copy or dequantize the cached row. Each lane has up to nine packs in flight:
// with rows of 576 values that is all of the row, and a warp keeps 4.5 KB on the way. What is left is the way to the
// first of them, a chain of loads that nothing hides where all blocks start at once: the lanes search side by side.
#include <type_traits>

#include "context/convert.h"
#include "context/device.h"
#include "numeric.h"

namespace mla_prefill::context {
namespace {

constexpr int kLanes = 8;
constexpr int kRowsPerBlock = kThreads / kLanes;
constexpr int kPack = 8;  // elements; eight lanes of them are a line of 128 bytes where an element has two

struct Request {
  int32_t index;
  int32_t first_row;  // cu_seqlens[index]
  int32_t start;      // starts[index]
};

// The last request that starts at or before the row, or the first. Its row's lanes divide the rest by nine at each
// step, and have all that is wanted of the request with it. All lanes of the warp call it.
__device__ Request request_of(const GatherParams& p, int64_t row) {
  const int lane = threadIdx.x % 32, lane_of_row = lane % kLanes;
  Request found = {0, p.cu_seqlens[0], p.starts[0]};
  for (int32_t span = p.batch, stride; span > 1; span = stride) {
    stride = (int32_t)(((uint32_t)span + kLanes) / (kLanes + 1));
    const int64_t index = found.index + (int64_t)stride * (lane_of_row + 1);
    const bool exists = index < p.batch;
    const int32_t first_row = exists ? p.cu_seqlens[index] : 0, start = exists ? p.starts[index] : 0;
    int32_t steps = exists && first_row <= row;
    for (int distance = 1; distance < kLanes; distance *= 2) steps += shuffle(steps, lane ^ distance);
    const int last = lane - lane_of_row + steps - 1;
    const Request at = {found.index + stride * steps, shuffle(first_row, last), shuffle(start, last)};
    if (steps > 0) found = at;
  }
  return found;
}

// The cache row of a token, or nullptr where the block table or the cache has none.
__device__ const uint8_t* cache_row(const GatherParams& p, int32_t request, int64_t position, int64_t element_bytes) {
  if (position < 0 || position >= (int64_t)p.max_blocks * p.block_size) return nullptr;
  const uint32_t block = (uint32_t)position / (uint32_t)p.block_size;  // below 2^32: the sum of two int32
  const int64_t id = p.block_table[request * p.block_table_stride + block];
  if (id < 0 || id >= p.num_blocks) return nullptr;
  const int64_t slot = (uint32_t)position - block * (uint32_t)p.block_size;
  return static_cast<const uint8_t*>(p.cache) + (id * p.block_stride + slot * p.slot_stride) * element_bytes;
}

// A value at any address.
template <typename T>
__device__ T load_unaligned(const uint8_t* from) {
  uint8_t bytes[sizeof(T)];
  for (int i = 0; i < (int)sizeof(T); ++i) bytes[i] = from[i];
  T value;
  __builtin_memcpy(&value, bytes, sizeof value);
  return value;
}

template <typename T, int kSize>
__device__ Pack<T, kSize> scaled(const Pack<Float8E4M3, kSize>& quantized, float scale) {
  Floats<kSize> values = to_floats(quantized);
  for (int i = 0; i < kSize; ++i) values.at[i] *= scale;
  return from_floats<T>(values);
}

// A pack in registers, whole: of one in single bytes each would take a register of its own.
template <typename Stored>
using Words = std::conditional_t<sizeof(Stored) % 4 == 0, Pack<uint32_t, sizeof(Stored) / 4>, Stored>;

// Elements [0, count) of a row, as `Stored` in the cache; all loads of a lane come before its first store. `convert`
// gets a pack, its column, and the number of lane strides before it.
template <typename T, int kSize, int kInFlight = 9, typename Stored, typename Convert>
__device__ void copy_row(const Stored* from, T* out, int32_t count, const Convert& convert) {
  constexpr int32_t kStep = kLanes * kSize;
  for (int32_t first = (int32_t)threadIdx.x % kLanes * kSize; first < count; first += kStep * kInFlight) {
    using StoredPack = Pack<Stored, kSize>;
    Words<StoredPack> words[kInFlight] = {};
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t column = first + i * kStep;
      if (from && column < count) words[i] = *reinterpret_cast<const Words<StoredPack>*>(from + column);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t column = first + i * kStep;
      StoredPack stored;
      __builtin_memcpy(&stored, &words[i], sizeof stored);
      if (column < count) store_pack(out + column, convert(stored, column, i));
    }
  }
}

template <typename T, int kSize>
__device__ void copy_ds_mla_row(const uint8_t* row, T* out) {
  constexpr int kTiles = kDsMlaLatent / kDsMlaTile, kScale = sizeof(float);
  const auto* const latent = reinterpret_cast<const Float8E4M3*>(row);
  const uint8_t* const scales_at = row + kDsMlaLatent;
  const uint8_t* const rope_at = scales_at + kTiles * kScale;
  T* const rope_out = out + kDsMlaLatent;
  const int lane = threadIdx.x % kLanes;
  if constexpr (kSize > 1) {
    constexpr int kStepsPerTile = kDsMlaTile / (kLanes * kSize);
    static_assert(kStepsPerTile * kLanes * kSize == kDsMlaTile && kSize * kLanes == kDsMlaRope, "whole steps");
    const Pack<float, kTiles> scales =
        row ? load_pack<kTiles>(reinterpret_cast<const float*>(scales_at)) : Pack<float, kTiles>{};
    const Pack<BFloat16, kSize> rope =
        row ? load_pack<kSize>(reinterpret_cast<const BFloat16*>(rope_at) + lane * kSize) : Pack<BFloat16, kSize>{};
    copy_row<T, kSize, kTiles * kStepsPerTile>(latent, out, kDsMlaLatent, [&](const auto& stored, int, int step) {
      return scaled<T>(stored, scales.at[step / kStepsPerTile]);
    });
    store_pack(rope_out + lane * kSize, from_floats<T>(to_floats(rope)));
  } else {  // at any address
    copy_row<T, kSize>(latent, out, kDsMlaLatent, [&](const auto& stored, int column, int) {
      return scaled<T>(stored, row ? load_unaligned<float>(scales_at + column / kDsMlaTile * kScale) : 0.0f);
    });
    for (int column = lane; column < kDsMlaRope; column += kLanes) {
      const BFloat16 stored = row ? load_unaligned<BFloat16>(rope_at + column * sizeof(BFloat16)) : BFloat16{};
      rope_out[column] = from_float<T>(to_float(stored));
    }
  }
}

template <typename T, int kSize, CacheLayout kLayout>
__global__ __launch_bounds__(kThreads) void gather_kernel(GatherParams p) {
  const int64_t row = (int64_t)blockIdx.x * kRowsPerBlock + threadIdx.x / kLanes;
  const int32_t end = p.cu_seqlens[p.batch];
  const Request request = request_of(p, row);
  if (row >= p.out_rows || row < request.first_row || row >= end) return;
  const int64_t position = (int64_t)request.start + (row - request.first_row);
  const uint8_t* const cached = cache_row(p, request.index, position, kLayout == CacheLayout::kPlain ? sizeof(T) : 1);
  T* const out = static_cast<T*>(p.out) + row * p.out_stride;
  if constexpr (kLayout == CacheLayout::kPlain) {
    copy_row<T, kSize>(reinterpret_cast<const T*>(cached), out, p.dim,
                       [](const auto& stored, int, int) { return stored; });
  } else if constexpr (kLayout == CacheLayout::kFp8E4M3) {
    const float scale = p.k_scale ? *p.k_scale : 1.0f;
    copy_row<T, kSize>(reinterpret_cast<const Float8E4M3*>(cached), out, p.dim,
                       [&](const auto& stored, int, int) { return scaled<T>(stored, scale); });
  } else {
    copy_ds_mla_row<T, kSize>(cached, out);
  }
}

template <typename T, CacheLayout kLayout>
cudaError_t launch(const GatherParams& p, cudaStream_t stream) {
  const int64_t cached_bytes = kLayout == CacheLayout::kPlain ? sizeof(T) : 1;
  const int64_t cached_pack = kLayout == CacheLayout::kFp8DsMla ? 16 : kPack;  // scales and rope part lie at 16 bytes
  const bool packed = p.dim % kPack == 0 && in_packs(p.out, sizeof(T), kPack, {p.out_stride}) &&
                      in_packs(p.cache, cached_bytes, cached_pack, {p.block_stride, p.slot_stride});
  if (p.out_rows == 0 || p.batch == 0) return cudaSuccess;
  const unsigned blocks = (unsigned)((p.out_rows + kRowsPerBlock - 1) / kRowsPerBlock);
  if (packed) {
    gather_kernel<T, kPack, kLayout><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    gather_kernel<T, 1, kLayout><<<blocks, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch(const GatherParams& p, cudaStream_t stream) {
  switch (p.layout) {
    case CacheLayout::kFp8E4M3: return launch<T, CacheLayout::kFp8E4M3>(p, stream);
    case CacheLayout::kFp8DsMla: return launch<T, CacheLayout::kFp8DsMla>(p, stream);
    default: return launch<T, CacheLayout::kPlain>(p, stream);
  }
}

}  // namespace

cudaError_t gather_on_device(const GatherParams& params, cudaStream_t stream) {
  switch (params.out_dtype) {
    case DType::kFloat32: return launch<float>(params, stream);
    case DType::kFloat16: return launch<Float16>(params, stream);
    default: return launch<BFloat16>(params, stream);
  }
}

}  // namespace mla_prefill::context
