// Packs of elements to float and back, by the GPU's converters of pairs where it has them.
#pragma once

#include <type_traits>

#include "context/device.h"
#include "numeric.h"

#if defined(__CUDACC__) && !defined(__HIPCC__)
#define MLA_PAIR_CONVERTERS
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

namespace mla_prefill::context {

template <int kSize>
struct Floats {
  float at[kSize];
};

#if defined(MLA_PAIR_CONVERTERS)
__device__ __forceinline__ float2 to_floats(Float8E4M3 first, Float8E4M3 second) {
  const auto pair = (__nv_fp8x2_storage_t)(first.bits | second.bits << 8);
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
}
__device__ __forceinline__ void from_floats(float first, float second, BFloat16* to) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  __builtin_memcpy(to, &pair, sizeof pair);
}
__device__ __forceinline__ void from_floats(float first, float second, Float16* to) {
  const __half2 pair = __floats2half2_rn(first, second);
  __builtin_memcpy(to, &pair, sizeof pair);
}
constexpr bool kInPairs = true;
#else
constexpr bool kInPairs = false;
#endif

template <typename T, int kSize>
__device__ __forceinline__ Floats<kSize> to_floats(const Pack<T, kSize>& pack) {
  Floats<kSize> values;
  if constexpr (kInPairs && std::is_same_v<T, Float8E4M3> && kSize % 2 == 0) {
    for (int i = 0; i < kSize; i += 2) {
      const auto pair = to_floats(pack.at[i], pack.at[i + 1]);
      values.at[i] = pair.x;
      values.at[i + 1] = pair.y;
    }
  } else {
    for (int i = 0; i < kSize; ++i) values.at[i] = to_float(pack.at[i]);
  }
  return values;
}

// Rounded to nearest even.
template <typename T, int kSize>
__device__ __forceinline__ Pack<T, kSize> from_floats(const Floats<kSize>& values) {
  Pack<T, kSize> pack;
  if constexpr (kInPairs && sizeof(T) == 2 && kSize % 2 == 0) {
    for (int i = 0; i < kSize; i += 2) from_floats(values.at[i], values.at[i + 1], &pack.at[i]);
  } else {
    for (int i = 0; i < kSize; ++i) pack.at[i] = from_float<T>(values.at[i]);
  }
  return pack;
}

}  // namespace mla_prefill::context
