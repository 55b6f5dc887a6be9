// The ops on GPUs, one source for CUDA and ROCm: torch has one dispatch key for both. Each build is a library of its
// own, loaded only where torch has CUDA or ROCm.
#include "gpu.h"

#include <array>
#include <limits>
#include <vector>

#include "context/device.h"
#include "ops/context.h"
#include "ops/prefill.h"
#include "plan/device.h"
#if defined(__HIP_PLATFORM_AMD__)
#include "hip/hip.h"

inline const char* cudaGetErrorString(cudaError_t status) { return hipGetErrorString(status); }
inline cudaError_t cudaGetDevice(int* device) { return hipGetDevice(device); }
inline cudaError_t cudaSetDevice(int device) { return hipSetDevice(device); }

using cudaDeviceAttr = hipDeviceAttribute_t;
constexpr cudaDeviceAttr cudaDevAttrMultiProcessorCount = hipDeviceAttributeMultiprocessorCount;
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return hipDeviceGetAttribute(value, attribute, device);
}

#else
#include "cuda_kernels.h"
#if defined(MLA_PREFILL_WITH_SM90)
#include "sm90/sm90.h"
#endif
#if defined(MLA_PREFILL_WITH_SM80)
#include "sm80/sm80.h"
#endif
#endif

// torch's, under this name on ROCm too; declared here because its header needs CUDA's only in a CUDA build of torch.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace mla_prefill::ops {
namespace {

void expect_success(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(text(what, ": ", cudaGetErrorString(status)));
}

// Asks the driver once per device.
int attribute_of(int device, cudaDeviceAttr attribute, std::array<int, 64>& cache) {
  int& value = cache[device % cache.size()];
  if (value == 0) expect_success(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// A tensor's device: the current one of this library's runtime for as long as this lives.
class Device {
 public:
  explicit Device(const Tensor& tensor) : index_((int)tensor.get_device_index()) {
    expect_success(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != index_) expect_success(cudaSetDevice(index_), "cudaSetDevice");
  }
  ~Device() {
    if (previous_ != index_) (void)cudaSetDevice(previous_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  cudaStream_t stream() const {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(index_, &stream) != 0) fail("the current stream can't be had from torch");
    return static_cast<cudaStream_t>(stream);
  }

  int index() const { return index_; }

  int num_multiprocessors() const {
    static std::array<int, 64> cache{};
    return attribute_of(index_, cudaDevAttrMultiProcessorCount, cache);
  }

#if !defined(__HIP_PLATFORM_AMD__)
  int major() const {
    static std::array<int, 64> cache{};
    return attribute_of(index_, cudaDevAttrComputeCapabilityMajor, cache);
  }

  int minor() const {  // 0 is asked for again each time
    static std::array<int, 64> cache{};
    return attribute_of(index_, cudaDevAttrComputeCapabilityMinor, cache);
  }

  // The most that a CTA may have.
  int shared_bytes() const {
    static std::array<int, 64> cache{};
    return attribute_of(index_, cudaDevAttrMaxSharedMemoryPerBlockOptin, cache);
  }
#endif

 private:
  int index_;
  int previous_ = 0;
};

// ---- Kernels --------------------------------------------------------------------------------------------------------

// One of the build's ragged_prefill kernels.
struct GpuKernel {
  bool (*takes_dims)(int32_t dim_qk, int32_t dim_v);
  plan::Config (*plan_config)(int32_t dim_qk, int32_t dim_v, const Device& device);
  std::string (*supports)(const PrefillParams& params);
  int64_t (*scratch_bytes)(const PrefillParams& params, const Device& device);
  std::string (*run)(const PrefillParams& params, int32_t* plan, const Device& device);
};

#if defined(__HIP_PLATFORM_AMD__)

void expect_portable_code(const Device&) {}

// In the order in which to try them; never empty.
const std::vector<GpuKernel>& kernels_for(const Device&) {
  static const std::vector<GpuKernel> kernels = {
      {[](int32_t dim_qk, int32_t dim_v) { return dim_qk == hip::kHeadDimQK && dim_v == hip::kHeadDimV; },
       [](int32_t, int32_t, const Device&) { return hip::plan_config(); }, hip::supports,
       [](const PrefillParams&, const Device&) -> int64_t { return 0; },
       [](const PrefillParams& params, int32_t* plan, const Device& device) {
         return hip::run(params, plan, device.num_multiprocessors(), device.stream());
       }}};
  return kernels;
}

#else

// Of plan_prefill, merge_states and gather_latent.
void expect_portable_code(const Device& device) {
  static std::array<bool, 64> known{};
  if (known[device.index() % known.size()]) return;
  MLA_EXPECT(cuda::has_code(MLA_PREFILL_CUDA_ARCHS, device.major(), device.minor()), "device",
             "compute capability " + cuda::capabilities_of(MLA_PREFILL_CUDA_ARCHS),
             text(device.major(), ".", device.minor()));
  known[device.index() % known.size()] = true;
}

#if defined(MLA_PREFILL_WITH_SM90)
const GpuKernel kSm90 = {
    sm90::takes_dims, [](int32_t dim_qk, int32_t dim_v, const Device&) { return sm90::plan_config(dim_qk, dim_v); },
    sm90::supports, [](const PrefillParams& params, const Device&) { return sm90::scratch_bytes(params); },
    [](const PrefillParams& params, int32_t* plan, const Device& device) {
      return sm90::run(params, plan, device.num_multiprocessors(), device.stream());
    }};
#endif

#if defined(MLA_PREFILL_WITH_SM80)
const GpuKernel kSm80 = {[](int32_t dim_qk, int32_t dim_v) { return sm80::check_dims(dim_qk, dim_qk, dim_v).empty(); },
                         [](int32_t dim_qk, int32_t dim_v, const Device& device) {
                           return sm80::plan_config(dim_qk, dim_v, device.shared_bytes());
                         },
                         sm80::supports,
                         [](const PrefillParams& params, const Device& device) {
                           return sm80::scratch_bytes(params, device.shared_bytes());
                         },
                         [](const PrefillParams& params, int32_t* plan, const Device& device) {
                           return sm80::run(params, plan, device.num_multiprocessors(), device.shared_bytes(),
                                            device.stream());
                         }};
#endif

std::vector<GpuKernel> find_kernels(const Device& device, const std::string& forced) {
  const cuda::Kernels found =
      cuda::kernels_for(MLA_PREFILL_BACKENDS, MLA_PREFILL_CUDA_ARCHS, forced, device.major(), device.minor());
  if (found.kernels.empty()) fail(found.reason);
  std::vector<GpuKernel> kernels;
  for (const cuda::Kernel kernel : found.kernels) {
#if defined(MLA_PREFILL_WITH_SM90)
    if (kernel == cuda::Kernel::kSm90) kernels.push_back(kSm90);
#endif
#if defined(MLA_PREFILL_WITH_SM80)
    if (kernel == cuda::Kernel::kSm80) kernels.push_back(kSm80);
#endif
  }
  return kernels;
}

// In the order in which to try them; never empty. MLA_PREFILL_FORCE is read at each call.
const std::vector<GpuKernel>& kernels_for(const Device& device) {
  // Found once per thread and device: the rules work on text.
  static thread_local std::array<std::vector<GpuKernel>, 64> known;
  static thread_local std::vector<GpuKernel> forced_kernels;
  if (const std::string forced = cuda::forced_kernel(); !forced.empty()) {
    return forced_kernels = find_kernels(device, forced);
  }
  std::vector<GpuKernel>& kernels = known[device.index() % known.size()];
  if (kernels.empty()) kernels = find_kernels(device, "");
  return kernels;
}

#endif

// ---- The ops --------------------------------------------------------------------------------------------------------

// A vector on the device, past the dispatcher, which would take the host longer than the allocation.
Tensor new_vector(int64_t size, int32_t dtype, const Device& device) {
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &size, &stride, dtype, aoti_torch_device_type_cuda(), device.index(), &handle));
  return Tensor(handle);
}

Tensor make_plan(const plan::Config& config, const plan::Problem& problem, int64_t max_tokens_q, const Device& device) {
  const int64_t capacity = plan::max_items(max_tokens_q, problem.batch, problem.num_heads);
  MLA_EXPECT(capacity <= std::numeric_limits<int32_t>::max(), "max_tokens_q", "a plan of at most 2^31 - 1 items",
             capacity);
  const int32_t dtype = aoti_torch_dtype_int32();
  const Tensor buffer = new_vector(plan::kItemsBegin + plan::kItemInts * capacity, dtype, device);
  const Tensor scratch = new_vector(plan::scratch_ints(problem.batch), dtype, device);
  expect_success(plan::write_on_device(config, problem, static_cast<int32_t*>(buffer.mutable_data_ptr()), capacity,
                                       static_cast<int32_t*>(scratch.mutable_data_ptr()), device.stream()),
                 "plan_prefill: the launch failed");
  return buffer;
}

Tensor plan_prefill_gpu(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t num_heads, bool causal,
                        int64_t dim_nope, int64_t dim_rope, int64_t dim_v, ScalarType dtype, int64_t max_tokens_q) {
  const plan::Problem problem =
      check_plan(cu_seqlens_q, cu_seqlens_k, num_heads, causal, dim_nope, dim_rope, dim_v, dtype, max_tokens_q);
  const Device device(cu_seqlens_q);
  expect_portable_code(device);
  const int64_t dim_qk = dim_nope + dim_rope;
  const auto fits = [](int64_t dim) { return dim <= std::numeric_limits<int32_t>::max(); };
  MLA_EXPECT(fits(dim_qk) && fits(dim_v), "head_dims", "dims below 2^31",
             text("(", dim_nope, ", ", dim_rope, ", ", dim_v, ")"));
  // For dims that no kernel takes, the last one's: ragged_prefill will say so.
  const std::vector<GpuKernel>& kernels = kernels_for(device);
  const GpuKernel* chosen = &kernels.back();
  for (const GpuKernel& kernel : kernels) {
    if (kernel.takes_dims((int32_t)dim_qk, (int32_t)dim_v)) {
      chosen = &kernel;
      break;
    }
  }
  return make_plan(chosen->plan_config((int32_t)dim_qk, (int32_t)dim_v, device), problem, max_tokens_q, device);
}

void run_on_gpu(const PrefillArguments& args) {
  PrefillParams params = check_prefill(args);
  const Device device(args.q);
  // The first kernel that takes the call; a plan may be another one's, any of them walks over it.
  const GpuKernel* chosen = nullptr;
  std::string reason;
  for (const GpuKernel& kernel : kernels_for(device)) {
    reason = kernel.supports(params);
    if (reason.empty()) {
      chosen = &kernel;
      break;
    }
  }
  if (!chosen) fail(reason);
  if (args.plan) {
    MLA_EXPECT(args.plan->numel() >= plan::kItemsBegin, "plan", text("at least ", plan::kItemsBegin, " entries"),
               args.plan->numel());
  }
  if (params.total_q == 0 || params.batch == 0) return;
  const auto new_plan = [&] {
    const plan::Config config = chosen->plan_config(params.dim_qk, params.dim_v, device);
    return make_plan(config, problem_of(params), params.total_q, device);
  };
  const Tensor plan = args.plan ? *args.plan : new_plan();
  std::optional<Tensor> scratch;
  if (const int64_t bytes = chosen->scratch_bytes(params, device); bytes > 0) {
    scratch = new_vector(bytes, aoti_torch_dtype_uint8(), device);
    params.scratch = scratch->mutable_data_ptr();
  }
  reason = chosen->run(params, static_cast<int32_t*>(plan.mutable_data_ptr()), device);
  if (!reason.empty()) fail(reason);
}

void ragged_prefill_gpu(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_pe,
                        const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, double scale, bool causal,
                        std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k,
                        const std::optional<Tensor>& plan, const Tensor& out, const std::optional<Tensor>& lse,
                        bool accumulate, const std::optional<Tensor>& q_descale, const std::optional<Tensor>& k_descale,
                        const std::optional<Tensor>& v_descale) {
  run_on_gpu({q, k, v, k_pe, cu_seqlens_q, cu_seqlens_k, scale, causal, max_seqlen_q, max_seqlen_k, plan, out, lse,
              accumulate, q_descale, k_descale, v_descale});
}

void merge_states_gpu(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                      const Tensor& out, const Tensor& lse) {
  const MergeParams params = check_merge(out_a, lse_a, out_b, lse_b, out, lse);
  const Device device(out_a);
  expect_portable_code(device);
  expect_success(context::merge_on_device(params, device.stream()), "merge_states: the launch failed");
}

void gather_latent_gpu(const Tensor& cache, const Tensor& block_table, const Tensor& cu_seqlens, const Tensor& starts,
                       const Tensor& out, const std::optional<Tensor>& k_scale, const std::string& layout) {
  const GatherParams params = check_gather(cache, block_table, cu_seqlens, starts, out, k_scale, layout);
  const Device device(cache);
  expect_portable_code(device);
  expect_success(context::gather_on_device(params, device.stream()), "gather_latent: the launch failed");
}

}  // namespace
}  // namespace mla_prefill::ops

STABLE_TORCH_LIBRARY_IMPL(mla_prefill, CUDA, m) {
  m.impl("plan_prefill", TORCH_BOX(&mla_prefill::ops::plan_prefill_gpu));
  m.impl("ragged_prefill", TORCH_BOX(&mla_prefill::ops::ragged_prefill_gpu));
  m.impl("merge_states", TORCH_BOX(&mla_prefill::ops::merge_states_gpu));
  m.impl("gather_latent", TORCH_BOX(&mla_prefill::ops::gather_latent_gpu));
}
