// How a recipe finds the other ranks and its device.
// Tests link another definition (on_sim/join_ranks.cc), which gives it a simulated device.
#pragma once

#include "phalanx/launch/process_context.h"

namespace recipe {

/// As phalanx::init_from_environment().
phalanx::ProcessContext join_ranks(const phalanx::InitOptions& options);

}  // namespace recipe
