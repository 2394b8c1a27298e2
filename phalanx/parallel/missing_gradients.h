// What DistributedDataParallel and FullyShardedDataParallel say, and to whom, when a backward pass did not give all
// gradients.
#pragma once

#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"

namespace phalanx {

/// "'a', 'b' and 3 more": the first ten.
std::string quoted_list(const std::vector<std::string>& names);

/// Collectives of the other ranks fail with these words. Nothing where the communicator has failed already, or has one
/// rank.
void abort_with(Communicator& comm, const std::string& message) noexcept;

/// The backward pass ended with an error, so this rank will not issue what its peers are waiting for: they fail now and
/// not after a timeout. `who` begins the message.
void abort_before_averaging(Communicator& comm, const char* who) noexcept;

}  // namespace phalanx
