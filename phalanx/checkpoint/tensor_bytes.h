// Between live tensors and the bytes of a file, on any device: a CUDA tensor goes through host memory in chunks.
//
// A tensor with a shard (tensor/named.h) is its rank's box of a global tensor; shapes here are always the global ones,
// and boxes lie in the global tensor. Saving takes rows of what a rank holds; loading asks for any box.
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
/// Name, dtype and global shape. CheckpointError if the tensor is undefined, not dense, without storage, or of a type
/// that safetensors has no name for; if its shard is partial, or is not what the rank holds.
safetensors::TensorInfo describe_tensor(const NamedTensor& tensor);
/// The part of the global tensor that this is: all of it without a shard.
Box held_box(const NamedTensor& tensor);

/// Gives `sink` the bytes of rows [row_begin, row_end) in row-major order, in one or more spans valid during the call.
/// A tensor without dimensions has one row.
void read_tensor_rows(const at::Tensor& tensor, std::int64_t row_begin, std::int64_t row_end,
                      const std::function<void(std::span<const std::byte>)>& sink);

/// Fills a span with the elements of a box, row-major, in a saved dtype; returns how many bytes it took from a file.
using BoxSource = std::function<std::uint64_t(const Box& box, std::span<std::byte> target)>;
/// Fills all that `tensor` holds from the source, converting the dtype where it differs; returns the sum of its bytes.
/// A dense host tensor of the same dtype is the source's target itself, others are filled in chunks of rows.
std::uint64_t fill_tensor(const NamedTensor& tensor, safetensors::Dtype dtype, const BoxSource& source);

}  // namespace phalanx
