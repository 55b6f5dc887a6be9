// The two matrix products of attention as wgmma instructions, bfloat16 and float16 with float32 accumulators.
// Layout of descriptors and fragments: PTX ISA, "Asynchronous warpgroup level matrix instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mla_prefill::sm90 {

// Operands lie in shared memory as boxes of rows x 64 elements, each row 128 bytes, 128-byte swizzle. A descriptor's
// low word holds the address and the leading offset, in units of 16 bytes; it is what moves. The high word is fixed:
// a stride of 1024 bytes between groups of 8 rows, and the swizzle mode.
constexpr uint64_t kDescriptorHigh = ((uint64_t)(1024 >> 4) | (uint64_t)1 << 30) << 32;

__device__ __forceinline__ uint64_t descriptor(uint32_t low) { return kDescriptorHigh | low; }

// K-major operand (Q and K: the product runs along the row): the leading offset is not used.
__device__ __forceinline__ uint32_t descriptor_low_k_major(uint32_t address) {
  return (address & 0x3ffff) >> 4 | 1u << 16;
}

// MN-major operand (V: the product runs down the column): the leading offset leads to the next 64 columns' box.
__device__ __forceinline__ uint32_t descriptor_low_mn_major(uint32_t address, uint32_t box_bytes) {
  return (address & 0x3ffff) >> 4 | box_bytes >> 4 << 16;
}

#define MLA_REGS_8(d, i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define MLA_REGS_32(d, i) MLA_REGS_8(d, i), MLA_REGS_8(d, i + 8), MLA_REGS_8(d, i + 16), MLA_REGS_8(d, i + 24)
#define MLA_NAMES_32                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MLA_NAMES_40                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define MLA_NAMES_64                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MLA_NAMES_128                                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d [64 x N] = A B^T, or += where accumulate is not 0. A [64 x 16] and B [N x 16] are K-major in shared memory; d has
// N / 2 registers per thread.
template <typename T>
__device__ void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b, int accumulate);
template <typename T>
__device__ void wgmma_ss(float (&d)[40], uint64_t a, uint64_t b, int accumulate);
template <typename T>
__device__ void wgmma_ss(float (&d)[64], uint64_t a, uint64_t b, int accumulate);

// d [64 x N] += A B: A [64 x 16] in registers, B [16 x N] MN-major in shared memory.
template <typename T>
__device__ void wgmma_rs(float (&d)[64], const uint32_t* a, uint64_t b);
template <typename T>
__device__ void wgmma_rs(float (&d)[128], const uint32_t* a, uint64_t b);

template <>
__device__ __forceinline__ void wgmma_ss<__nv_bfloat16>(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MLA_NAMES_32
      "}, %32, %33, p, 1, 1, 0, 0;\n"
      "}"
      : MLA_REGS_32(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void wgmma_ss<__nv_bfloat16>(float (&d)[40], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %42, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" MLA_NAMES_40
      "}, %40, %41, p, 1, 1, 0, 0;\n"
      "}"
      : MLA_REGS_32(d, 0), MLA_REGS_8(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void wgmma_ss<__nv_bfloat16>(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MLA_NAMES_64
      "}, %64, %65, p, 1, 1, 0, 0;\n"
      "}"
      : MLA_REGS_32(d, 0), MLA_REGS_32(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void wgmma_rs<__nv_bfloat16>(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MLA_NAMES_64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : MLA_REGS_32(d, 0), MLA_REGS_32(d, 32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_rs<__nv_bfloat16>(float (&d)[128], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" MLA_NAMES_128
               "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
               : MLA_REGS_32(d, 0), MLA_REGS_32(d, 32), MLA_REGS_32(d, 64), MLA_REGS_32(d, 96)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_ss<__half>(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" MLA_NAMES_32
      "}, %32, %33, p, 1, 1, 0, 0;\n"
      "}"
      : MLA_REGS_32(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void wgmma_ss<__half>(float (&d)[40], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %42, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {" MLA_NAMES_40
      "}, %40, %41, p, 1, 1, 0, 0;\n"
      "}"
      : MLA_REGS_32(d, 0), MLA_REGS_8(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void wgmma_ss<__half>(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" MLA_NAMES_64
      "}, %64, %65, p, 1, 1, 0, 0;\n"
      "}"
      : MLA_REGS_32(d, 0), MLA_REGS_32(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}

template <>
__device__ __forceinline__ void wgmma_rs<__half>(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" MLA_NAMES_64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : MLA_REGS_32(d, 0), MLA_REGS_32(d, 32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_rs<__half>(float (&d)[128], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" MLA_NAMES_128
               "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
               : MLA_REGS_32(d, 0), MLA_REGS_32(d, 32), MLA_REGS_32(d, 64), MLA_REGS_32(d, 96)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef MLA_REGS_8
#undef MLA_REGS_32
#undef MLA_NAMES_32
#undef MLA_NAMES_40
#undef MLA_NAMES_64
#undef MLA_NAMES_128

}  // namespace mla_prefill::sm90
