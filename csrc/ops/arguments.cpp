#include "ops/arguments.h"

#include <algorithm>

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

Argument::Argument(const char* argument_name, const Tensor& argument) : name(argument_name), tensor(argument) {
  const auto all_sizes = tensor.sizes(), all_strides = tensor.strides();
  dim = (int64_t)all_sizes.size();
  sizes = all_sizes.data();
  strides = all_strides.data();
  dtype = tensor.scalar_type();
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
  device_index = tensor.get_device_index();
}

int64_t Argument::numel() const {
  int64_t result = 1;
  for (int64_t i = 0; i < dim; ++i) result *= sizes[i];
  return result;
}

std::string shape_text(const Argument& argument) { return "shape " + list_text(argument.sizes, argument.dim); }

std::string stride_text(const Argument& argument) { return "strides " + list_text(argument.strides, argument.dim); }

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

std::string device_text(const Argument& argument) {
  if (argument.device_type == aoti_torch_device_type_cpu()) return "cpu";
  const bool is_cuda = argument.device_type == aoti_torch_device_type_cuda();
  return (is_cuda ? "cuda:" : "another device type:") + std::to_string(argument.device_index);
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

void expect_same_device(const Argument& argument, const Argument& other) {
  MLA_EXPECT(argument.device_type == other.device_type && argument.device_index == other.device_index, argument.name,
             text(other.name, "'s device, ", device_text(other)), device_text(argument));
}

void expect_dtype(const Argument& argument, ScalarType dtype) {
  MLA_EXPECT(argument.dtype == dtype, argument.name, dtype_text(dtype), dtype_text(argument.dtype));
}

void expect_shape(const Argument& argument, std::initializer_list<int64_t> shape, const char* meaning) {
  MLA_EXPECT(std::equal(argument.sizes, argument.sizes + argument.dim, shape.begin(), shape.end()), argument.name,
             text("shape ", meaning, " = ", list_text(shape.begin(), shape.size())), shape_text(argument));
}

void expect_unit_last_stride(const Argument& argument) {
  const int64_t last = argument.dim - 1;
  MLA_EXPECT(argument.stride(last) == 1 || argument.size(last) <= 1 || argument.numel() == 0, argument.name,
             "a last stride of 1", stride_text(argument));
}

void expect_no_overlap(const Argument& argument) {
  // Enough for what views of a dense buffer give: sorted by stride, each dimension steps over the ones inside it.
  const int64_t *const sizes = argument.sizes, *const strides = argument.strides;
  for (int64_t i = 0; i < argument.dim; ++i) {
    if (sizes[i] <= 1) continue;
    int64_t inner = 0;
    for (int64_t j = 0; j < argument.dim; ++j) {
      if (j != i && sizes[j] > 1 && (strides[j] < strides[i] || (strides[j] == strides[i] && j > i))) {
        inner += (sizes[j] - 1) * strides[j];
      }
    }
    MLA_EXPECT(strides[i] > inner || argument.numel() == 0, argument.name,
               "an output whose elements don't share memory",
               text(shape_text(argument), " with ", stride_text(argument)));
  }
}

void expect_int32_vector(const Argument& argument, int64_t size, const char* meaning) {
  expect_dtype(argument, ScalarType::Int);
  expect_shape(argument, {size}, meaning);
  MLA_EXPECT(argument.is_dense_vector(), argument.name, "a stride of 1", stride_text(argument));
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
