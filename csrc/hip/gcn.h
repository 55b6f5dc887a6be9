// The instructions that the kernels are written in, one thin function each.
#pragma once

#include <hip/hip_runtime.h>

#include <cstdint>

namespace mla_prefill::hip {

using f32x2 = float __attribute__((ext_vector_type(2)));
using f32x16 = float __attribute__((ext_vector_type(16)));
using u32x2 = uint32_t __attribute__((ext_vector_type(2)));
using u32x4 = uint32_t __attribute__((ext_vector_type(4)));

template <typename T, int kSize>
using Vector = T __attribute__((ext_vector_type(kSize)));

constexpr float kInf = __builtin_inff();

// ---- Waves ----------------------------------------------------------------------------------------------------------

// The same value in every lane, as a scalar register.
__device__ __forceinline__ int32_t uniform(int32_t value) { return __builtin_amdgcn_readfirstlane(value); }

__device__ __forceinline__ bool any_lane(bool condition) { return __builtin_amdgcn_ballot_w64(condition) != 0; }

// The value of lane ^ 32.
__device__ __forceinline__ float other_half(float value, int lane) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
#if defined(__gfx950__)
  const auto swapped = __builtin_amdgcn_permlane32_swap(bits, bits, false, false);
  return __builtin_bit_cast(float, lane < 32 ? swapped[1] : swapped[0]);
#else
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((lane ^ 32) * 4, (int32_t)bits));
#endif
}

// The kernel's arguments, read again from here on: without this the compiler keeps all of them in scalar registers for
// the whole kernel, and spills.
template <typename Params>
__device__ __forceinline__ const Params& reload_arguments() {
  auto* arguments = __builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(arguments));
  return *(const Params*)arguments;
}

// A barrier for what is in shared memory. Loads from global memory stay in flight across it.
__device__ __forceinline__ void sync_block() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

// Rows that a wave or a block loads through a buffer descriptor: bytes past the last row are not read, they are 0.
__device__ __forceinline__ __amdgpu_buffer_rsrc_t make_buffer(const void* data, int32_t bytes) {
  constexpr int kRawBuffer = 0x00020000;
  return __builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(data), 0, bytes, kRawBuffer);
}

__device__ __forceinline__ u32x4 load_16_bytes(__amdgpu_buffer_rsrc_t buffer, uint32_t offset) {
  return __builtin_amdgcn_raw_buffer_load_b128(buffer, offset, 0, 0);
}

__device__ __forceinline__ u32x2 load_8_bytes(__amdgpu_buffer_rsrc_t buffer, uint32_t offset) {
  return __builtin_amdgcn_raw_buffer_load_b64(buffer, offset, 0, 0);
}

// The counter before the addition.
__device__ __forceinline__ int32_t atomic_add(int32_t* counter, int32_t value) {
  return __hip_atomic_fetch_add(counter, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) { return __builtin_amdgcn_exp2f(x); }
__device__ __forceinline__ float log2_approx(float x) { return __builtin_amdgcn_logf(x); }
__device__ __forceinline__ float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }

// Halves of two words: the low ones of `low` and `high`, or the high ones.
__device__ __forceinline__ uint32_t low_halves(uint32_t low, uint32_t high) {
  return __builtin_amdgcn_perm(high, low, 0x05040100);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t low, uint32_t high) {
  return __builtin_amdgcn_perm(high, low, 0x07060302);
}

// Round to nearest even.
template <typename T>
__device__ __forceinline__ uint32_t pack(f32x2 values) {
  return __builtin_bit_cast(uint32_t, __builtin_convertvector(values, Vector<T, 2>));
}

template <typename T>
__device__ __forceinline__ f32x2 unpack(uint32_t values) {
  return __builtin_convertvector(__builtin_bit_cast(Vector<T, 2>, values), f32x2);
}

// Weights are never NaN where they matter (their sum would be NaN too), and a tie may go either way: without gfx950's
// conversion, bf16 takes three instructions instead of eight.
template <typename T>
__device__ __forceinline__ uint32_t pack_weights(f32x2 values) {
#if !defined(__gfx950__)
  if constexpr (__is_same(T, __bf16)) {
    const u32x2 rounded = __builtin_bit_cast(u32x2, values) + 0x8000u;
    return high_halves(rounded.x, rounded.y);
  }
#endif
  return pack<T>(values);
}

// c + a^T b for 32 x 16 operands, of which a lane holds 8 elements of column lane % 32. Which 8 of the 16 does not
// matter as long as a and b agree.
//
// In the result a lane holds column lane % 32 of b; element g is row 8 (g / 4) + 4 (lane / 32) + g % 4.
template <typename T>
__device__ __forceinline__ f32x16 multiply_add(u32x4 a, u32x4 b, f32x16 c) {
#if defined(__gfx950__)
  const auto x = __builtin_bit_cast(Vector<T, 8>, a), y = __builtin_bit_cast(Vector<T, 8>, b);
  if constexpr (__is_same(T, __bf16)) {
    return __builtin_amdgcn_mfma_f32_32x32x16_bf16(x, y, c, 0, 0, 0);
  } else {
    return __builtin_amdgcn_mfma_f32_32x32x16_f16(x, y, c, 0, 0, 0);
  }
#else
  const auto first = [](u32x4 x) { return x.xy; };
  const auto second = [](u32x4 x) { return x.zw; };
  if constexpr (__is_same(T, __bf16)) {
    using Operand = Vector<int16_t, 4>;
    c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(Operand, first(a)),
                                                 __builtin_bit_cast(Operand, first(b)), c, 0, 0, 0);
    return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(Operand, second(a)),
                                                    __builtin_bit_cast(Operand, second(b)), c, 0, 0, 0);
  } else {
    using Operand = Vector<_Float16, 4>;
    c = __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(Operand, first(a)),
                                             __builtin_bit_cast(Operand, first(b)), c, 0, 0, 0);
    return __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(Operand, second(a)),
                                                __builtin_bit_cast(Operand, second(b)), c, 0, 0, 0);
  }
#endif
}

}  // namespace mla_prefill::hip
