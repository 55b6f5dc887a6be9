// The Python module `_C`: what was built, which kernels there are, and the host planner. Nothing with tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/cpu.h"
#include "cuda_kernels.h"
#include "hip/config.h"
#include "plan/plan.h"
#include "sm80/arguments.h"
#include "sm80/config.h"
#include "sm90/config.h"

namespace py = pybind11;

namespace mla_prefill {
namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = MLA_PREFILL_VERSION;
  info["backends"] = MLA_PREFILL_BACKENDS;
  info["built_with_torch"] = MLA_PREFILL_TORCH;
  info["runs_with_torch"] = ">=2.11";
  info["cuda_architectures"] = MLA_PREFILL_CUDA_ARCHS;
  info["compiler"] = __VERSION__;
  return info;
}

bool is_built(const char* backend) {
  for (const std::string& built : cuda::split(MLA_PREFILL_BACKENDS)) {
    if (built == backend) return true;
  }
  return false;
}

py::list kernel_table() {
  py::list table;
  for (const cpu::Isa& isa : cpu::isas()) {
    py::dict row;
    row["backend"] = "cpu";
    row["dtypes"] = "float32, bfloat16, float16, float8_e4m3fn";
    row["head_dims"] = "any";
    row["detail"] = std::string(isa.name) + (isa.name == std::string(cpu::isa()) ? " (in use)" : "");
    row["usable"] = isa.usable;
    row["reason"] = isa.reason;
    table.append(row);
  }
  if (is_built("sm90")) {
    py::dict row;
    row["backend"] = "sm90";
    row["dtypes"] = "bfloat16, float16";
    row["head_dims"] = "(128, 64, 128), (64, 64, 128), (128, 0, 128), (192, 64, 256), (256, 0, 256)";
    row["detail"] = "tiles of 128 x 128, and of 64 x 64 for sequences of up to 128 keys; of 128 x 80 for dims of 256";
    row["compute_capability"] = "9.0";  // whether such a device is there is torch's to say
    table.append(row);
  }
  if (is_built("sm80")) {
    py::dict row;
    row["backend"] = "sm80";
    row["dtypes"] = "bfloat16, float16";
    row["head_dims"] = "multiples of 8 up to 256";
    row["detail"] = "tiles of 64 or 128 x 48 or 64";
    row["compute_capability"] = cuda::capabilities_of(MLA_PREFILL_CUDA_ARCHS);
    table.append(row);
  }
  if (is_built("hip")) {
    py::dict row;
    row["backend"] = "hip";
    row["dtypes"] = "bfloat16, float16";
    row["head_dims"] = "(128, 64, 128)";
    row["detail"] = "tiles of 128 x 32; emulated, not run on hardware";
    row["gcn_architectures"] = "gfx90a, gfx942, gfx950";  // whether such a device is there is torch's to say
    table.append(row);
  }
  return table;
}

// Names of the CUDA kernels that this build has for a compute capability, the preferred one first, or why there is
// none.
std::tuple<std::vector<std::string>, std::string> cuda_kernels(int major, int minor, const std::string& forced) {
  const cuda::Kernels found = cuda::kernels_for(MLA_PREFILL_BACKENDS, MLA_PREFILL_CUDA_ARCHS, forced, major, minor);
  std::vector<std::string> names;
  for (const cuda::Kernel kernel : found.kernels) names.push_back(cuda::name_of(kernel));
  return {names, found.reason};
}

constexpr int32_t kHopperSharedBytes = 227 * 1024;  // of a CTA

plan::Config config_of(const std::string& backend, int32_t dim_qk, int32_t dim_v, int32_t shared_bytes) {
  if (backend == "cpu") return cpu::plan_config();
  if (backend == "sm90") return sm90::plan_config(dim_qk, dim_v);
  if (backend == "sm80") return sm80::plan_config(dim_qk, dim_v, shared_bytes);
  if (backend == "hip") return hip::plan_config();
  throw std::invalid_argument("backend: expected 'cpu', 'sm90', 'sm80' or 'hip', got '" + backend + "'");
}

using Item = std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t>;

