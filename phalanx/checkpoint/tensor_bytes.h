// Copies between live tensors and the bytes of a file, on any device. A CUDA tensor is copied through host memory in
// chunks.
//
// A tensor with a shard (tensor/named.h) is its rank's box of a global tensor. Shapes here are always the global ones,
// and boxes are in the global tensor. Saving reads rows of the rank's own tensor; loading may read any box.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

at::ScalarType scalar_type_of(safetensors::Dtype dtype);
/// Returns name, dtype and global shape. Throws CheckpointError if the tensor is undefined, not dense, without storage,
/// or of a type that safetensors has no name for. Also throws it if its shard is partial, or is not what the rank
/// holds.
safetensors::TensorInfo describe_tensor(const NamedTensor& tensor);
/// The part of the global tensor that this tensor is; without a shard all of it.
Box held_box(const NamedTensor& tensor);

/// Passes the bytes of rows [row_begin, row_end) to `sink`, in row-major order, in one or more spans that are valid
/// during the call. A tensor without dimensions has one row.
void read_tensor_rows(const at::Tensor& tensor, std::int64_t row_begin, std::int64_t row_end,
                      const std::function<void(std::span<const std::byte>)>& sink);

/// Fills a span with the elements of a box, row-major, in a saved dtype. Returns how many bytes it read from a file.
using BoxSource = std::function<std::uint64_t(const Box& box, std::span<std::byte> target)>;
/// Fills this rank's part of `tensor` from the source, and converts the dtype if it differs. Returns the sum of the
/// bytes read. A dense host tensor of the same dtype is passed to the source directly; others are filled in chunks of
/// rows.
std::uint64_t fill_tensor(const NamedTensor& tensor, safetensors::Dtype dtype, const BoxSource& source);

}  // namespace phalanx
