#include "phalanx/comm/hierarchical/nccl_hierarchical.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/backends/nccl/nccl.h"
#include "phalanx/comm/device/device_streams.h"
#include "phalanx/comm/device/staged_backend.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/hierarchical/nccl_hierarchical_backend.h"
#include "phalanx/comm/hierarchical/node_discovery.h"

namespace phalanx {
namespace {

using MakeIntraNode =
    std::function<std::shared_ptr<Communicator>(std::shared_ptr<Backend> control, NcclOptions options)>;

std::shared_ptr<Communicator> make_nccl_hierarchy(std::shared_ptr<Communicator> flat, int cuda_device,
                                                  const std::shared_ptr<DeviceStreams>& streams,
                                                  const MakeIntraNode& make_intra_node,
                                                  NcclHierarchicalOptions options) {
  const int rank = flat->rank(), size = flat->size();
  const auto exchange = [&flat](const std::string& value) { return flat->all_gather_bytes(value); };
  const NodeLayout layout(!options.nodes.empty() ? options.nodes : discover_nodes(rank, size, exchange));
  if (layout.nodes() == 1) {
    const auto host = make_hierarchical_communicator(
        std::move(flat),
        {.communicator = options.communicator, .nodes = std::vector<int>(size, 0), .hint = std::nullopt});
    return make_intra_node(host->backend(), {.communicator = options.communicator});
  }
  if (layout.nodes() == size)
    return std::make_shared<Communicator>(make_staged_backend(flat->backend(), cuda_device, streams),
                                          std::move(options.communicator));
  const int node = layout.node_of(rank), local_rank = layout.local_rank_of(rank);
  const std::vector<int>& members = layout.members(node);
  const std::string name = fmt::format("nccl+{}", flat->backend_name());
  if (!NcclHierarchicalBackend::can_serve(layout)) {
    std::size_t least = static_cast<std::size_t>(size), most = 0;
    for (int m = 0; m < layout.nodes(); ++m) {
      least = std::min(least, layout.members(m).size());
      most = std::max(most, layout.members(m).size());
    }
    throw ConfigError(fmt::format(
        "backend {} wants equally many ranks on every machine, in a row; the {} machines have {}: choose {} (CUDA "
        "tensors go through host memory), nccl, or another number of ranks",
        name, layout.nodes(),
        least == most ? std::string("ranks that are not in a row") : fmt::format("from {} to {} ranks", least, most),
        flat->backend_name()));
  }

  // On every node, or nowhere.
  const auto agree = [&](const std::string& failure_reason) {
    const std::vector<std::string> failure_reasons = exchange(failure_reason);
    for (std::size_t r = 0; r < failure_reasons.size(); ++r)
      if (!failure_reasons[r].empty())
        throw NcclUnavailable(fmt::format("{}: rank {}: {}", name, r, failure_reasons[r]));
  };
  NcclHierarchicalBackend::Setup setup{.flat = nullptr,
                                       .lane = flat->split(local_rank, rank, "lane")->backend(),
                                       .intra_node = nullptr,
                                       .layout = layout,
                                       .streams = streams,
                                       .cuda_device = cuda_device};
  std::shared_ptr<Backend> control;
  std::string failure_reason;
  try {
    control = make_shm_part(members, local_rank, exchange, heartbeat_limit(options.communicator.heartbeat));
  } catch (const CommError& error) {
    failure_reason = error.what();
  }
  agree(failure_reason);
  try {
    setup.intra_node =
        make_intra_node(std::move(control), {.communicator = options.communicator, .names = members})->backend();
  } catch (const CommError& error) {
    failure_reason = error.what();
  }
  agree(failure_reason);
  setup.flat = flat->backend();
  flat.reset();
  return std::make_shared<Communicator>(std::make_shared<NcclHierarchicalBackend>(std::move(setup)),
                                        std::move(options.communicator));
}

}  // namespace

std::shared_ptr<Communicator> make_nccl_hierarchical_communicator(std::shared_ptr<Communicator> flat, int cuda_device,
                                                                  NcclHierarchicalOptions options) {
  const auto make_intra_node = [cuda_device](std::shared_ptr<Backend> control, NcclOptions intra_node) {
    return make_nccl_communicator(std::move(control), cuda_device, std::move(intra_node));
  };
  use_cuda_device(cuda_device);
  return make_nccl_hierarchy(std::move(flat), cuda_device, make_cuda_streams(cuda_device), make_intra_node,
                             std::move(options));
}

std::shared_ptr<Communicator> make_nccl_hierarchical_communicator(std::shared_ptr<Communicator> flat, int cuda_device,
                                                                  std::shared_ptr<const NcclTable> table,
                                                                  std::shared_ptr<DeviceStreams> streams,
                                                                  NcclHierarchicalOptions options) {
  const auto make_intra_node = [&](std::shared_ptr<Backend> control, NcclOptions intra_node) {
    return make_nccl_communicator(std::move(control), cuda_device, table, streams, std::move(intra_node));
  };
  return make_nccl_hierarchy(std::move(flat), cuda_device, streams, make_intra_node, std::move(options));
}

}  // namespace phalanx
