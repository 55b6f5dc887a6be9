// Scalar conversions between storage formats and float, without torch and the same on every device.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace mla_prefill {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};

MLA_HOST_DEVICE float float_from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

MLA_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

MLA_HOST_DEVICE float to_float(float value) { return value; }

MLA_HOST_DEVICE float to_float(BFloat16 value) { return float_from_bits((uint32_t)value.bits << 16); }

MLA_HOST_DEVICE float to_float(Float16 value) {
  const uint32_t sign = (uint32_t)(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  // The exponent is rebased by a multiplication, which also normalises subnormals; inf and NaN keep theirs.
  if (magnitude >= 0x7c00) return float_from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  return float_from_bits(sign | bits_of(float_from_bits(magnitude << 13) * 0x1p112f));
}

MLA_HOST_DEVICE float to_float(Float8E4M3 value) {
  const uint32_t sign = (uint32_t)(value.bits & 0x80) << 24;
  const uint32_t magnitude = value.bits & 0x7f;
  if (magnitude == 0x7f) return float_from_bits(0x7fc00000);
  return float_from_bits(sign | bits_of(float_from_bits(magnitude << 20) * 0x1p120f));
}

template <typename T>
MLA_HOST_DEVICE T from_float(float value);

template <>
MLA_HOST_DEVICE float from_float<float>(float value) {
  return value;
}

// Round to nearest even; a NaN stays one.
template <>
MLA_HOST_DEVICE BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = bits_of(value);
  if (value != value) return {(uint16_t)(bits >> 16 | 0x40)};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <>
MLA_HOST_DEVICE Float16 from_float<Float16>(float value) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {(uint16_t)(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {(uint16_t)(sign | 0x7c00)};  // rounds to 2^16 or above: inf
  if (magnitude < 0x38800000) {  // below 2^-14: the float unit rounds at the subnormal's last place
    return {(uint16_t)(sign | (bits_of(float_from_bits(magnitude) + 0.5f) - bits_of(0.5f)))};
  }
  return {(uint16_t)(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13)};
}

}  // namespace mla_prefill
