// Arguments of ragged_prefill that every GPU kernel takes, to change one of them and see it refused.
#pragma once

#include <string>

#include "params.h"

namespace mla_prefill {

alignas(16) inline uint16_t g_memory[4096];  // its address is all that is looked at

inline PrefillParams good() {
  PrefillParams p;
  p.q = {g_memory, 5 * 192, 192};
  p.k = {g_memory, 5 * 256, 256};
  p.k_pe = {g_memory, 576, 0};
  p.v = {g_memory + 128, 5 * 256, 256};
  p.out = {g_memory, 5 * 128, 128};
  p.num_heads = 5;
  p.total_q = 7;
  p.total_k = 9;
  p.dim_qk = 192;
  p.dim_k = 128;
  p.dim_v = 128;
  p.scale = 0.1f;
  return p;
}

// Whether `reason` is a refusal by this kernel that begins with the argument's name.
inline bool names(const std::string& reason, const std::string& argument, const std::string& kernel) {
  return reason.rfind(argument + ": expected ", 0) == 0 &&
         reason.find(" (" + kernel + " kernel), got ") != std::string::npos;
}

template <typename Change>
PrefillParams with(Change change) {
  PrefillParams p = good();
  change(p);
  return p;
}

}  // namespace mla_prefill
