// at::_grouped_mm, products of groups of rows, with the checks of arguments that CUDA's kernel has. It reads the ends
// of the groups on the device. Rows behind the last end are not written.
#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <vector>

#include "phalanx/testing/sim_device/torch/kernel_tensors.h"
#include "phalanx/testing/sim_device/torch/native_operators.h"

namespace phalanx::sim_device {
namespace {

using at::Tensor;

/// Of the last two dimensions one is contiguous, and the other's stride is a multiple of 16 bytes.
void check_strides(const Tensor& t) {
  const std::int64_t rows = t.stride(-2), columns = t.stride(-1), multiple = 16 / t.itemsize();
  const bool fits = (columns == 1 && rows % multiple == 0 && rows >= t.size(-1)) ||
                    (rows == 1 && columns % multiple == 0 && columns >= t.size(-2));
  TORCH_CHECK(fits && reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % 16 == 0, "_grouped_mm: sizes ", t.sizes(),
              ", strides ", t.strides(), ": expected rows or columns at multiples of 16 bytes");
}

void check(const Tensor& a, const Tensor& b, const std::optional<Tensor>& ends, const std::optional<Tensor>& bias,
           std::optional<at::ScalarType> out_dtype) {
  TORCH_CHECK(a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16 && !bias &&
                  (!out_dtype || *out_dtype == at::kBFloat16),
              "_grouped_mm: expected bfloat16 without a bias, found ", a.scalar_type(), " and ", b.scalar_type());
  TORCH_CHECK(a.dim() == 2 && (b.dim() == 2 || b.dim() == 3),
              "_grouped_mm: this device has [rows, k] x [groups, k, n] ", "and [m, rows] x [rows, n] alone");
  TORCH_CHECK(a.size(1) == b.size(-2), "_grouped_mm: sizes ", a.sizes(), " and ", b.sizes(), " cannot be multiplied");
  TORCH_CHECK(ends && ends->scalar_type() == at::kInt && ends->dim() == 1 && ends->is_contiguous() &&
                  is_on_sim(*ends) && (b.dim() == 2 || ends->size(0) == b.size(0)),
              "_grouped_mm: expected the ends of the groups, contiguous int32 on the device");
  check_strides(a);
  check_strides(b);
}

/// On the host. `by_rows`: groups are rows of a; else columns of a and rows of b.
void multiply(const Tensor& a, const Tensor& b, const Tensor& ends, const Tensor& out, bool by_rows) {
  std::int64_t first = 0;
  const std::int64_t rows = by_rows ? a.size(0) : a.size(1);
  for (std::int64_t group = 0; group < ends.size(0); ++group) {
    const std::int64_t end = ends.const_data_ptr<std::int32_t>()[group];
    TORCH_CHECK(first <= end && end <= rows, "_grouped_mm: group ", group, " ends at row ", end, " of ", rows,
                " and begins at ", first);
    if (by_rows) {
      Tensor part = out.narrow(0, first, end - first);
      at::mm_out(part, a.narrow(0, first, end - first), b.select(0, group));
    } else {
      Tensor part = out.select(0, group);
      first == end ? part.zero_() : at::mm_out(part, a.narrow(1, first, end - first), b.narrow(0, first, end - first));
    }
    first = end;
  }
  // CUDA leaves what was there.
  if (by_rows) out.narrow(0, first, rows - first).fill_(std::numeric_limits<double>::quiet_NaN());
}

Tensor grouped_mm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& ends,
                  const std::optional<Tensor>& bias, std::optional<at::ScalarType> out_dtype) {
  check(a, b, ends, bias, out_dtype);
  const bool by_rows = b.dim() == 3;
  const std::int64_t m = a.size(0), n = b.size(-1);
  const Tensor out = by_rows ? empty_on_sim({m, n}, {n, 1}, a.scalar_type())
                             : empty_on_sim({ends->size(0), m, n}, {m * n, n, 1}, a.scalar_type());
  std::vector<Access> accesses = accesses_of(a, out);
  for (const Tensor* read : {&b, &*ends}) add_accesses(accesses, *read, false);
  launch(out.device().index(), "aten::_grouped_mm", std::move(accesses),
         [a = kernel_view(a), b = kernel_view(b), ends = kernel_view(*ends), out = kernel_view(out), by_rows] {
           multiply(a, b, ends, out, by_rows);
         });
  return out;
}

}  // namespace

void register_grouped_mm(torch::Library& library) { library.impl("_grouped_mm", &grouped_mm); }

}  // namespace phalanx::sim_device
