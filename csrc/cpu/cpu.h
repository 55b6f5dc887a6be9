// The CPU backend of ragged_prefill.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel.h"
#include "params.h"
#include "plan/plan.h"

namespace mla_prefill::cpu {

// Empty if this backend computes `params` on this machine, otherwise why not. Any head dims and strides will do.
std::string supports(const PrefillParams& params);

// What the kernel wants of its plan.
plan::Config plan_config();

// Computes all items; threads take them in order. A sequence's result depends neither on the other sequences nor on
// the number of threads. With `accumulate`, a row that sees no key leaves a live
// running state as it is.
void run(const PrefillParams& params, const plan::WorkItem* items, int64_t num_items, const Parallel& parallel);

// The kernel is built once per instruction set.
struct Isa {
  const char* name;
  bool usable;         // on this machine
  std::string reason;  // what is missing if it isn't
};

// Best first. `run` uses the first usable one, or the one that the environment variable MLA_PREFILL_CPU_ISA names.
std::vector<Isa> isas();

// The one that `run` uses; "none" if MLA_PREFILL_CPU_ISA names one that isn't usable.
const char* isa();

}  // namespace mla_prefill::cpu