std::vector<Item> plan_items(const std::vector<int32_t>& cu_seqlens_q, const std::vector<int32_t>& cu_seqlens_k,
                             int32_t num_heads, bool causal, int32_t dim_nope, int32_t dim_rope, int32_t dim_v,
                             const std::string& backend, int32_t shared_bytes) {
  const auto expect = [](bool ok, const std::string& message) {
    if (!ok) throw std::invalid_argument(message);
  };
  expect(!cu_seqlens_q.empty(), "cu_seqlens_q: expected batch + 1 entries, got none");
  expect(cu_seqlens_q.size() == cu_seqlens_k.size(), "cu_seqlens_k: expected as many entries as cu_seqlens_q, " +
                                                         std::to_string(cu_seqlens_q.size()) + ", got " +
                                                         std::to_string(cu_seqlens_k.size()));
  expect(num_heads >= 1, "num_heads: expected 1 or above, got " + std::to_string(num_heads));
  for (const auto* cu_seqlens : {&cu_seqlens_q, &cu_seqlens_k}) {
    for (size_t i = 1; i < cu_seqlens->size(); ++i) {
      expect((*cu_seqlens)[i - 1] <= (*cu_seqlens)[i] && (*cu_seqlens)[0] >= 0,
             std::string(cu_seqlens == &cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k") +
                 ": expected entries from 0 that never decrease, got " + std::to_string((*cu_seqlens)[i]) + " after " +
                 std::to_string((*cu_seqlens)[i - 1]));
    }
  }
  constexpr int64_t kElementBytes = 2;
  const plan::Problem problem = {cu_seqlens_q.data(),
                                 cu_seqlens_k.data(),
                                 (int32_t)cu_seqlens_q.size() - 1,
                                 num_heads,
                                 causal,
                                 (dim_nope + dim_rope + dim_v) * kElementBytes};
  std::vector<Item> items;
  const plan::Config config = config_of(backend, dim_nope + dim_rope, dim_v, shared_bytes);
  for (const plan::WorkItem& i : plan::make_items(config, problem)) {
    items.emplace_back(i.seq, i.q_begin, i.q_rows, i.kv_begin, i.kv_end, i.head_begin, i.head_count, i.num_splits);
  }
  return items;
}

// MLA's head dims: the command line plans for them.
constexpr int32_t kDimQK = 192, kDimV = 128;

int64_t item_cost(int32_t keys, const std::string& backend, int32_t shared_bytes) {
  return plan::item_cost(config_of(backend, kDimQK, kDimV, shared_bytes), keys);
}

// Workers that share an SM: thread blocks, or teams of one.
int32_t workers_per_sm(const std::string& backend, int32_t shared_bytes) {
  if (backend == "hip") return hip::kBlocksPerCu;
  if (backend != "sm80") return 1;
  const sm80::Variant variant = sm80::variant_at(sm80::choose_variant(kDimQK, kDimV, shared_bytes));
  const int32_t fit = (shared_bytes + sm80::kReservedBytes) / (variant.shared_bytes + sm80::kReservedBytes);
  return std::min(variant.ctas_per_sm, fit);
}

py::dict plan_config(const std::string& backend, int32_t shared_bytes) {
  const plan::Config config = config_of(backend, kDimQK, kDimV, shared_bytes);
  const int32_t workers = workers_per_sm(backend, shared_bytes);
  py::dict values;
  values["tile_kv"] = config.tile_kv;
  values["item_overhead"] = config.item_overhead;
  values["short_keys"] = config.short_keys;
  values["workers_per_sm"] = workers;
  values["short_workers_per_sm"] = backend == "sm90" ? sm90::Dims192::ShortTile::kTeams : workers;
  return values;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information, kernel table and host planner of mla_prefill.";
  m.def("build_info", &build_info, "What this build is made of.");
  m.def("kernel_table", &kernel_table,
        "The compiled kernels; for those of the CPU also whether this machine runs them and why not.");
  m.def(
      "cuda_kernels", &cuda_kernels, py::arg("major"), py::arg("minor"), py::arg("forced") = "",
      "(names, reason): the CUDA kernels that this build has for a compute capability, the preferred one first, or why "
      "there is none. `forced` is a value of MLA_PREFILL_FORCE.");
  m.def("plan_items", &plan_items, py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"), py::arg("num_heads"),
        py::arg("causal"), py::arg("dim_nope"), py::arg("dim_rope"), py::arg("dim_v"), py::arg("backend") = "cpu",
        py::arg("shared_bytes") = kHopperSharedBytes,
        "A backend's work list for bfloat16: tuples (seq, q_begin, q_rows, kv_begin, kv_end, head_begin, "
        "head_count, num_splits) in the order in which they start. `shared_bytes`: of a CTA, on the sm80 backend's "
        "device.");
  m.def("item_cost", &item_cost, py::arg("keys"), py::arg("backend") = "cpu",
        py::arg("shared_bytes") = kHopperSharedBytes,
        "Modelled time of one head of an item that reads `keys` keys, in key tiles.");
  m.def("plan_config", &plan_config, py::arg("backend") = "cpu", py::arg("shared_bytes") = kHopperSharedBytes,
        "What a backend asks of the plan for head dims (128, 64, 128): tile_kv, item_overhead (in key tiles) and "
        "short_keys (sequences of up to so many are short; -1: none is), and how many workers an SM has for long and "
        "for short items.");
}

}  // namespace mla_prefill
