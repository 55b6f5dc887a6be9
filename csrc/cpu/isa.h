// The kernel is compiled once per instruction set (kernel_<isa>.cpp); this is what launch.cpp sees of each copy.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/plan.h"

namespace mla_prefill::cpu {

struct Kernel {
  const char* isa;
  // Scratch that run_item needs for items of at most q_rows rows: this many floats, 64-byte aligned.
  int64_t (*scratch_floats)(const PrefillParams& params, int32_t q_rows);
  void (*run_item)(const PrefillParams& params, const plan::WorkItem& item, float* scratch);
};

#if defined(__x86_64__)
namespace avx512 {
extern const Kernel kKernel;
}
namespace avx2 {
extern const Kernel kKernel;
}
#endif
namespace baseline {
extern const Kernel kKernel;
}

}  // namespace mla_prefill::cpu
