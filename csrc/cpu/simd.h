// Vectors of MLA_CPU_LANES floats, for the instruction set that the including file has switched on. Nearly
// all of it in the compiler's vector extensions, which GCC and clang turn into the instructions that intrinsics would
// give; float16 has conversion instructions that they don't find by themselves.
//
// No std templates here or in kernel.h: the linker could keep this file's copy of one, and run it anywhere.
#pragma once

#if MLA_CPU_LANES > 4
#include <immintrin.h>
#endif

#include "cpu/config.h"
#include "params.h"

#define MLA_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define MLA_UNROLL(n) _Pragma("clang loop unroll(full)")
#else
#define MLA_PRAGMA(text) _Pragma(#text)
#define MLA_UNROLL(n) MLA_PRAGMA(GCC unroll n)
#endif

#if MLA_CPU_LANES == 16
#define MLA_INTERLEAVE_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define MLA_INTERLEAVE_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define MLA_IOTA 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif MLA_CPU_LANES == 8
#define MLA_INTERLEAVE_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define MLA_INTERLEAVE_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define MLA_IOTA 0, 1, 2, 3, 4, 5, 6, 7
#else
#define MLA_INTERLEAVE_LOW 0, 4, 1, 5
#define MLA_INTERLEAVE_HIGH 2, 6, 3, 7
#define MLA_IOTA 0, 1, 2, 3
#endif

namespace mla_prefill::cpu::MLA_CPU_ISA {

constexpr int kLanes = MLA_CPU_LANES;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

constexpr float kInfinity = __builtin_inff();

static MLA_INLINE Floats splat(float x) { return x - Floats{}; }

static MLA_INLINE Floats load(const float* p) {
  Floats x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

static MLA_INLINE void store(float* p, Floats x) { __builtin_memcpy(p, &x, sizeof x); }

static MLA_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }

// 2^x for x <= 0, relative error 8e-8; exactly 1 at 0, exactly 0 below -125 and at -inf; NaN stays.
static MLA_INLINE Floats exp2(Floats x) {
  const Floats round = splat(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
  const Floats shifted = x + round;
  const Floats f = x - (shifted - round);            // in [-1/2, 1/2]
  Floats p = f * 1.535334905e-4f + 1.339887502e-3f;  // minimax for (2^f - 1) / f
  p = f * p + 9.618436918e-3f;
  p = f * p + 5.550332367e-2f;
  p = f * p + 2.402264774e-1f;
  p = f * p + 6.931471825e-1f;
  p = f * p + 1.0f;
  const Floats result = (Floats)((Words)p + ((Words)shifted << 23));
  return x < -125.0f ? Floats{} : result;
}

// Transposes a kLanes x kLanes block: each round interleaves the two halves of the rows.
static MLA_INLINE void transpose(Floats (&x)[kLanes]) {
  MLA_UNROLL(4)
  for (int n = 1; n < kLanes; n *= 2) {
    Floats y[kLanes];
    MLA_UNROLL(8)
    for (int i = 0; i < kLanes / 2; ++i) {
#if defined(__clang__)
      y[2 * i] = __builtin_shufflevector(x[i], x[i + kLanes / 2], MLA_INTERLEAVE_LOW);
      y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + kLanes / 2], MLA_INTERLEAVE_HIGH);
#else
      y[2 * i] = __builtin_shuffle(x[i], x[i + kLanes / 2], Ints{MLA_INTERLEAVE_LOW});
      y[2 * i + 1] = __builtin_shuffle(x[i], x[i + kLanes / 2], Ints{MLA_INTERLEAVE_HIGH});
#endif
    }
    MLA_UNROLL(16)
    for (int i = 0; i < kLanes; ++i) x[i] = y[i];
  }
}

// ---- Elements of the tensors <-> floats -----------------------------------------------------------------------------

template <DType kType>
struct ElementOf;
template <>
struct ElementOf<DType::kFloat32> {
  using type = float;
};
template <>
struct ElementOf<DType::kBFloat16> {
  using type = uint16_t;
};
template <>
struct ElementOf<DType::kFloat16> {
  using type = uint16_t;
};
template <>
struct ElementOf<DType::kFloat8E4M3> {
  using type = uint8_t;
};
template <DType kType>
using Element = typename ElementOf<kType>::type;

