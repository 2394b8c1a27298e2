// Tensors as kernels of the simulated devices see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "phalanx/testing/sim_device/torch/sim_backend.h"

namespace phalanx::sim_device {

/// Whether it is defined, and on a simulated device.
bool is_on_sim(const at::Tensor& tensor);

/// A CPU tensor over the memory that a kernel may touch: of device memory, or pinned memory. It does not keep the
/// memory alive. The streams' order does, and PinnedMemory.
at::Tensor kernel_view(const at::Tensor& tensor);

/// Adds the bytes of a tensor's elements: a range for each of its contiguous pieces, or, where those are more than 64,
/// one range from the first element to the last.
void add_accesses(std::vector<Access>& accesses, const at::Tensor& tensor, bool is_write);
void add_accesses(std::vector<Access>& accesses, const void* first, std::size_t itemsize, at::IntArrayRef sizes,
                  at::IntArrayRef strides, bool is_write);
/// The accesses of a kernel that reads one tensor and writes another. Either may be undefined.
std::vector<Access> accesses_of(const at::Tensor& read, const at::Tensor& written);

/// On the current device.
at::Tensor empty_on_sim(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

/// Another view of the tensor's storage.
at::Tensor view_of(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t offset,
                   caffe2::TypeMeta dtype);

/// Makes it contiguous with these sizes, and its storage large enough.
void resize_on_sim(const at::Tensor& tensor, at::IntArrayRef sizes);

/// Launches on the device's current stream.
void launch(int device, const char* name, std::vector<Access> accesses, std::function<void()> body);

}  // namespace phalanx::sim_device
