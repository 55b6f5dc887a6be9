// The launch of one kernel variant. Each variant is instantiated in a file of its own.
#pragma once

#include <atomic>

#include "sm90/kernel.cuh"

namespace mla_prefill::sm90 {

template <typename T, typename Variant>
cudaError_t launch(const KernelParams& params, int num_sms, cudaStream_t stream) {
  const auto kernel = prefill_kernel<T, Variant>;
  constexpr int kBytes = kSharedBytes<T, Variant>;
  int device;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  // The kernel's attribute is per device; setting it once is enough, setting it twice does no harm.
  static std::atomic<uint64_t> prepared{0};
  const uint64_t bit = (uint64_t)1 << device % 64;
  if (!(prepared.load(std::memory_order_relaxed) & bit)) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (status != cudaSuccess) return status;
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  // Its CTAs may start while those of the kernel before end; see wait_for_kernel_before().
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = num_sms;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, params);
  return cudaGetLastError();  // which also clears it: the caller reports it, not the next launch
}

extern template cudaError_t launch<__nv_bfloat16, Dims192>(const KernelParams&, int, cudaStream_t);
extern template cudaError_t launch<__nv_bfloat16, Dims128>(const KernelParams&, int, cudaStream_t);
extern template cudaError_t launch<__nv_bfloat16, Dims256>(const KernelParams&, int, cudaStream_t);
extern template cudaError_t launch<__half, Dims192>(const KernelParams&, int, cudaStream_t);
extern template cudaError_t launch<__half, Dims128>(const KernelParams&, int, cudaStream_t);
extern template cudaError_t launch<__half, Dims256>(const KernelParams&, int, cudaStream_t);

}  // namespace mla_prefill::sm90
