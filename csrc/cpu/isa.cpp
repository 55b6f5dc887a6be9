// What this machine runs, and what the kernel asks of a plan: all that can be said without the kernels themselves.
#include <cstdlib>
#include <cstring>

#include "cpu/config.h"
#include "cpu/cpu.h"

namespace mla_prefill::cpu {
namespace {

Isa on_this_machine(const char* name, bool usable, const char* needs) {
  return {name, usable, usable ? "" : std::string("the processor lacks one of ") + needs};
}

}  // namespace

std::vector<Isa> isas() {
  std::vector<Isa> result;
#if defined(__x86_64__)
  __builtin_cpu_init();
  result.push_back(on_this_machine("avx512",
                                   __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"),
                                   "AVX-512 F, BW, DQ and VL"));
  // Every processor that has these two has F16C too.
  result.push_back(
      on_this_machine("avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), "AVX2 and FMA"));
#endif
  result.push_back({"baseline", true, ""});
  return result;
}

const char* isa() {
  static const std::vector<Isa> known = isas();
  const char* wanted = std::getenv("MLA_PREFILL_CPU_ISA");  // read on every call, so that a test can switch
  for (const Isa& isa : known) {
    if (isa.usable && (!wanted || std::strcmp(wanted, isa.name) == 0)) return isa.name;
  }
  return "none";
}

plan::Config plan_config() {
  plan::Config config;
  config.tile_q = kTileQ;
  config.tile_kv = kTileKeys;
  return config;
}

}  // namespace mla_prefill::cpu
