// The only file that knows gloo's types: makes c10d's ProcessGroupGloo, which is used through c10d::Backend.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "phalanx/store/store.h"

namespace phalanx {

/// Connects to all other ranks.
/// REQUIRES: all ranks call it, with the same store.
c10::intrusive_ptr<c10d::Backend> make_gloo_group(std::shared_ptr<Store> store, int rank, int size,
                                                  const std::string& host, std::chrono::milliseconds timeout);

}  // namespace phalanx
