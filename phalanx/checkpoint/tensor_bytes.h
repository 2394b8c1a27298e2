// Between live tensors and the bytes of a file, on any device: a CUDA tensor goes through host memory in chunks.
//
// A part of a tensor is a box: offsets and a shape inside the whole. Saving takes rows (boxes cut along the first
// dimension); loading accepts any box.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "phalanx/checkpoint/safetensors.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

at::ScalarType scalar_type_of(safetensors::Dtype dtype);
/// Name, dtype and shape. CheckpointError if the tensor is undefined, not dense, without storage, or of a type that
/// safetensors has no name for.
safetensors::TensorInfo describe_tensor(const NamedTensor& tensor);

/// Gives `sink` the bytes of rows [row_begin, row_end) in row-major order, in one or more spans valid during the call.
/// A tensor without dimensions has one row.
void read_tensor_rows(const at::Tensor& tensor, std::int64_t row_begin, std::int64_t row_end,
                      const std::function<void(std::span<const std::byte>)>& sink);

/// Copies a saved box into its place in `tensor`, converting the dtype where it differs. The box must lie inside.
void write_tensor_box(at::Tensor tensor, const safetensors::TensorInfo& box, std::span<const std::int64_t> offsets,
                      std::span<const std::byte> bytes);

}  // namespace phalanx
