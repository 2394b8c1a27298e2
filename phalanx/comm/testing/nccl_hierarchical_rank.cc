#include "phalanx/comm/testing/nccl_hierarchical_rank.h"

#include <fmt/format.h>

#include <chrono>
#include <stdexcept>
#include <utility>

#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/hierarchical/node_layout.h"

namespace phalanx {

std::shared_ptr<NcclRank> make_hierarchical_rank(std::shared_ptr<Communicator> flat, Store& store,
                                                 const HierarchicalOptions& options) {
  const NodeLayout layout(options.nodes);
  const int node = layout.node_of(flat->rank());
  auto made = std::make_shared<NcclRank>();
  made->nccl = std::make_shared<FakeNccl>(
      make_shm_backend(store, layout.local_rank_of(flat->rank()), static_cast<int>(layout.members(node).size()),
                       fmt::format("transport/{}", node), std::chrono::seconds(60)));
  made->comm = make_nccl_hierarchical_communicator(std::move(flat), -1, made->nccl->table(), made->streams, options);
  return made;
}

void end_hierarchical_rank(NcclRank& rank) {
  rank.comm.reset();
  if (rank.nccl->misuses() != 0) throw std::runtime_error("NCCL was called in a way that it does not allow");
}

}  // namespace phalanx
