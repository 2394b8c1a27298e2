// Replica check: do ranks that should hold the same bits hold them? A memory cell that flips, a kernel that gives other
// bits on another device or a parameter that one rank alone stepped let replicas drift apart without a word.
//
//   check_replicas(named_parameters(*model), *world, "after step 12");     // on every rank
//
// What is compared: tensors of the same name that are the same part of their global tensor (all of it, without a
// shard), wherever a rank of `comm` has them: replicas over data-parallel ranks, parameters that tensor parallelism
// leaves whole, tied weights of several pipeline stages. What one rank alone has is not compared; ranks may list
// different tensors, and one rank the same tensor twice.
//
// Cost: every tensor is read once, on its device, with 512 KiB of memory beside it on the host and 16 MiB on a device;
// 16 bytes a tensor are exchanged. The host waits once for each device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

/// Collective. Throws the same Error on every rank where bits differ: tensors, ranks, and what to do. `when` is part of
/// its first sentence. Returns how many of this rank's tensors of more than one element another rank holds, too: where
/// it is 0 there was nothing to compare but counters.
std::size_t check_replicas(const std::vector<NamedTensor>& tensors, Communicator& comm, const std::string& when);

/// Of the bits of all elements and their places: 0-dim, int64, on the tensor's device, which nobody waits for. A single
/// flipped bit always changes it; equal values with other bits (0 and -0) have other hashes.
at::Tensor hash_of_bits(const at::Tensor& tensor);

}  // namespace phalanx
