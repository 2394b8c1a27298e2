// Counts the memory of CPU tensors by category (observe/memory_counters.h).
//
// It wraps libtorch's own allocator, takes the memory from there, and stores the category in a block's last byte. It
// asks the heap for the block's size. Large blocks are of a pool of their own, which keeps them for reuse
// (host_block_pool.h). Device memory is counted by libtorch's caching allocator itself.
//
//   install_counting_allocator();                     // once, before the tensors that are to be counted
//   {
//     const observe::MemoryScope scope(observe::MemoryCategory::parameters);
//     model = std::make_shared<models::Llama>(config);
//   }
//   count_as(gradient, observe::MemoryCategory::gradients);        // made by other code; changes its category later
#pragma once

#include <ATen/core/Tensor.h>

#include "phalanx/observe/memory_counters.h"

namespace phalanx {

/// Installs it for the whole process, permanently. A second call changes nothing. Tensors that already exist are not
/// counted.
void install_counting_allocator();

/// From now on the memory behind `tensor` is counted under `category`. Does nothing for memory that is not counted, is
/// shared between ranks, or is a device's.
void count_as(const at::Tensor& tensor, observe::MemoryCategory category);

}  // namespace phalanx
