// One rank with NCCL intra-node and another backend inter-node, over test doubles of NCCL and of streams (tests only).
//
//   auto rank = make_hierarchical_rank(make_gloo_communicator(store, r, 4), *store, {.nodes = {0, 0, 1, 1}});
//   rank->comm->all_reduce(x);
//   end_hierarchical_rank(*rank);
#pragma once

#include <memory>

#include "phalanx/comm/communicator.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/testing/fake_nccl.h"
#include "phalanx/comm/testing/fake_streams.h"
#include "phalanx/store/store.h"

namespace phalanx {

/// The rank's device, library and communicator. They are destroyed in the opposite order.
struct HierarchicalRank {
  std::shared_ptr<FakeStreams> streams = std::make_shared<FakeStreams>();
  std::shared_ptr<FakeNccl> nccl;
  std::shared_ptr<Communicator> comm;
};

/// The NCCL double connects the ranks of one simulated node through shared memory; options.nodes says which ranks these
/// are.
/// REQUIRES: all ranks of `flat` call it (it is collective), with the same `store`.
std::shared_ptr<HierarchicalRank> make_hierarchical_rank(std::shared_ptr<Communicator> flat, Store& store,
                                                         const HierarchicalOptions& options);

/// Destroys the rank's communicator. Throws std::runtime_error if there were calls that NCCL does not allow.
void end_hierarchical_rank(HierarchicalRank& rank);

}  // namespace phalanx
