// What NCCL takes of a GPU's memory for its own buffers, beside the tensors that it moves.
//
// An estimate for GPUs joined by NVLink, where NCCL uses most channels; others take less. It follows NCCL 2.28:
// - To receive from a rank over one channel takes 9.2 MiB, in pages of 2 MiB: 4 MiB (NCCL_BUFFSIZE), 4.7 MiB and
//   0.5 MiB, one for each protocol (computeBuffSizes() of init.cc). To send takes a page.
// - There are up to 32 channels. A collective over a ring has one rank before and one after. An all-to-all has all
//   ranks of the node, and over a network one buffer of 512 MiB for all ranks of others.
// - Every communicator has buffers of its own. Ranks are connected at its first call.
// Eight H100 that exchange all-to-all take 3.1 GiB (issue 1685 of NCCL); this says 2.6 GiB.
//
//   const std::int64_t bytes = nccl_bytes({.model = config, .shards = 8, .over_nccl = true});  // of world and shards
#pragma once

#include <cstdint>

#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

/// Of one rank. 0: there is one rank, or shape.over_nccl is not set.
std::int64_t nccl_bytes(const TrainingShape& shape);

}  // namespace phalanx::plan
