// ragged_prefill and plan_prefill on CUDA. In a library of its own, which is loaded only where torch has CUDA.
#include <cuda_runtime_api.h>

#include <array>
#include <limits>

#include "ops/prefill.h"
#include "plan/device.h"
#include "sm90/sm90.h"

// torch's; declared here because its header needs CUDA's only in a CUDA build of torch.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace mla_prefill::ops {
namespace {

void expect_success(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(text(what, ": ", cudaGetErrorString(status)));
}

// Makes a tensor's device the current one of this library's CUDA runtime, for as long as a launch takes.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    expect_success(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ == device) return;
    expect_success(cudaSetDevice(device), "cudaSetDevice");
    moved_ = true;
  }
  ~DeviceGuard() {
    if (moved_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool moved_ = false;
};

struct Device {
  int index;
  int num_sms;
  cudaStream_t stream;
};

// Asks the driver once per device.
int attribute_of(int device, cudaDeviceAttr attribute, std::array<int, 64>& cache) {
  int& value = cache[device % cache.size()];
  if (value == 0) expect_success(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

Device device_of(const Tensor& tensor) {
  static std::array<int, 64> majors{}, minors{}, sms{};
  const int index = (int)tensor.get_device_index();
  const int major = attribute_of(index, cudaDevAttrComputeCapabilityMajor, majors);
  MLA_EXPECT(major == 9, "device", "compute capability 9.0 (the only CUDA kernel of this build is sm90)",
             text(major, ".", attribute_of(index, cudaDevAttrComputeCapabilityMinor, minors)));
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(index, &stream) != 0) fail("the current CUDA stream can't be had from torch");
  return {index, attribute_of(index, cudaDevAttrMultiProcessorCount, sms), static_cast<cudaStream_t>(stream)};
}

Tensor make_plan(const Tensor& like, const plan::Problem& problem, int64_t max_tokens_q, const Device& device) {
  const int64_t capacity = plan::max_items(max_tokens_q, problem.batch, problem.num_heads);
  MLA_EXPECT(capacity <= std::numeric_limits<int32_t>::max(), "max_tokens_q", "a plan of at most 2^31 - 1 items",
             capacity);
  const Tensor buffer =
      torch::stable::new_empty(like, {plan::kHeaderInts + plan::kItemInts * capacity}, ScalarType::Int);
  const Tensor scratch = torch::stable::new_empty(like, {plan::scratch_ints(problem.batch)}, ScalarType::Int);
  expect_success(plan::write_on_device(sm90::plan_config(), problem, static_cast<int32_t*>(buffer.mutable_data_ptr()),
                                       capacity, static_cast<int32_t*>(scratch.mutable_data_ptr()), device.stream),
                 "plan_prefill: the launch failed");
  return buffer;
}

Tensor plan_prefill_cuda(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t num_heads, bool causal,
                         int64_t dim_nope, int64_t dim_rope, int64_t dim_v, ScalarType dtype, int64_t max_tokens_q) {
  const plan::Problem problem =
      check_plan(cu_seqlens_q, cu_seqlens_k, num_heads, causal, dim_nope, dim_rope, dim_v, dtype, max_tokens_q);
  const Device device = device_of(cu_seqlens_q);
  const DeviceGuard guard(device.index);
  return make_plan(cu_seqlens_q, problem, max_tokens_q, device);
}

void run_on_cuda(const PrefillArguments& args) {
  const PrefillParams params = check_prefill(args);
  const Device device = device_of(args.q);
  if (const std::string reason = sm90::supports(params); !reason.empty()) fail(reason);
  if (args.plan) {
    const int64_t needed = plan::kHeaderInts;
    MLA_EXPECT(args.plan->numel() >= needed, "plan", text("at least ", needed, " entries"), args.plan->numel());
  }
  if (params.total_q == 0 || params.batch == 0) return;
  const DeviceGuard guard(device.index);
  const Tensor plan = args.plan ? *args.plan : make_plan(args.cu_seqlens_q, problem_of(params), params.total_q, device);
  const std::string reason =
      sm90::run(params, static_cast<int32_t*>(plan.mutable_data_ptr()), device.num_sms, device.stream);
  if (!reason.empty()) fail(reason);
}

void ragged_prefill_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_pe,
                         const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, double scale, bool causal,
                         std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k,
                         const std::optional<Tensor>& plan, const Tensor& out, const std::optional<Tensor>& lse,
                         bool accumulate, const std::optional<Tensor>& q_descale,
                         const std::optional<Tensor>& k_descale, const std::optional<Tensor>& v_descale) {
  run_on_cuda({q, k, v, k_pe, cu_seqlens_q, cu_seqlens_k, scale, causal, max_seqlen_q, max_seqlen_k, plan, out, lse,
               accumulate, q_descale, k_descale, v_descale});
}

}  // namespace
}  // namespace mla_prefill::ops

STABLE_TORCH_LIBRARY_IMPL(mla_prefill, CUDA, m) {
  m.impl("plan_prefill", TORCH_BOX(&mla_prefill::ops::plan_prefill_cuda));
  m.impl("ragged_prefill", TORCH_BOX(&mla_prefill::ops::ragged_prefill_cuda));
}
