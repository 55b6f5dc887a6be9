// A warp per row: it finds the row's request by bisection, and its lanes copy or dequantize the cached row in packs.
#include "context/device.h"
#include "numeric.h"

namespace mla_prefill::context {
namespace {

constexpr int kWarp = 32;
constexpr int kRowsPerBlock = kThreads / kWarp;
constexpr int kPack = 8;  // elements

// The cache row of a token, or nullptr where the block table or the cache has none.
__device__ const uint8_t* cache_row(const GatherParams& p, int32_t request, int64_t position, int64_t element_bytes) {
  const int64_t block = position / p.block_size;
  if (position < 0 || block >= p.max_blocks) return nullptr;
  const int64_t id = p.block_table[request * p.block_table_stride + block];
  if (id < 0 || id >= p.num_blocks) return nullptr;
  const int64_t offset = id * p.block_stride + position % p.block_size * p.slot_stride;
  return static_cast<const uint8_t*>(p.cache) + offset * element_bytes;
}

template <typename T, int kSize>
__device__ Pack<T, kSize> dequantize(const uint8_t* from, float scale) {
  const Pack<uint8_t, kSize> quantized = load_pack<kSize>(from);
  Pack<T, kSize> values;
  for (int i = 0; i < kSize; ++i) values.at[i] = from_float<T>(to_float(Float8E4M3{quantized.at[i]}) * scale);
  return values;
}

// Elements [column, column + kSize) of a cached row.
template <typename T, int kSize>
__device__ Pack<T, kSize> read(const GatherParams& p, const uint8_t* row, int32_t column) {
  if (p.layout == CacheLayout::kPlain) return load_pack<kSize>(reinterpret_cast<const T*>(row) + column);
  if (p.layout == CacheLayout::kFp8E4M3) return dequantize<T, kSize>(row + column, p.k_scale ? *p.k_scale : 1.0f);
  const uint8_t* const scales = row + kDsMlaLatent;
  if (column < kDsMlaLatent) {
    return dequantize<T, kSize>(row + column, *reinterpret_cast<const float*>(scales + column / kDsMlaTile * 4));
  }
  const auto* rope = reinterpret_cast<const BFloat16*>(scales + kDsMlaLatent / kDsMlaTile * sizeof(float));
  const Pack<BFloat16, kSize> stored = load_pack<kSize>(rope + (column - kDsMlaLatent));
  Pack<T, kSize> values;
  for (int i = 0; i < kSize; ++i) values.at[i] = from_float<T>(to_float(stored.at[i]));
  return values;
}

template <typename T, int kSize>
__global__ __launch_bounds__(kThreads) void gather_kernel(GatherParams p) {
  const int64_t row = (int64_t)blockIdx.x * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= p.out_rows || row < p.cu_seqlens[0] || row >= p.cu_seqlens[p.batch]) return;
  int32_t low = 0, high = p.batch;  // the last request that starts at or before the row
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (p.cu_seqlens[middle] <= row ? low : high) = middle;
  }
  const int64_t element_bytes = p.layout == CacheLayout::kPlain ? sizeof(T) : 1;
  const int64_t position = (int64_t)p.starts[low] + (row - p.cu_seqlens[low]);
  const uint8_t* const cached = cache_row(p, low, position, element_bytes);
  T* const out = static_cast<T*>(p.out) + row * p.out_stride;
  for (int32_t column = threadIdx.x % kWarp * kSize; column < p.dim; column += kWarp * kSize) {
    Pack<T, kSize> values = {};
    if (cached) values = read<T, kSize>(p, cached, column);
    store_pack(out + column, values);
  }
}

template <typename T>
cudaError_t launch(const GatherParams& p, cudaStream_t stream) {
  const bool plain = p.layout == CacheLayout::kPlain;
  const bool packed = p.dim % kPack == 0 && in_packs(p.out, sizeof(T), kPack, {p.out_stride}) &&
                      (p.layout == CacheLayout::kFp8DsMla
                           ? in_packs(p.cache, 1, 16, {p.block_stride, p.slot_stride})
                           : in_packs(p.cache, plain ? sizeof(T) : 1, kPack, {p.block_stride, p.slot_stride}));
  if (p.out_rows == 0 || p.batch == 0) return cudaSuccess;
  const unsigned blocks = (unsigned)((p.out_rows + kRowsPerBlock - 1) / kRowsPerBlock);
  if (packed) {
    gather_kernel<T, kPack><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    gather_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
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
