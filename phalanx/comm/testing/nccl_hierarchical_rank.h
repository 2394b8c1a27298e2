// One rank with NCCL intra-node and another backend inter-node, over test doubles of NCCL and of streams (tests only).
//
//   auto rank = make_hierarchical_rank(make_gloo_communicator(store, r, 4), *store, {.nodes = {0, 0, 1, 1}});
//   rank->comm->all_reduce(x);
//   end_hierarchical_rank(*rank);
#pragma once

#include <memory>

#include "phalanx/comm/communicator.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/testing/nccl_ranks.h"
#include "phalanx/store/store.h"

namespace phalanx {

/// The NCCL double connects the ranks of one simulated node through shared memory; options.nodes says which ranks these
/// are.
/// REQUIRES: all ranks of `flat` call it (it is collective), with the same `store`.
std::shared_ptr<NcclRank> make_hierarchical_rank(std::shared_ptr<Communicator> flat, Store& store,
                                                 const HierarchicalOptions& options);

/// Destroys the rank's communicator. Throws std::runtime_error if there were calls that NCCL does not allow.
void end_hierarchical_rank(NcclRank& rank);

}  // namespace phalanx
