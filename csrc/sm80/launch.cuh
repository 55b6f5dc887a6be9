// The launch of one kernel variant. The variants of a dtype are instantiated in a file of their own.
#pragma once

#include <array>
#include <atomic>

#include "sm80/kernel.cuh"

namespace mla_prefill::sm80 {

// CTAs of a kernel that an SM of the current device holds, 0 or more. What it asks of the driver, it asks once per
// device; asking twice does no harm.
template <typename T, typename Config>
cudaError_t ctas_per_sm(int* ctas) {
  static std::array<std::atomic<int>, 64> known{};
  int device;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  std::atomic<int>& of_device = known[device % known.size()];
  *ctas = of_device.load(std::memory_order_relaxed);
  if (*ctas != 0) return cudaSuccess;

  const auto kernel = prefill_kernel<T, Config>;
  constexpr int kBytes = sizeof(SharedStorage<Config>);
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(ctas, kernel, Config::kThreads, kBytes);
  if (status != cudaSuccess) return status;
  if (*ctas == 0) return cudaErrorInvalidConfiguration;
  of_device.store(*ctas, std::memory_order_relaxed);
  return cudaSuccess;
}

template <typename T, typename Config>
cudaError_t launch_config(const KernelParams& params, int num_sms, cudaStream_t stream) {
  int ctas;
  const cudaError_t status = ctas_per_sm<T, Config>(&ctas);
  if (status != cudaSuccess) return status;
  prefill_kernel<T, Config><<<num_sms * ctas, Config::kThreads, sizeof(SharedStorage<Config>), stream>>>(params);
  return cudaGetLastError();
}

// `variant` is choose_variant's.
template <typename T>
cudaError_t launch(int variant, const KernelParams& params, int num_sms, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  int index = 0;
  for_each_config([&](auto config) {
    if (index++ == variant) status = launch_config<T, decltype(config)>(params, num_sms, stream);
  });
  return status;
}

extern template cudaError_t launch<__nv_bfloat16>(int, const KernelParams&, int, cudaStream_t);
extern template cudaError_t launch<__half>(int, const KernelParams&, int, cudaStream_t);

}  // namespace mla_prefill::sm80
