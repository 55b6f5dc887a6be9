// Checks of op arguments. Every message names the argument, what was expected and what came; the text is built only
// when a check fails, since these run on the host path of each call.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "parallel.h"
#include "params.h"

namespace mla_prefill::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// MLA_EXPECT(ok, "q", text("a 3-D tensor"), shape_text(q))
#define MLA_EXPECT(condition, argument, expected, got)                                                      \
  do {                                                                                                      \
    if (!(condition))                                                                                       \
      ::mla_prefill::ops::fail(::mla_prefill::ops::text(argument, ": expected ", expected, ", got ", got)); \
  } while (0)

// A tensor argument. Torch is asked once for what the checks and the kernels want to know of it: each question goes
// through its C ABI.
struct Argument {
  Argument(const char* name, const Tensor& tensor);

  const char* name;
  const Tensor& tensor;
  int64_t dim;
  const int64_t *sizes, *strides;
  ScalarType dtype;
  int32_t device_type, device_index;

  int64_t size(int64_t i) const { return sizes[i]; }
  int64_t stride(int64_t i) const { return strides[i]; }
  int64_t numel() const;
  bool is_dense_vector() const { return dim == 1 && (size(0) <= 1 || stride(0) == 1); }
};

std::string shape_text(const Argument& argument);
std::string stride_text(const Argument& argument);
const char* dtype_text(ScalarType dtype);
std::string device_text(const Argument& argument);

// The kernels' dtype, or nullopt for one they don't know.
std::optional<DType> kernel_dtype(ScalarType dtype);

void expect_same_device(const Argument& argument, const Argument& other);
void expect_dtype(const Argument& argument, ScalarType dtype);
void expect_shape(const Argument& argument, std::initializer_list<int64_t> shape, const char* meaning);
// The last dimension is read as a run of elements: its stride must be 1.
void expect_unit_last_stride(const Argument& argument);
// An output: no two elements share memory.
void expect_no_overlap(const Argument& argument);
// A dense int32 vector of `size` entries.
void expect_int32_vector(const Argument& argument, int64_t size, const char* meaning);
// On the CPU the values can be read: ascending, from 0 or above, within the tensor of `rows` rows.
void expect_cu_seqlens_values(const char* name, const int32_t* cu_seqlens, int64_t batch, int64_t rows,
                              const char* rows_of);

template <typename T>
const T* const_data(const Argument& argument) {
  return static_cast<const T*>(argument.tensor.const_data_ptr());
}
template <typename T>
T* mutable_data(const Argument& argument) {
  return static_cast<T*>(argument.tensor.mutable_data_ptr());
}

inline ConstRows const_rows(const Argument& argument) {
  return {const_data<void>(argument), argument.stride(0), argument.stride(1)};
}
inline Rows rows(const Argument& argument) {
  return {mutable_data<void>(argument), argument.stride(0), argument.stride(1)};
}

Parallel torch_parallel();

}  // namespace mla_prefill::ops
