// Ordinary tensors that the other ranks of the node can access. One line enables it, for a program whose collectives
// use tensors that were not made by Communicator::symmetric_empty().
//
//   share_large_tensors();                                  // before anything else
//   auto context = init_from_environment();
//   at::Tensor x = at::ones({1 << 20});
//   context.world->all_reduce(x);                           // shm: read and written in place
//
// From then on CPU tensors of at least SharedHeap::kLeastBytes come from the process's shared heap (shared_heap.h),
// whatever operation makes them. Smaller tensors, and those for which the heap has no room, come from the previous
// allocator. Collectives of `shm` on them need no copies if all ranks' data are in heaps. The results have the same
// bits.
//
// Costs:
// - Heap pages are small, even where the kernel would give private memory huge pages
//   (/sys/kernel/mm/transparent_hugepage/enabled: [always]).
// - What peers have read of a tensor counts in their RSS, too.
// - Limits on private memory (RLIMIT_DATA) do not apply to the heap.
#pragma once

#include "phalanx/comm/backends/local_shm/shared_heap.h"

namespace phalanx {

/// For the whole process, for good. A second call changes nothing. Existing tensors stay where they are; existing
/// communicators continue to copy. Throws CommError if a heap cannot be made.
void share_large_tensors(const SharedHeapOptions& options = {});

}  // namespace phalanx
