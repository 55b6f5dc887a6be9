// Thin wrappers of the PTX that the kernel uses, compute capability 8.0 and above. Addresses are 32-bit shared-memory
// addresses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mla_prefill::sm80 {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

// The same value, of which the compiler knows nothing: what is computed from it is computed here, not once for all in
// front of a loop, where it would take registers in the whole of it.
__device__ __forceinline__ uint32_t computed_here(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// ---- Copies to shared memory ----------------------------------------------------------------------------------------

// `bytes` of 16, the rest are zeros: with 0 nothing is read.
__device__ __forceinline__ void copy_16_async(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_16_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Ends a group of copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void wait_for_all_groups_but_last() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

__device__ __forceinline__ void store_16(uint32_t to, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// ---- Matrices -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// c [16 x 8] += A [16 x 16] B [16 x 8]; c has 4 registers.
template <typename T>
__device__ void multiply_add(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float* c, const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<__half>(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace mla_prefill::sm80
