// One rank of NCCL inside "machines" and another backend between them, over doubles of NCCL and of streams.
//
//   auto rank = make_hierarchical_rank(make_gloo_communicator(store, r, 4), store, {.nodes = {0, 0, 1, 1}});
//   rank->comm->all_reduce(x);
//   end_hierarchical_rank(*rank);
#pragma once

#include <memory>

#include "phalanx/comm/communicator.h"
#include "phalanx/comm/hierarchical/nccl_hierarchical.h"
#include "phalanx/comm/testing/fake_nccl.h"
#include "phalanx/comm/testing/fake_streams.h"
#include "phalanx/store/store.h"

namespace phalanx {

/// Its device, its library, its communicator. They end in the opposite order.
struct HierarchicalRank {
  std::shared_ptr<FakeStreams> streams = std::make_shared<FakeStreams>();
  std::shared_ptr<FakeNccl> nccl;
  std::shared_ptr<Communicator> comm;
};

/// Collective over the ranks of `flat`. What the double of NCCL connects, over shared memory, is the ranks of a
/// machine; which these are options.nodes says. `store` is the one that all ranks have.
std::shared_ptr<HierarchicalRank> make_hierarchical_rank(std::shared_ptr<Communicator> flat, Store& store,
                                                         const NcclHierarchicalOptions& options);

/// Throws std::runtime_error if NCCL was called in a way that it does not allow.
void end_hierarchical_rank(HierarchicalRank& rank);

}  // namespace phalanx
