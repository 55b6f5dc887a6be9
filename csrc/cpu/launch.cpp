#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "cpu/cpu.h"
#include "cpu/isa.h"

namespace mla_prefill::cpu {
namespace {

const Kernel* kernel_named(const char* name) {
  for (const Kernel* kernel : {
#if defined(__x86_64__)
           &avx512::kKernel,
           &avx2::kKernel,
#endif
           &baseline::kKernel,
       }) {
    if (std::strcmp(kernel->isa, name) == 0) return kernel;
  }
  return nullptr;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
  }
  return "an unknown dtype";
}

// Each thread keeps its scratch for later calls: a few hundred KB.
float* scratch_of_thread(int64_t floats) {
  constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };
  thread_local std::unique_ptr<float, Free> buffer;
  thread_local int64_t size = 0;
  if (size < floats) {
    buffer.reset();
    size = 0;
    buffer.reset(static_cast<float*>(::operator new(floats * sizeof(float), kAlignment)));
    size = floats;
  }
  return buffer.get();
}

}  // namespace

std::string supports(const PrefillParams& params) {
  const DType out_dtype = params.dtype == DType::kFloat8E4M3 ? DType::kBFloat16 : params.dtype;
  if (params.out_dtype != out_dtype) {
    return std::string("out: expected ") + name_of(out_dtype) + " for q in " + name_of(params.dtype) + ", got " +
           name_of(params.out_dtype);
  }
  if (params.dim_k < 1 || params.dim_qk < params.dim_k) {
    return "k: expected a head dim of 1 to the " + std::to_string(params.dim_qk) + " of q, got " +
           std::to_string(params.dim_k);
  }
  if (params.dim_v < 1) return "v: expected a head dim of 1 or above, got " + std::to_string(params.dim_v);
  if (!kernel_named(isa())) {
    std::string usable;
    for (const Isa& isa : isas()) {
      if (isa.usable) usable += (usable.empty() ? "" : ", ") + std::string(isa.name);
    }
    return "MLA_PREFILL_CPU_ISA: expected one of " + usable + " on this machine, got " +
           std::getenv("MLA_PREFILL_CPU_ISA");
  }
  return "";
}

void run(const PrefillParams& params, const plan::WorkItem* items, int64_t num_items, const Parallel& parallel) {
  const Kernel& kernel = *kernel_named(isa());
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) {
      kernel.run_item(params, items[i], scratch_of_thread(kernel.scratch_floats(params, items[i].q_rows)));
    }
  };
  const int64_t num_threads = num_items < parallel.num_threads ? num_items : parallel.num_threads;
  if (num_threads <= 1) {
    work();
  } else {
    parallel.run(num_threads, [&](int64_t, int64_t) { work(); });
  }
}

}  // namespace mla_prefill::cpu
