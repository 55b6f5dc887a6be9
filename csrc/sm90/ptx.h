// Thin wrappers of the PTX that the kernel uses. Addresses are 32-bit shared-memory addresses.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mla_prefill::sm90 {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

// The same value in all lanes, and known to the compiler to be so: it stays in a uniform register. Without this the
// descriptors of each wgmma are rebuilt with about a dozen moves in front of it.
template <typename T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(~0u, value, 0);
}

// ---- mbarrier -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- programmatic dependent launch ----------------------------------------------------------------------------------

// Until what the stream did before is done and visible. No global memory may be read or written above it. Nor may what
// others write be read with __ldg: the compiler may move that up, and it need not see what is written after the start.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- for timelines --------------------------------------------------------------------------------------------------

__device__ __forceinline__ int64_t global_nanoseconds() {
  int64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time)::"memory");
  return time;
}

__device__ __forceinline__ int32_t sm_index() {
  int32_t index;
  asm volatile("mov.u32 %0, %smid;" : "=r"(index));
  return index;
}

// ---- named barriers, between warpgroups -----------------------------------------------------------------------------

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- TMA ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                                         int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// From shared memory, which stays as it is until tma_stores_have_read().
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t from, int c0, int c1, int c2, int c3,
                                          int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

__device__ __forceinline__ void tma_commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

__device__ __forceinline__ void tma_stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Shows TMA what this thread has written to shared memory.
__device__ __forceinline__ void tma_store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Into the L2 only.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(c0),
               "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// ---- shared memory --------------------------------------------------------------------------------------------------

// As load_matrices, the other way.
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// ---- warpgroups -----------------------------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of accumulators across a wgmma's issue or wait.
template <int kSize>
__device__ __forceinline__ void fence_registers(float (&registers)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

}  // namespace mla_prefill::sm90
