// The local backend: ranks are threads of one process and read each other's buffers in place.
//
// Collectives take the direct path of round_operation.h: a rank's header holds the address of its description.
#pragma once

#include <memory>
#include <vector>

#include "phalanx/comm/backend.h"

namespace phalanx {

/// One backend per rank. Only the rank's thread uses it (or the progress thread for it).
std::vector<std::shared_ptr<Backend>> make_local_backends(int size);

/// The rank of this backend will do nothing more, in this group and in all split from it. A rank that waits for it soon
/// gets an error.
/// REQUIRES: make_local_backends() made the backend.
void mark_local_rank_gone(Backend& backend) noexcept;

}  // namespace phalanx
