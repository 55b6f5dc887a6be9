#include "ops/arguments.h"

namespace mla_prefill::ops {
namespace {

std::string list_text(const int64_t* values, size_t size) {
  std::ostringstream stream;
  stream << '[';
  for (size_t i = 0; i < size; ++i) stream << (i ? ", " : "") << values[i];
  stream << ']';
  return stream.str();
}

}  // namespace

std::string shape_text(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return "shape " + list_text(sizes.data(), sizes.size());
}

std::string stride_text(const Tensor& tensor) {
  const auto strides = tensor.strides();
  return "strides " + list_text(strides.data(), strides.size());
}

const char* dtype_text(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    default: return torch::headeronly::toString(dtype);
  }
}

std::string device_text(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  const std::string type = tensor.is_cuda() ? "cuda" : "another device type";
  return type + ":" + std::to_string((int)tensor.get_device_index());
}

std::optional<DType> kernel_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float8_e4m3fn: return DType::kFloat8E4M3;
    default: return std::nullopt;
  }
}

void expect_same_device(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
  MLA_EXPECT(tensor.is_cpu() == other.is_cpu() && tensor.is_cuda() == other.is_cuda() &&
                 tensor.get_device_index() == other.get_device_index(),
             name, text(other_name, "'s device, ", device_text(other)), device_text(tensor));
}

void expect_dtype(const char* name, const Tensor& tensor, ScalarType dtype) {
  MLA_EXPECT(tensor.scalar_type() == dtype, name, dtype_text(dtype), dtype_text(tensor.scalar_type()));
}

void expect_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape, const char* meaning) {
  const auto sizes = tensor.sizes();
  bool same = sizes.size() == shape.size();
  for (size_t i = 0; same && i < sizes.size(); ++i) same = sizes[i] == shape.begin()[i];
  MLA_EXPECT(same, name, text("shape ", meaning, " = ", list_text(shape.begin(), shape.size())), shape_text(tensor));
}

void expect_unit_last_stride(const char* name, const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  MLA_EXPECT(tensor.stride(last) == 1 || tensor.size(last) <= 1 || tensor.numel() == 0, name, "a last stride of 1",
             stride_text(tensor));
}

void expect_no_overlap(const char* name, const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  // Enough for what views of a dense buffer give: sorted by stride, each dimension steps over the ones inside it.
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] <= 1) continue;
    int64_t inner = 0;
    for (size_t j = 0; j < sizes.size(); ++j) {
      if (j != i && sizes[j] > 1 && (strides[j] < strides[i] || (strides[j] == strides[i] && j > i))) {
        inner += (sizes[j] - 1) * strides[j];
      }
    }
    MLA_EXPECT(strides[i] > inner || tensor.numel() == 0, name, "an output whose elements don't share memory",
               text(shape_text(tensor), " with ", stride_text(tensor)));
  }
}

void expect_int32_vector(const char* name, const Tensor& tensor, int64_t size, const char* meaning) {
  expect_dtype(name, tensor, ScalarType::Int);
  expect_shape(name, tensor, {size}, meaning);
  MLA_EXPECT(tensor.is_contiguous(), name, "a stride of 1", stride_text(tensor));
}

void expect_cu_seqlens_values(const char* name, const int32_t* cu_seqlens, int64_t batch, int64_t rows,
                              const char* rows_of) {
  MLA_EXPECT(cu_seqlens[0] >= 0, name, "a first entry of 0 or above", cu_seqlens[0]);
  for (int64_t i = 0; i < batch; ++i) {
    MLA_EXPECT(cu_seqlens[i] <= cu_seqlens[i + 1], name, "entries that never decrease",
               text(cu_seqlens[i + 1], " after ", cu_seqlens[i], " at entry ", i + 1));
  }
  MLA_EXPECT(cu_seqlens[batch] <= rows, name, text("a last entry of at most ", rows, ", the rows of ", rows_of),
             cu_seqlens[batch]);
}

Parallel torch_parallel() {
  return {(int)torch::stable::get_num_threads(), [](int64_t n, const std::function<void(int64_t, int64_t)>& body) {
            torch::stable::parallel_for(0, n, 1, body);
          }};
}

}  // namespace mla_prefill::ops
