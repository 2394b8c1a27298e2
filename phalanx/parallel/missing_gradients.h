// Error reporting of DistributedDataParallel and FullyShardedDataParallel when a backward pass did not produce all
// gradients.
#pragma once

#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"

namespace phalanx {

/// "'a', 'b' and 3 more": the first ten.
std::string quoted_list(const std::vector<std::string>& names);

/// Aborts the communicator, so that the other ranks' collectives fail with this message. Does nothing if the
/// communicator has already failed or has only one rank.
void abort_with(Communicator& comm, const std::string& message) noexcept;

/// For a backward pass that ended with an error: this rank will not issue the collectives that its peers wait for. The
/// peers fail now and not after a timeout. The message begins with `who`.
void abort_before_averaging(Communicator& comm, const char* who) noexcept;

}  // namespace phalanx
