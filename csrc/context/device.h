// gather_latent and merge_states on a GPU: one source for nvcc and HIP's compilers.
#pragma once

#include <initializer_list>

#include "context/context.h"
#include "gpu.h"
#include "host_device.h"

namespace mla_prefill::context {

// As gather_on_cpu, into rows below params.out_rows.
cudaError_t gather_on_device(const GatherParams& params, cudaStream_t stream);

// As merge_on_cpu.
cudaError_t merge_on_device(const MergeParams& params, cudaStream_t stream);

constexpr int kThreads = 256;

// `kSize` elements that one lane moves at once, 16 bytes at a time where they are that many.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Pack {
  T at[kSize];
};

template <int kSize, typename T>
MLA_HOST_DEVICE Pack<T, kSize> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, kSize>*>(from);
}

template <int kSize, typename T>
MLA_HOST_DEVICE void store_pack(T* to, const Pack<T, kSize>& values) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof values == 16) {  // nvcc makes four stores of some
    uint32_t words[4];
    __builtin_memcpy(words, &values, sizeof words);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<Pack<T, kSize>*>(to) = values;
}

// Whether rows can be moved in packs of `size` elements: the base and all strides are multiples of them.
inline bool in_packs(const void* data, int64_t element_bytes, int64_t size, std::initializer_list<int64_t> strides) {
  const int64_t bytes = element_bytes * size < 16 ? element_bytes * size : 16;
  bool aligned = reinterpret_cast<uintptr_t>(data) % bytes == 0;
  for (const int64_t stride : strides) aligned = aligned && stride * element_bytes % bytes == 0;
  return aligned;
}

}  // namespace mla_prefill::context
