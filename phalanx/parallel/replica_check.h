// Replica check: verifies that ranks which should hold the same bits do hold them.
//
// Replicas can drift apart silently: a memory cell flips, a kernel gives other bits on another device, or only one rank
// has updated a parameter.
//
//   check_replicas(nn::named_parameters(*model), *world, "after step 12");  // on every rank
//
// What is compared: tensors with the same name that are the same part of their global tensor (without a shard: all of
// it), on all ranks of `comm` that have them. These are the replicas of data-parallel ranks, parameters that tensor
// parallelism does not split, and tied weights of several pipeline stages. A tensor that only one rank has is not
// compared. Ranks may list different tensors, and a rank may list a tensor twice.
//
// Cost: every tensor is read once, on its device. It takes 512 KiB of extra memory on the host and 16 MiB on a device.
// 16 bytes per tensor are exchanged. The host waits once for each device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

/// Collective. Throws the same Error on every rank if bits differ. It names the tensors and the ranks and says what to
/// do. `when` becomes part of its first sentence.
/// ENSURES: returns how many of this rank's tensors of more than one element are also held by another rank. If it is 0,
/// there was nothing to compare but counters.
std::size_t check_replicas(const std::vector<NamedTensor>& tensors, Communicator& comm, const std::string& when);

/// Hash of the bits of all elements and their positions: 0-dim, int64, on the tensor's device. Does not wait for the
/// device. A single flipped bit always changes it. Equal values with different bits (0 and -0) have different hashes.
at::Tensor hash_of_bits(const at::Tensor& tensor);

}  // namespace phalanx
