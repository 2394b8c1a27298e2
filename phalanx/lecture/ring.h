// An all-reduce written out as a ring: n - 1 steps that add up, n - 1 steps that hand out.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "phalanx/comm/communicator.h"

namespace phalanx::lecture {

/// Sums x over the ranks in place. Calls `after_step` with a title after each step. Returns how many elements this rank
/// sent.
/// REQUIRES: the number of ranks divides x.size(0).
std::int64_t ring_all_reduce(Communicator& comm, const at::Tensor& x,
                             const std::function<void(const std::string&)>& after_step);

}  // namespace phalanx::lecture
