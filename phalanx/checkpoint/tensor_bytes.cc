#include "phalanx/checkpoint/tensor_bytes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/files/box_copy.h"

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
/// Limits the host memory for copying a tensor of another device, or a strided one.
constexpr std::int64_t kStagingBytes = 64 << 20;

std::span<const std::byte> bytes_of(const at::Tensor& contiguous_host_tensor) {
  return {static_cast<const std::byte*>(contiguous_host_tensor.const_data_ptr()), contiguous_host_tensor.nbytes()};
}

void check_shard(const NamedTensor& named) {
  const auto& spec = named.shard->spec;
  const auto fail = [&](const std::string& reason) {
    throw CheckpointError(fmt::format("tensor {} {}", safetensors::quote_name(named.name), reason));
  };
  const auto& axes = spec.mesh().axes();
  for (std::size_t axis = 0; axis < axes.size(); ++axis) {
    if (axes[axis].size > 1 && spec.is_partial(axis))
      fail(fmt::format("is partial along '{}' ({}): only addends of its values are there; reduce it first",
                       axes[axis].name, spec.text()));
  }
  const Box box = named.shard->box();
  const bool nothing = box.empty() && named.tensor.numel() == 0;
  if (!nothing && named.tensor.sizes() != at::IntArrayRef(box.shape))
    fail(fmt::format("has the shape {} on mesh rank {}, but {} gives that rank the box {}",
                     safetensors::format_shape(named.tensor.sizes().vec()), named.shard->rank, spec.text(),
                     box.text()));
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
  if (named.shard) check_shard(named);
  return {.name = named.name, .dtype = found->first, .shape = named.global_shape()};
}

Box held_box(const NamedTensor& named) {
  if (named.shard) return named.shard->box();
  return {std::vector<std::int64_t>(static_cast<std::size_t>(named.tensor.dim()), 0), named.tensor.sizes().vec()};
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

std::uint64_t fill_tensor(const NamedTensor& named, Dtype dtype, const BoxSource& source) {
  const Box box = held_box(named);
  if (box.empty()) return 0;
  const at::NoGradGuard no_grad;
  const at::Tensor tensor = named.tensor.detach();
  const auto type = scalar_type_of(dtype);
  if (tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == type)
    return source(box, {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()});
  const std::int64_t rows = row_count(box);
  const std::int64_t row_bytes = box.numel() / rows * static_cast<std::int64_t>(safetensors::element_size(dtype));
  const std::int64_t chunk = std::clamp<std::int64_t>(kStagingBytes / row_bytes, 1, rows);
  std::uint64_t bytes = 0;
  for (std::int64_t row = 0; row < rows; row += chunk) {
    const Box part = rows_of_box(box, row, std::min(rows, row + chunk));
    const auto staged = at::empty(part.shape, at::TensorOptions().dtype(type));
    bytes += source(part, {static_cast<std::byte*>(staged.mutable_data_ptr()), staged.nbytes()});
    (tensor.dim() == 0 ? tensor : tensor.narrow(0, row, part.shape[0])).copy_(staged);
  }
  return bytes;
}

}  // namespace phalanx
