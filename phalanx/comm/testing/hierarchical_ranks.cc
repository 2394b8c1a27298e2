#include "phalanx/comm/testing/hierarchical_ranks.h"

#include <memory>
#include <optional>
#include <utility>

#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {

HierarchicalOptions eager_hierarchical_options(std::vector<int> nodes, CommunicatorOptions options) {
  return {.communicator = std::move(options),
          .nodes = std::move(nodes),
          .hint = std::nullopt,
          .smallest_bytes = 1,
          .by_estimate = false,
          .piece_bytes = 100'000};
}

std::string run_hierarchical_ranks(const HierarchicalOptions& options, const std::function<void(Communicator&)>& body,
                                   int killed_rank) {
  const int world = static_cast<int>(options.nodes.size());
  TcpStoreServer server;
  return run_forked_ranks_or_threads(
      world,
      [&](int rank) {
        auto flat = make_gloo_communicator(std::make_shared<TcpStore>(server.address()), rank, world,
                                           {.communicator = options.communicator});
        body(*make_hierarchical_communicator(std::move(flat), options));
      },
      killed_rank);
}

}  // namespace phalanx
