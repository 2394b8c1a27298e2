// The hierarchical backend between forked processes (tests only). The test says which rank is on which simulated node.
//
//   const auto options = eager_hierarchical_options({0, 0, 1});
//   EXPECT_EQ(run_hierarchical_ranks(options, [](Communicator& comm) { use(comm); }), "");
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/comm/hierarchical/hierarchical.h"

namespace phalanx {

/// Options that send even the smallest tensor through the two levels, in small pieces.
HierarchicalOptions eager_hierarchical_options(std::vector<int> nodes, CommunicatorOptions options = {});

/// Runs one rank for each entry of options.nodes, over gloo. Returns the failures like run_forked_ranks().
std::string run_hierarchical_ranks(const HierarchicalOptions& options, const std::function<void(Communicator&)>& body,
                                   int killed_rank = -1);

}  // namespace phalanx
