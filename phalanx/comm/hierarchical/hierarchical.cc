#include "phalanx/comm/hierarchical/hierarchical.h"

#include <fmt/format.h>

#include <functional>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/backends/nccl/nccl.h"
#include "phalanx/comm/device/device_streams.h"
#include "phalanx/comm/device/staged_backend.h"
#include "phalanx/comm/hierarchical/hierarchical_backend.h"
#include "phalanx/comm/hierarchical/node_discovery.h"

namespace phalanx {
namespace {

using Exchange = std::function<std::vector<std::string>(const std::string&)>;

Exchange exchange_over(Communicator& flat) {
  return [&flat](const std::string& value) { return flat.all_gather_bytes(value); };
}

NodeLayout layout_of(const Communicator& flat, const Exchange& exchange, const HierarchicalOptions& options) {
  const int rank = flat.rank(), size = flat.size();
  if (options.nodes.empty())
    return NodeLayout(discover_nodes(rank, size, exchange, options.hint.value_or(local_host_id())));
  if (static_cast<int>(options.nodes.size()) != size)
    throw ConfigError(fmt::format("hierarchical communicator: the nodes of {} ranks are given, and there are {} ranks",
                                  options.nodes.size(), size));
  return NodeLayout(options.nodes);
}

// A backend for the ranks of this rank's node, made by all ranks at once. nullptr if it is alone there.
struct NodePart {
  std::shared_ptr<Backend> shm;
  std::vector<std::string> failure_reasons;  // [rank]: why it has none, or empty
};
NodePart make_node_part(const NodeLayout& layout, int rank, const Exchange& exchange,
                        const CommunicatorOptions& options) {
  const std::vector<int>& members = layout.members(layout.node_of(rank));
  const bool is_alone = members.size() == 1;
  NodePart part;
  std::string failure_reason;
  try {
    part.shm = make_shm_part(is_alone ? std::vector<int>() : members, is_alone ? -1 : layout.local_rank_of(rank),
                             exchange, heartbeat_limit(options.heartbeat));
  } catch (const CommError& error) {
    failure_reason = error.what();
  }
  part.failure_reasons = exchange(failure_reason);
  return part;
}

using MakeNccl = std::function<std::shared_ptr<Communicator>(std::shared_ptr<Backend> control, NcclOptions options)>;

std::shared_ptr<Communicator> make_over_nccl(std::shared_ptr<Communicator> flat, int cuda_device,
                                             const std::shared_ptr<DeviceStreams>& streams, const MakeNccl& make_nccl,
                                             HierarchicalOptions options) {
  const int rank = flat->rank(), size = flat->size();
  const Exchange exchange = exchange_over(*flat);
  const NodeLayout layout = layout_of(*flat, exchange, options);
  if (layout.nodes() == 1) {
    const auto host = make_hierarchical_communicator(
        std::move(flat), {.communicator = options.communicator, .nodes = std::vector<int>(size, 0), .hint = {}});
    return make_nccl(host->backend(), {.communicator = options.communicator, .names = {}});
  }
  if (layout.nodes() == size)
    return std::make_shared<Communicator>(make_staged_backend(flat->backend(), cuda_device, streams),
                                          std::move(options.communicator));

  // On every node, or nowhere.
  const std::string name = fmt::format("nccl+{}", flat->backend_name());
  const auto agree = [&](const std::vector<std::string>& failure_reasons) {
    for (std::size_t r = 0; r < failure_reasons.size(); ++r)
      if (!failure_reasons[r].empty())
        throw NcclUnavailable(fmt::format("{}: rank {}: {}", name, r, failure_reasons[r]));
  };
  NodePart part = make_node_part(layout, rank, exchange, options.communicator);
  agree(part.failure_reasons);
  std::shared_ptr<Backend> intra_node;
  std::string failure_reason;
  try {
    if (part.shm)
      intra_node = make_nccl(std::move(part.shm),
                             {.communicator = options.communicator, .names = layout.members(layout.node_of(rank))})
                       ->backend();
  } catch (const CommError& error) {
    failure_reason = error.what();
  }
  agree(exchange(failure_reason));
  std::shared_ptr<Backend> backend = flat->backend();
  flat.reset();
  return std::make_shared<Communicator>(
      std::make_shared<HierarchicalBackend>(std::move(backend), std::move(intra_node), layout,
                                            HierarchicalBackend::Tuning{.smallest_bytes = 0,
                                                                        .by_estimate = false,
                                                                        .piece_bytes = options.device_piece_bytes,
                                                                        .steps_at_once = options.steps_at_once},
                                            HierarchicalDevice{streams, cuda_device}),
      std::move(options.communicator));
}

}  // namespace

std::shared_ptr<Communicator> make_hierarchical_communicator(std::shared_ptr<Communicator> flat,
                                                             HierarchicalOptions options) {
  const int rank = flat->rank(), size = flat->size();
  const Exchange exchange = exchange_over(*flat);
  const NodeLayout layout = layout_of(*flat, exchange, options);
  if (layout.nodes() == size) return flat;
  NodePart part = make_node_part(layout, rank, exchange, options.communicator);
  for (const std::string& text : part.failure_reasons) {
    if (text.empty()) continue;
    // On one node the caller has nothing else in mind than what it has.
    if (rank == 0 && layout.nodes() > 1)
      log::warn(fmt::format("the ranks of a node cannot share memory, so all use {}: {}", flat->backend_name(), text));
    return flat;
  }
  std::shared_ptr<Backend> backend = flat->backend();
  flat.reset();
  if (layout.nodes() == 1)
    backend = std::move(part.shm);
  else
    backend =
        std::make_shared<HierarchicalBackend>(std::move(backend), std::move(part.shm), layout,
                                              HierarchicalBackend::Tuning{.smallest_bytes = options.smallest_bytes,
                                                                          .by_estimate = options.by_estimate,
                                                                          .piece_bytes = options.piece_bytes,
                                                                          .steps_at_once = options.steps_at_once});
  return std::make_shared<Communicator>(std::move(backend), std::move(options.communicator));
}

std::shared_ptr<Communicator> make_nccl_hierarchical_communicator(std::shared_ptr<Communicator> flat, int cuda_device,
                                                                  HierarchicalOptions options) {
  const auto make_nccl = [cuda_device](std::shared_ptr<Backend> control, NcclOptions intra_node) {
    return make_nccl_communicator(std::move(control), cuda_device, std::move(intra_node));
  };
  use_cuda_device(cuda_device);
  return make_over_nccl(std::move(flat), cuda_device, make_cuda_streams(cuda_device), make_nccl, std::move(options));
}

std::shared_ptr<Communicator> make_nccl_hierarchical_communicator(std::shared_ptr<Communicator> flat, int cuda_device,
                                                                  std::shared_ptr<const NcclTable> table,
                                                                  std::shared_ptr<DeviceStreams> streams,
                                                                  HierarchicalOptions options) {
  const auto make_nccl = [&](std::shared_ptr<Backend> control, NcclOptions intra_node) {
    return make_nccl_communicator(std::move(control), cuda_device, table, streams, std::move(intra_node));
  };
  return make_over_nccl(std::move(flat), cuda_device, streams, make_nccl, std::move(options));
}

std::optional<CommVolume> comm_volume(const Backend& backend) {
  const auto* const hierarchical = dynamic_cast<const HierarchicalBackend*>(&backend);
  return hierarchical != nullptr ? std::optional(hierarchical->bytes()) : std::nullopt;
}

}  // namespace phalanx
