// Ordinary tensors that the other ranks of the machine can reach: one line for a program whose collectives are on
// tensors that it has not made by Communicator::symmetric_empty().
//
//   share_large_tensors();                                  // first of all
//   auto context = init_from_environment();
//   at::Tensor x = at::ones({1 << 20});
//   context.world->all_reduce(x);                           // shm: read and written where it lies
//
// From then on CPU tensors of SharedHeap::kLeastBytes and more come from the process's shared heap (shared_heap.h),
// through whatever operation they are made; smaller ones, and those that find no room there, from where they came
// before. Collectives of `shm` on them go without copies if all ranks' data lie in heaps, and give the same bits.
//
// What it costs: pages of the heap are small where the kernel gives private memory huge ones by itself
// (/sys/kernel/mm/transparent_hugepage/enabled: [always]); what peers have read of a tensor counts in their RSS, too;
// memory limits of private memory (RLIMIT_DATA) do not hold it.
#pragma once

#include "phalanx/comm/backends/local_shm/shared_heap.h"

namespace phalanx {

/// For the whole process, for good; a second call changes nothing. Tensors that are there already stay where they are,
/// communicators that are there already go on copying. Throws CommError where a heap cannot be made.
void share_large_tensors(const SharedHeapOptions& options = {});

}  // namespace phalanx
