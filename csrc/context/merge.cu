// Half a warp per row of one head. All its lanes read both lse before one of them writes the merged one, so that an
// output may be an input.
#include "context/device.h"
#include "numeric.h"

namespace mla_prefill::context {
namespace {

constexpr int kLanes = 16;
constexpr int kRowsPerBlock = kThreads / kLanes;
constexpr float kLog2E = 1.4426950408889634f;

struct Weights {
  float a, b;  // 0 for a side that is dead, whose payload is not even read: it may be NaN
  float lse;
};

__device__ Weights weights_of(float lse_a, float lse_b) {
  // Some producers mark an empty side with +inf.
  const bool a_is_dead = fabsf(lse_a) == INFINITY, b_is_dead = fabsf(lse_b) == INFINITY;
  if (b_is_dead) return a_is_dead ? Weights{0.0f, 0.0f, -INFINITY} : Weights{1.0f, 0.0f, lse_a};
  if (a_is_dead) return {0.0f, 1.0f, lse_b};
  const float top = fmaxf(lse_a, lse_b);
  const float a = exp2f((lse_a - top) * kLog2E), b = exp2f((lse_b - top) * kLog2E);
  return {a / (a + b), b / (a + b), top + logf(a + b)};
}

// kSize elements of a row at once.
template <typename T, int kSize>
__global__ __launch_bounds__(kThreads) void merge_kernel(MergeParams p, int64_t first_row) {
  const int lane = threadIdx.x % kLanes;
  const int64_t row = first_row + (int64_t)blockIdx.x * kRowsPerBlock + threadIdx.x / kLanes;
  if (row >= p.tokens * p.num_heads) return;
  const int64_t token = row / p.num_heads, head = row % p.num_heads;
  const Weights w = weights_of(p.lse_a.data[head * p.lse_a.head_stride + token * p.lse_a.row_stride],
                               p.lse_b.data[head * p.lse_b.head_stride + token * p.lse_b.row_stride]);
  sync_warp();
  if (lane == 0) p.lse.data[head * p.lse.head_stride + token * p.lse.row_stride] = w.lse;

  const T* const a = static_cast<const T*>(p.out_a.data) + token * p.out_a.row_stride + head * p.out_a.head_stride;
  const T* const b = static_cast<const T*>(p.out_b.data) + token * p.out_b.row_stride + head * p.out_b.head_stride;
  T* const out = static_cast<T*>(p.out.data) + token * p.out.row_stride + head * p.out.head_stride;
  for (int32_t column = lane * kSize; column < p.dim_v; column += kLanes * kSize) {
    Pack<T, kSize> from_a = {}, from_b = {}, merged;
    if (w.a != 0.0f) from_a = load_pack<kSize>(a + column);
    if (w.b != 0.0f) from_b = load_pack<kSize>(b + column);
    for (int i = 0; i < kSize; ++i) {
      merged.at[i] = from_float<T>(w.a * to_float(from_a.at[i]) + w.b * to_float(from_b.at[i]));
    }
    store_pack(out + column, merged);
  }
}

template <typename T>
cudaError_t launch(const MergeParams& p, cudaStream_t stream) {
  constexpr int kPack = 16 / sizeof(T);
  const bool packed = p.dim_v % kPack == 0 &&
                      in_packs(p.out_a.data, sizeof(T), kPack, {p.out_a.row_stride, p.out_a.head_stride}) &&
                      in_packs(p.out_b.data, sizeof(T), kPack, {p.out_b.row_stride, p.out_b.head_stride}) &&
                      in_packs(p.out.data, sizeof(T), kPack, {p.out.row_stride, p.out.head_stride});
  const int64_t rows = p.tokens * p.num_heads;
  constexpr int64_t kMostBlocks = 1 << 20;  // far from the limits of a launch's size
  for (int64_t first = 0; first < rows; first += kMostBlocks * kRowsPerBlock) {
    const int64_t blocks = (rows - first + kRowsPerBlock - 1) / kRowsPerBlock;
    const unsigned grid = (unsigned)(blocks < kMostBlocks ? blocks : kMostBlocks);
    if (packed) {
      merge_kernel<T, kPack><<<grid, kThreads, 0, stream>>>(p, first);
    } else {
      merge_kernel<T, 1><<<grid, kThreads, 0, stream>>>(p, first);
    }
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t merge_on_device(const MergeParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case DType::kFloat32: return launch<float>(params, stream);
    case DType::kFloat16: return launch<Float16>(params, stream);
    default: return launch<BFloat16>(params, stream);
  }
}

}  // namespace mla_prefill::context
