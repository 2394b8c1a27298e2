// Two levels between forked processes; the test says which rank is on which "machine".
//
//   EXPECT_EQ(run_two_level_ranks(eager_two_levels({0, 0, 1}), [](Communicator& comm) { use(comm); }), "");
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/comm/hierarchical/two_level.h"

namespace phalanx {

/// Everything through the machines, in pieces that are small.
TwoLevelOptions eager_two_levels(std::vector<int> machines, CommunicatorOptions options = {});

/// A rank for each of options.machines, over gloo. Returns as run_forked_ranks().
std::string run_two_level_ranks(const TwoLevelOptions& options, const std::function<void(Communicator&)>& body,
                                int killed_rank = -1);

}  // namespace phalanx
