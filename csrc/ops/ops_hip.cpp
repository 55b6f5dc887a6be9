// The ops on AMD GPUs, under the dispatch key that torch has for both CUDA and ROCm. In a library of its own, which is
// loaded only where torch has ROCm.
#include <hip/hip_runtime.h>

#include <array>
#include <limits>

#include "context/device.h"
#include "hip/hip.h"
#include "ops/context.h"
#include "ops/prefill.h"
#include "plan/device.h"

// torch's, which keeps its name on ROCm; declared here because its header needs CUDA's.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace mla_prefill::ops {
namespace {

void expect_success(hipError_t status, const char* what) {
  if (status != hipSuccess) fail(text(what, ": ", hipGetErrorString(status)));
}

// A tensor's device: the current one for as long as this lives.
class Device {
 public:
  explicit Device(const Tensor& tensor) : index_((int)tensor.get_device_index()) {
    expect_success(hipGetDevice(&previous_), "hipGetDevice");
    if (previous_ != index_) expect_success(hipSetDevice(index_), "hipSetDevice");
  }
  ~Device() {
    if (previous_ != index_) (void)hipSetDevice(previous_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  hipStream_t stream() const {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(index_, &stream) != 0) fail("the current stream can't be had from torch");
    return static_cast<hipStream_t>(stream);
  }

  // Asks the driver once per device.
  int num_cus() const {
    static std::array<int, 64> cache{};
    int& value = cache[index_ % cache.size()];
    if (value == 0) {
      expect_success(hipDeviceGetAttribute(&value, hipDeviceAttributeMultiprocessorCount, index_),
                     "hipDeviceGetAttribute");
    }
    return value;
  }

 private:
  int index_;
  int previous_ = 0;
};

Tensor make_plan(const Tensor& like, const plan::Problem& problem, int64_t max_tokens_q, const Device& device) {
  const int64_t capacity = plan::max_items(max_tokens_q, problem.batch, problem.num_heads);
  MLA_EXPECT(capacity <= std::numeric_limits<int32_t>::max(), "max_tokens_q", "a plan of at most 2^31 - 1 items",
             capacity);
  const Tensor buffer =
      torch::stable::new_empty(like, {plan::kHeaderInts + plan::kItemInts * capacity}, ScalarType::Int);
  const Tensor scratch = torch::stable::new_empty(like, {plan::scratch_ints(problem.batch)}, ScalarType::Int);
  expect_success(plan::write_on_device(hip::plan_config(), problem, static_cast<int32_t*>(buffer.mutable_data_ptr()),
                                       capacity, static_cast<int32_t*>(scratch.mutable_data_ptr()), device.stream()),
                 "plan_prefill: the launch failed");
  return buffer;
}

Tensor plan_prefill_hip(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t num_heads, bool causal,
                        int64_t dim_nope, int64_t dim_rope, int64_t dim_v, ScalarType dtype, int64_t max_tokens_q) {
  const plan::Problem problem =
      check_plan(cu_seqlens_q, cu_seqlens_k, num_heads, causal, dim_nope, dim_rope, dim_v, dtype, max_tokens_q);
  return make_plan(cu_seqlens_q, problem, max_tokens_q, Device(cu_seqlens_q));
}

void run_on_hip(const PrefillArguments& args) {
  const PrefillParams params = check_prefill(args);
  if (const std::string reason = hip::supports(params); !reason.empty()) fail(reason);
  if (args.plan) {
    MLA_EXPECT(args.plan->numel() >= plan::kHeaderInts, "plan", text("at least ", plan::kHeaderInts, " entries"),
               args.plan->numel());
  }
  if (params.total_q == 0 || params.batch == 0) return;
  const Device device(args.q);
  const Tensor plan = args.plan ? *args.plan : make_plan(args.cu_seqlens_q, problem_of(params), params.total_q, device);
  const std::string reason =
      hip::run(params, static_cast<int32_t*>(plan.mutable_data_ptr()), device.num_cus(), device.stream());
  if (!reason.empty()) fail(reason);
}

void ragged_prefill_hip(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_pe,
                        const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, double scale, bool causal,
                        std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k,
                        const std::optional<Tensor>& plan, const Tensor& out, const std::optional<Tensor>& lse,
                        bool accumulate, const std::optional<Tensor>& q_descale, const std::optional<Tensor>& k_descale,
                        const std::optional<Tensor>& v_descale) {
  run_on_hip({q, k, v, k_pe, cu_seqlens_q, cu_seqlens_k, scale, causal, max_seqlen_q, max_seqlen_k, plan, out, lse,
              accumulate, q_descale, k_descale, v_descale});
}

void merge_states_hip(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                      const Tensor& out, const Tensor& lse) {
  const MergeParams params = check_merge(out_a, lse_a, out_b, lse_b, out, lse);
  const Device device(out_a);
  expect_success(context::merge_on_device(params, device.stream()), "merge_states: the launch failed");
}

void gather_latent_hip(const Tensor& cache, const Tensor& block_table, const Tensor& cu_seqlens, const Tensor& starts,
                       const Tensor& out, const std::optional<Tensor>& k_scale, const std::string& layout) {
  const GatherParams params = check_gather(cache, block_table, cu_seqlens, starts, out, k_scale, layout);
  const Device device(cache);
  expect_success(context::gather_on_device(params, device.stream()), "gather_latent: the launch failed");
}

}  // namespace
}  // namespace mla_prefill::ops

STABLE_TORCH_LIBRARY_IMPL(mla_prefill, CUDA, m) {
  m.impl("plan_prefill", TORCH_BOX(&mla_prefill::ops::plan_prefill_hip));
  m.impl("ragged_prefill", TORCH_BOX(&mla_prefill::ops::ragged_prefill_hip));
  m.impl("merge_states", TORCH_BOX(&mla_prefill::ops::merge_states_hip));
  m.impl("gather_latent", TORCH_BOX(&mla_prefill::ops::gather_latent_hip));
}
