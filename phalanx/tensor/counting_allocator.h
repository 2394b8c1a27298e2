// Counts the memory of CPU tensors, by what it is for (observe/memory_counters.h).
//
// It stands in front of libtorch's own allocator, takes the memory from there, and remembers in a block's last byte
// what it is for; its size it asks the heap for. Device memory is counted by libtorch's caching allocator itself.
//
//   install_counting_allocator();                     // once, before the tensors that are to be counted
//   { const observe::MemoryScope scope(observe::MemoryCategory::parameters); model = ...; }
//   count_as(gradient, observe::MemoryCategory::gradients);        // made by somebody else, and found out later
#pragma once

#include <ATen/core/Tensor.h>

#include "phalanx/observe/memory_counters.h"

namespace phalanx {

/// For the whole process, for good; a second call changes nothing. Tensors that are there already are not counted.
void install_counting_allocator();

/// From now on the memory behind `tensor` is counted there. Nothing happens to memory that is not counted, is shared
/// between ranks, or is a device's.
void count_as(const at::Tensor& tensor, observe::MemoryCategory category);

}  // namespace phalanx
