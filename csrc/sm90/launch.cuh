// One launch of one kernel variant. Each variant is instantiated in a file of its own.
#pragma once

#include <atomic>

#include "sm90/kernel.cuh"

namespace mla_prefill::sm90 {

template <typename T, typename Config>
cudaError_t launch(const KernelParams& params, int num_sms, cudaStream_t stream) {
  const auto kernel = prefill_kernel<T, Config>;
  constexpr int kBytes = kSharedBytes<T, Config>;
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
  // The launch over the short items may start while the one over the long items before it still runs.
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = num_sms * Config::kCtasPerSm;
  config.blockDim = Config::kThreads;
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = params.short_items ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

extern template cudaError_t launch<__nv_bfloat16, LongTile>(const KernelParams&, int, cudaStream_t);
extern template cudaError_t launch<__nv_bfloat16, ShortTile>(const KernelParams&, int, cudaStream_t);
extern template cudaError_t launch<__half, LongTile>(const KernelParams&, int, cudaStream_t);
extern template cudaError_t launch<__half, ShortTile>(const KernelParams&, int, cudaStream_t);

}  // namespace mla_prefill::sm90
