#include "phalanx/checkpoint/tensor_bytes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

using safetensors::Dtype;

constexpr std::array<std::pair<Dtype, at::ScalarType>, 16> kScalarTypes{{{Dtype::boolean, at::kBool},
                                                                         {Dtype::u8, at::kByte},
                                                                         {Dtype::i8, at::kChar},
                                                                         {Dtype::f8_e4m3, at::kFloat8_e4m3fn},
                                                                         {Dtype::f8_e5m2, at::kFloat8_e5m2},
                                                                         {Dtype::u16, at::kUInt16},
                                                                         {Dtype::i16, at::kShort},
                                                                         {Dtype::f16, at::kHalf},
                                                                         {Dtype::bf16, at::kBFloat16},
                                                                         {Dtype::u32, at::kUInt32},
                                                                         {Dtype::i32, at::kInt},
                                                                         {Dtype::f32, at::kFloat},
                                                                         {Dtype::u64, at::kUInt64},
                                                                         {Dtype::i64, at::kLong},
                                                                         {Dtype::f64, at::kDouble},
                                                                         {Dtype::c64, at::kComplexFloat}}};
/// Bounds the host memory that saving a tensor of another device, or a strided one, needs.
constexpr std::int64_t kStagingBytes = 64 << 20;

std::span<const std::byte> bytes_of(const at::Tensor& contiguous_host_tensor) {
  return {static_cast<const std::byte*>(contiguous_host_tensor.const_data_ptr()), contiguous_host_tensor.nbytes()};
}

}  // namespace

at::ScalarType scalar_type_of(Dtype dtype) {
  return std::ranges::find(kScalarTypes, dtype, &std::pair<Dtype, at::ScalarType>::first)->second;
}

safetensors::TensorInfo describe_tensor(const NamedTensor& named) {
  const auto fail = [&](const std::string& reason) {
    throw CheckpointError(fmt::format("tensor {} {}", safetensors::quote_name(named.name), reason));
  };
  const at::Tensor& tensor = named.tensor;
  if (!tensor.defined()) fail("is undefined");
  if (tensor.layout() != at::kStrided) fail("is sparse; only dense tensors are checkpointed");
  const auto found = std::ranges::find(kScalarTypes, tensor.scalar_type(), &std::pair<Dtype, at::ScalarType>::second);
  if (found == kScalarTypes.end())
    fail(fmt::format("has the type {}, which safetensors cannot hold", at::toString(tensor.scalar_type())));
  if (tensor.numel() > 0 && (tensor.is_meta() || tensor.const_data_ptr() == nullptr)) fail("has no storage at present");
  return {.name = named.name, .dtype = found->first, .shape = tensor.sizes().vec()};
}

void read_tensor_rows(const at::Tensor& tensor, std::int64_t row_begin, std::int64_t row_end,
                      const std::function<void(std::span<const std::byte>)>& sink) {
  if (tensor.numel() == 0 || row_begin == row_end) return;
  const at::NoGradGuard no_grad;
  if (tensor.dim() == 0) return sink(bytes_of(tensor.detach().cpu().contiguous()));
  const bool direct = tensor.is_cpu() && tensor.is_contiguous();
  const auto row_bytes = static_cast<std::int64_t>(tensor.nbytes()) / tensor.size(0);
  const std::int64_t chunk = direct ? row_end - row_begin : std::max<std::int64_t>(1, kStagingBytes / row_bytes);
  for (std::int64_t row = row_begin; row < row_end; row += chunk) {
    const auto rows = tensor.detach().narrow(0, row, std::min(chunk, row_end - row));
    sink(bytes_of(direct ? rows : rows.contiguous().cpu()));
  }
}

void write_tensor_box(at::Tensor tensor, const safetensors::TensorInfo& box, std::span<const std::int64_t> offsets,
                      std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const at::NoGradGuard no_grad;
  at::Tensor target = tensor.detach();
  for (std::size_t d = 0; d < box.shape.size(); ++d)
    target = target.narrow(static_cast<std::int64_t>(d), offsets[d], box.shape[d]);
  const at::ScalarType type = scalar_type_of(box.dtype);
  if (target.is_cpu() && target.is_contiguous() && target.scalar_type() == type) {
    std::memcpy(target.mutable_data_ptr(), bytes.data(), bytes.size());
    return;
  }
  // Files by others need not align their tensors, and kernels may assume that data is.
  const std::byte* data = bytes.data();
  std::vector<std::byte> aligned;
  if (reinterpret_cast<std::uintptr_t>(data) % safetensors::element_size(box.dtype) != 0) {
    aligned.assign(bytes.begin(), bytes.end());
    data = aligned.data();
  }
  const auto source = at::from_blob(const_cast<std::byte*>(data), box.shape, at::TensorOptions().dtype(type));
  target.copy_(source);
}

}  // namespace phalanx