// Sign, exponent and mantissa of a smaller format, moved to where a float has them; `exponent_bits` of exponent.
// Subnormals are renormalised by a subtraction of normal floats, so flush-to-zero modes don't matter.
template <int kExponentBits, int kMantissaBits>
static MLA_INLINE Floats widen_bits(Words x) {
  constexpr uint32_t kMagnitude = (1u << (kExponentBits + kMantissaBits)) - 1;
  constexpr uint32_t kRebias = (127u - ((1u << (kExponentBits - 1)) - 1)) << 23;
  const Words sign = (x & (kMagnitude + 1)) << (31 - kExponentBits - kMantissaBits);
  const Words normal = ((x & kMagnitude) << (23 - kMantissaBits)) + kRebias;
  const Words subnormal = (Words)((Floats)(normal + (1u << 23)) - (Floats)(Words{} + (kRebias + (1u << 23))));
  const Words finite = normal < kRebias + (1u << 23) ? subnormal : normal;
  if constexpr (kExponentBits == 5) {  // IEEE: the largest exponent means inf and NaN
    return (Floats)((normal >= kRebias + (31u << 23) ? normal + kRebias : finite) | sign);
  } else {  // e4m3fn: no inf, and NaN only with all bits set
    return (Floats)(((x & kMagnitude) == kMagnitude ? Words{} + 0x7fc00000u : finite) | sign);
  }
}

#if MLA_CPU_LANES == 16
// The masked forms: GCC 12 warns about its own header in the plain ones.
static MLA_INLINE Floats widen_float16(Halves x) { return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x); }
static MLA_INLINE Halves narrow_to_float16(Floats x) {
  return (Halves)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
}
#elif MLA_CPU_LANES == 8
static MLA_INLINE Floats widen_float16(Halves x) { return (Floats)_mm256_cvtph_ps((__m128i)x); }
static MLA_INLINE Halves narrow_to_float16(Floats x) {
  return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}
#else
static MLA_INLINE Floats widen_float16(Halves x) { return widen_bits<5, 10>(__builtin_convertvector(x, Words)); }
static MLA_INLINE Halves narrow_to_float16(Floats x) {
  const Words sign = ((Words)x >> 16) & 0x8000;
  const Words bits = (Words)x & 0x7fffffff;
  // Rounding carries into the exponent, up to infinity where it should.
  const Words normal = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
  // Next to 0.5 a float's last place is 2^-24, that of a float16 subnormal: the addition rounds.
  const Words subnormal = (Words)((Floats)bits + 0.5f) - 0x3f000000u;
  Words result = bits < (113u << 23) ? subnormal : normal;
  result = bits >= (143u << 23) ? Words{} + 0x7c00u : result;
  result = bits > 0x7f800000u ? Words{} + 0x7e00u : result;
  return __builtin_convertvector(result | sign, Halves);
}
#endif

template <DType kType>
static MLA_INLINE Floats load_as_float(const Element<kType>* p) {
  if constexpr (kType == DType::kFloat32) {
    return load(p);
  } else if constexpr (kType == DType::kFloat8E4M3) {
    Bytes x;
    __builtin_memcpy(&x, p, sizeof x);
    return widen_bits<4, 3>(__builtin_convertvector(x, Words));
  } else {
    Halves x;
    __builtin_memcpy(&x, p, sizeof x);
    if constexpr (kType == DType::kFloat16) return widen_float16(x);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
  }
}

// The first n < kLanes elements, then zeros; reads nothing behind them.
template <DType kType>
static MLA_INLINE Floats load_as_float(const Element<kType>* p, int64_t n) {
  Element<kType> x[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) x[i] = p[i];
  return load_as_float<kType>(x);
}

static MLA_INLINE Halves narrow_to_bfloat16(Floats x) {
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = (bits >> 16) | 0x40;
  return __builtin_convertvector(x != x ? nan : rounded, Halves);
}

template <DType kType>
static MLA_INLINE void store_from_float(Element<kType>* p, Floats x) {
  static_assert(kType != DType::kFloat8E4M3, "outputs are never float8");
  if constexpr (kType == DType::kFloat32) {
    store(p, x);
  } else {
    const Halves halves = kType == DType::kBFloat16 ? narrow_to_bfloat16(x) : narrow_to_float16(x);
    __builtin_memcpy(p, &halves, sizeof halves);
  }
}

// The first n < kLanes of them.
template <DType kType>
static MLA_INLINE void store_from_float(Element<kType>* p, Floats x, int64_t n) {
  Element<kType> buffer[kLanes];
  store_from_float<kType>(buffer, x);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

}  // namespace mla_prefill::cpu::MLA_CPU_ISA
