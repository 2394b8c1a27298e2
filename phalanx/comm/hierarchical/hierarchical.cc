#include "phalanx/comm/hierarchical/hierarchical.h"

#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/hierarchical/hierarchical_backend.h"
#include "phalanx/comm/hierarchical/nccl_hierarchical_backend.h"
#include "phalanx/comm/hierarchical/node_discovery.h"

namespace phalanx {

std::shared_ptr<Communicator> make_hierarchical_communicator(std::shared_ptr<Communicator> flat,
                                                             HierarchicalOptions options) {
  const int rank = flat->rank(), size = flat->size();
  const auto exchange = [&flat](const std::string& value) { return flat->all_gather_bytes(value); };
  if (!options.nodes.empty() && static_cast<int>(options.nodes.size()) != size)
    throw ConfigError(fmt::format("two levels: the machines of {} ranks are given, and there are {} ranks",
                                  options.nodes.size(), size));
  const NodeLayout layout(!options.nodes.empty()
                              ? options.nodes
                              : discover_nodes(rank, size, exchange, options.hint.value_or(local_host_id())));
  if (layout.nodes() == size) return flat;

  const int node = layout.node_of(rank);
  const bool is_alone = layout.members(node).size() == 1;
  const auto heartbeat = heartbeat_limit(options.communicator.heartbeat);
  std::shared_ptr<Backend> intra_node;
  std::string failure_reason;
  try {
    intra_node = make_shm_part(is_alone ? std::vector<int>() : layout.members(node),
                               is_alone ? -1 : layout.local_rank_of(rank), exchange, heartbeat);
  } catch (const CommError& error) {
    failure_reason = error.what();
  }
  for (const std::string& text : exchange(failure_reason)) {
    if (text.empty()) continue;
    // On one node the caller has nothing else in mind than what it has.
    if (rank == 0 && layout.nodes() > 1)
      log::warn(
          fmt::format("the ranks of a machine cannot share memory, so all use {}: {}", flat->backend_name(), text));
    return flat;
  }
  std::shared_ptr<Backend> backend = flat->backend();
  flat.reset();
  if (layout.nodes() == 1) {
    backend = std::move(intra_node);
  } else {
    backend =
        std::make_shared<HierarchicalBackend>(std::move(backend), std::move(intra_node), layout,
                                              HierarchicalBackend::Tuning{.smallest_bytes = options.smallest_bytes,
                                                                          .by_estimate = options.by_estimate,
                                                                          .piece_bytes = options.piece_bytes});
  }
  return std::make_shared<Communicator>(std::move(backend), std::move(options.communicator));
}

std::optional<CommVolume> comm_volume(const Backend& backend) {
  const auto* hierarchical = dynamic_cast<const HierarchicalBackend*>(&backend);
  if (hierarchical != nullptr) return hierarchical->bytes();
  const auto* over_nccl = dynamic_cast<const NcclHierarchicalBackend*>(&backend);
  if (over_nccl != nullptr) return over_nccl->bytes();
  return std::nullopt;
}

}  // namespace phalanx
