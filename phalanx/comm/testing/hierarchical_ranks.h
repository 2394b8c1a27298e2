// Two levels between forked processes; the test says which rank is on which "machine".
//
//   EXPECT_EQ(run_hierarchical_ranks(eager_hierarchical_options({0, 0, 1}), [](Communicator& comm) { use(comm); }), "");
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/comm/hierarchical/hierarchical.h"

namespace phalanx {

/// Everything through the machines, in pieces that are small.
HierarchicalOptions eager_hierarchical_options(std::vector<int> nodes, CommunicatorOptions options = {});

/// A rank for each of options.nodes, over gloo. Returns as run_forked_ranks().
std::string run_hierarchical_ranks(const HierarchicalOptions& options, const std::function<void(Communicator&)>& body,
                                   int killed_rank = -1);

}  // namespace phalanx
