#include "phalanx/comm/backends/nccl/nccl.h"

#include <fmt/format.h>

#include <cstring>
#include <map>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/comm/backends/nccl/nccl_backend.h"

namespace phalanx {
namespace {

struct NcclPieces {
  std::shared_ptr<const NcclTable> table;
  std::shared_ptr<DeviceStreams> streams;
};

// NCCL knows a device by its host and its number there, and a host by NCCL_HOSTID where that is set.
std::string identity_for_nccl(const DeviceStreams& streams) {
  const std::string device = streams.device_identity();
  const auto host = env_string("NCCL_HOSTID");
  return device.empty() || !host ? device : fmt::format("{} of host {}", device, *host);
}

// NCCL does not accept two ranks on one device. devices[r]: rank r's identity_for_nccl().
void throw_if_shared(const std::vector<std::string>& devices) {
  std::map<std::string, std::size_t> first;
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    if (devices[rank].empty()) continue;
    const auto [one, is_new] = first.emplace(devices[rank], rank);
    if (!is_new)
      throw NcclUnavailable(
          fmt::format("ranks {} and {} have the same device ({}), which NCCL does not take: let each "
                      "rank see one of its own",
                      one->second, rank, devices[rank]));
  }
}

// All ranks must be able to use NCCL: one that cannot would leave the others waiting. `problem`: why this one cannot.
std::shared_ptr<Communicator> make_over_nccl(std::shared_ptr<Backend> control, int cuda_device,
                                             const NcclPieces& pieces, const std::string& problem,
                                             NcclOptions options) {
  NcclUniqueId id{};
  {
    CommunicatorOptions quiet = options.communicator;
    quiet.name += " (rendezvous for NCCL)";
    Communicator bootstrap(control, quiet);
    // The reason why this rank cannot, or empty.
    std::string mine = problem;
    if (problem.empty() && bootstrap.rank() == 0) {
      const NcclResult result = pieces.table->get_unique_id(&id);
      if (result != NcclResult::success) mine = fmt::format("NCCL: no id: {}", pieces.table->get_error_string(result));
    }
    const std::vector<std::string> problems = bootstrap.all_gather_bytes(mine);
    for (std::size_t rank = 0; rank < problems.size(); ++rank)
      if (!problems[rank].empty()) throw NcclUnavailable(fmt::format("rank {}: {}", rank, problems[rank]));
    throw_if_shared(bootstrap.all_gather_bytes(identity_for_nccl(*pieces.streams)));
    const std::string text = bootstrap.broadcast_bytes(std::string(id.bytes, sizeof id.bytes));
    std::memcpy(id.bytes, text.data(), sizeof id.bytes);
  }
  NcclBackend::Setup setup;
  setup.table = pieces.table;
  setup.streams = pieces.streams;
  setup.group = NcclCommunicator::make({pieces.table, pieces.streams, options.communicator.first_timeout}, id,
                                       control->size(), control->rank(), [&control] { control->check_ranks(); });
  setup.control = std::move(control);
  setup.cuda_device = cuda_device;
  setup.strict = options.communicator.strict;
  setup.names = std::move(options.names);
  return std::make_shared<Communicator>(std::make_shared<NcclBackend>(std::move(setup)),
                                        std::move(options.communicator));
}

}  // namespace

std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Backend> control, int cuda_device,
                                                     NcclOptions options) {
  NcclPieces pieces;
  std::string problem;
  try {
    pieces.streams = make_cuda_streams(cuda_device);
    pieces.table = load_nccl();
  } catch (const Error& error) {
    problem = error.what();
  }
  return make_over_nccl(std::move(control), cuda_device, pieces, problem, std::move(options));
}

std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Backend> control, int cuda_device,
                                                     std::shared_ptr<const NcclTable> table,
                                                     std::shared_ptr<DeviceStreams> streams, NcclOptions options) {
  return make_over_nccl(std::move(control), cuda_device, {std::move(table), std::move(streams)}, "",
                        std::move(options));
}

}  // namespace phalanx
