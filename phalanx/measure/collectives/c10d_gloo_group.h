// Makes c10d's ProcessGroupGloo, which the benchmark measures beside the backends, through c10d::Backend. The only file
// that knows gloo's types.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "phalanx/store/store.h"

namespace phalanx::measure {

/// Connects to all other ranks. SIGPIPE is ignored from then on, unless the program handles it.
/// REQUIRES: all ranks call it, with the same store.
c10::intrusive_ptr<c10d::Backend> make_gloo_group(std::shared_ptr<Store> store, int rank, int size,
                                                  const std::string& host, std::chrono::milliseconds timeout);

}  // namespace phalanx::measure
