// Half a warp per row of one head. All its lanes read both lse before one of them writes the merged one, so that an
// output may be an input.
#include "context/convert.h"
#include "context/device.h"
#include "numeric.h"

namespace mla_prefill::context {
namespace {

constexpr int kLanes = 16;
constexpr int kRowsPerBlock = kThreads / kLanes;

struct Weights {
  float a, b;
  float lse;
};

// A dead side weighs 0; beside a live one it is -0, so that adding it keeps the live side's bits, a -0 included.
__device__ Weights weights_of(float lse_a, float lse_b) {
  // Some producers mark an empty side with +inf.
  const bool a_is_dead = fabsf(lse_a) == INFINITY, b_is_dead = fabsf(lse_b) == INFINITY;
  const float top = fmaxf(lse_a, lse_b);
  const float a = exp2f((lse_a - top) * kLog2E), b = exp2f((lse_b - top) * kLog2E);
  Weights w = {a / (a + b), b / (a + b), top + logf(a + b)};
  if (a_is_dead) w = {-0.0f, 1.0f, lse_b};
  if (b_is_dead) w = {1.0f, -0.0f, lse_a};
  if (a_is_dead && b_is_dead) w = {0.0f, 0.0f, -INFINITY};
  return w;
}

// Its own products, so that the sum is the same with the sides exchanged.
__device__ float weighted_sum(float weight_a, float a, float weight_b, float b) {
#if defined(__clang__)
#pragma clang fp contract(off)
  return weight_a * a + weight_b * b;
#else
  return __fadd_rn(__fmul_rn(weight_a, a), __fmul_rn(weight_b, b));
#endif
}

template <typename T, int kSize>
__device__ Pack<T, kSize> merged(const Weights& w, const Pack<T, kSize>& a, const Pack<T, kSize>& b) {
  const Floats<kSize> from_a = to_floats(a), from_b = to_floats(b);
  Floats<kSize> sum;
  for (int i = 0; i < kSize; ++i) {  // what weighs nothing may be NaN
    sum.at[i] = weighted_sum(w.a, w.a == 0.0f ? 0.0f : from_a.at[i], w.b, w.b == 0.0f ? 0.0f : from_b.at[i]);
  }
  return from_floats<T>(sum);
}

// kSize elements of a row at once. The payloads are loaded together with the lse that say what they weigh.
template <typename T, int kSize>
__global__ __launch_bounds__(kThreads) void merge_kernel(MergeParams p) {
  const uint32_t row = blockIdx.x * kRowsPerBlock + threadIdx.x / kLanes;
  const int64_t token = row / (uint32_t)p.num_heads, head = row % (uint32_t)p.num_heads;
  if (token >= p.tokens) return;
  const T* const a = static_cast<const T*>(p.out_a.data) + token * p.out_a.row_stride + head * p.out_a.head_stride;
  const T* const b = static_cast<const T*>(p.out_b.data) + token * p.out_b.row_stride + head * p.out_b.head_stride;
  T* const out = static_cast<T*>(p.out.data) + token * p.out.row_stride + head * p.out.head_stride;
  const float lse_a = p.lse_a.data[head * p.lse_a.head_stride + token * p.lse_a.row_stride];
  const float lse_b = p.lse_b.data[head * p.lse_b.head_stride + token * p.lse_b.row_stride];
  const int lane = threadIdx.x % kLanes;
  int32_t column = lane * kSize;
  Pack<T, kSize> from_a = {}, from_b = {};
  if (column < p.dim_v) {
    from_a = load_pack<kSize>(a + column);
    from_b = load_pack<kSize>(b + column);
  }
  const Weights w = weights_of(lse_a, lse_b);
  sync_warp();
  if (lane == 0) p.lse.data[head * p.lse.head_stride + token * p.lse.row_stride] = w.lse;
  while (column < p.dim_v) {
    store_pack(out + column, merged(w, from_a, from_b));
    column += kLanes * kSize;
    if (column >= p.dim_v) return;
    from_a = load_pack<kSize>(a + column);
    from_b = load_pack<kSize>(b + column);
  }
}

// The rows from a token on.
template <typename T>
MergeParams tokens_of(MergeParams p, int64_t first, int64_t tokens) {
  p.out_a.data = static_cast<const T*>(p.out_a.data) + first * p.out_a.row_stride;
  p.out_b.data = static_cast<const T*>(p.out_b.data) + first * p.out_b.row_stride;
  p.out.data = static_cast<T*>(p.out.data) + first * p.out.row_stride;
  p.lse_a.data += first * p.lse_a.row_stride;
  p.lse_b.data += first * p.lse_b.row_stride;
  p.lse.data += first * p.lse.row_stride;
  p.tokens = tokens;
  return p;
}

template <typename T>
cudaError_t launch(const MergeParams& p, cudaStream_t stream) {
  constexpr int kPack = 16 / sizeof(T);
  const bool packed = p.dim_v % kPack == 0 &&
                      in_packs(p.out_a.data, sizeof(T), kPack, {p.out_a.row_stride, p.out_a.head_stride}) &&
                      in_packs(p.out_b.data, sizeof(T), kPack, {p.out_b.row_stride, p.out_b.head_stride}) &&
                      in_packs(p.out.data, sizeof(T), kPack, {p.out.row_stride, p.out.head_stride});
  if (p.num_heads == 0) return cudaSuccess;
  constexpr int64_t kMostRows = 1 << 24;  // of a launch: they are counted in 32 bits
  const int64_t most_tokens = p.num_heads < kMostRows ? kMostRows / p.num_heads : 1;
  for (int64_t first = 0; first < p.tokens; first += most_tokens) {
    const MergeParams part = tokens_of<T>(p, first, p.tokens - first < most_tokens ? p.tokens - first : most_tokens);
    const unsigned blocks = (unsigned)((part.tokens * p.num_heads + kRowsPerBlock - 1) / kRowsPerBlock);
    if (packed) {
      merge_kernel<T, kPack><<<blocks, kThreads, 0, stream>>>(part);
    } else {
      merge_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(part);
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
