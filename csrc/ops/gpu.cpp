// The ops on GPUs, one source for CUDA and ROCm: torch has one dispatch key for both. Each build is a library of its
// own, loaded only where torch has CUDA or ROCm.
#include "gpu.h"

#include <array>
#include <limits>

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
#include "sm90/sm90.h"
#endif

// torch's, under this name on ROCm too; declared here because its header needs CUDA's only in a CUDA build of torch.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace mla_prefill::ops {
namespace {

#if defined(__HIP_PLATFORM_AMD__)
namespace backend = hip;
#else
namespace backend = sm90;
#endif

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

  int num_multiprocessors() const {
    static std::array<int, 64> cache{};
    return attribute_of(index_, cudaDevAttrMultiProcessorCount, cache);
  }

 private:
  int index_;
  int previous_ = 0;
};

// All kernels of the CUDA build are machine code for one architecture.
void expect_supported_device(const Tensor& tensor) {
#if !defined(__HIP_PLATFORM_AMD__)
  static std::array<int, 64> majors{}, minors{};
  const int index = (int)tensor.get_device_index();
  const int major = attribute_of(index, cudaDevAttrComputeCapabilityMajor, majors);
  MLA_EXPECT(major == 9, "device", "compute capability 9.0 (the only CUDA kernels of this build are for it)",
             text(major, ".", attribute_of(index, cudaDevAttrComputeCapabilityMinor, minors)));
#else
  (void)tensor;
#endif
}

Tensor make_plan(const Tensor& like, const plan::Problem& problem, int64_t max_tokens_q, const Device& device) {
  const int64_t capacity = plan::max_items(max_tokens_q, problem.batch, problem.num_heads);
  MLA_EXPECT(capacity <= std::numeric_limits<int32_t>::max(), "max_tokens_q", "a plan of at most 2^31 - 1 items",
             capacity);
  const Tensor buffer =
      torch::stable::new_empty(like, {plan::kItemsBegin + plan::kItemInts * capacity}, ScalarType::Int);
  const Tensor scratch = torch::stable::new_empty(like, {plan::scratch_ints(problem.batch)}, ScalarType::Int);
  expect_success(
      plan::write_on_device(backend::plan_config(), problem, static_cast<int32_t*>(buffer.mutable_data_ptr()), capacity,
                            static_cast<int32_t*>(scratch.mutable_data_ptr()), device.stream()),
      "plan_prefill: the launch failed");
  return buffer;
}

Tensor plan_prefill_gpu(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t num_heads, bool causal,
                        int64_t dim_nope, int64_t dim_rope, int64_t dim_v, ScalarType dtype, int64_t max_tokens_q) {
  const plan::Problem problem =
      check_plan(cu_seqlens_q, cu_seqlens_k, num_heads, causal, dim_nope, dim_rope, dim_v, dtype, max_tokens_q);
  expect_supported_device(cu_seqlens_q);
  return make_plan(cu_seqlens_q, problem, max_tokens_q, Device(cu_seqlens_q));
}

void run_on_gpu(const PrefillArguments& args) {
  PrefillParams params = check_prefill(args);
  expect_supported_device(args.q);
  if (const std::string reason = backend::supports(params); !reason.empty()) fail(reason);
  if (args.plan) {
    MLA_EXPECT(args.plan->numel() >= plan::kItemsBegin, "plan", text("at least ", plan::kItemsBegin, " entries"),
               args.plan->numel());
  }
  if (params.total_q == 0 || params.batch == 0) return;
  const Device device(args.q);
  const Tensor plan = args.plan ? *args.plan : make_plan(args.cu_seqlens_q, problem_of(params), params.total_q, device);
  std::optional<Tensor> scratch;
  if (const int64_t bytes = backend::scratch_bytes(params); bytes > 0) {
    scratch = torch::stable::new_empty(args.q, {bytes}, ScalarType::Byte);
    params.scratch = scratch->mutable_data_ptr();
  }
  const std::string reason = backend::run(params, static_cast<int32_t*>(plan.mutable_data_ptr()),
                                          device.num_multiprocessors(), device.stream());
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
  expect_supported_device(out_a);
  const Device device(out_a);
  expect_success(context::merge_on_device(params, device.stream()), "merge_states: the launch failed");
}

void gather_latent_gpu(const Tensor& cache, const Tensor& block_table, const Tensor& cu_seqlens, const Tensor& starts,
                       const Tensor& out, const std::optional<Tensor>& k_scale, const std::string& layout) {
  const GatherParams params = check_gather(cache, block_table, cu_seqlens, starts, out, k_scale, layout);
  expect_supported_device(cache);
  const Device device(cache);
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
