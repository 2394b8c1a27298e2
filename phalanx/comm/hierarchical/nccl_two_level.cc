#include "phalanx/comm/hierarchical/nccl_two_level.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/backends/nccl/nccl.h"
#include "phalanx/comm/device/device_streams.h"
#include "phalanx/comm/device/staged_backend.h"
#include "phalanx/comm/hierarchical/machine_proof.h"
#include "phalanx/comm/hierarchical/nccl_two_level_backend.h"
#include "phalanx/comm/hierarchical/two_level.h"

namespace phalanx {
namespace {

using MakeInside = std::function<std::shared_ptr<Communicator>(std::shared_ptr<Backend> control, NcclOptions options)>;

std::shared_ptr<Communicator> make_nccl_levels(std::shared_ptr<Communicator> flat, int cuda_device,
                                               const std::shared_ptr<DeviceStreams>& streams,
                                               const MakeInside& make_inside, NcclTwoLevelOptions options) {
  const int rank = flat->rank(), size = flat->size();
  const auto exchange = [&flat](const std::string& value) { return flat->all_gather_bytes(value); };
  const MachineLayout layout(!options.machines.empty() ? options.machines : prove_machines(rank, size, exchange));
  if (layout.machines() == 1) {
    const auto host = make_two_level_communicator(
        std::move(flat),
        {.communicator = options.communicator, .machines = std::vector<int>(size, 0), .hint = std::nullopt});
    return make_inside(host->backend(), {.communicator = options.communicator});
  }
  if (layout.machines() == size)
    return std::make_shared<Communicator>(make_staged_backend(flat->backend(), cuda_device, streams),
                                          std::move(options.communicator));
  const int machine = layout.machine_of(rank), place = layout.place_of(rank);
  const std::vector<int>& members = layout.members(machine);
  const std::string name = fmt::format("nccl+{}", flat->backend_name());
  if (!NcclTwoLevelBackend::can_serve(layout)) {
    std::size_t least = static_cast<std::size_t>(size), most = 0;
    for (int m = 0; m < layout.machines(); ++m) {
      least = std::min(least, layout.members(m).size());
      most = std::max(most, layout.members(m).size());
    }
    throw ConfigError(fmt::format(
        "backend {} wants equally many ranks on every machine, in a row; the {} machines have {}: choose {} (CUDA "
        "tensors go through host memory), nccl, or another number of ranks",
        name, layout.machines(),
        least == most ? std::string("ranks that are not in a row") : fmt::format("from {} to {} ranks", least, most),
        flat->backend_name()));
  }

  // On every machine, or nowhere.
  const auto agree = [&](const std::string& trouble) {
    const std::vector<std::string> troubles = exchange(trouble);
    for (std::size_t r = 0; r < troubles.size(); ++r)
      if (!troubles[r].empty()) throw NcclUnavailable(fmt::format("{}: rank {}: {}", name, r, troubles[r]));
  };
  NcclTwoLevelBackend::Setup setup{.flat = nullptr,
                                   .lane = flat->split(place, rank, "lane")->backend(),
                                   .inside = nullptr,
                                   .layout = layout,
                                   .streams = streams,
                                   .cuda_device = cuda_device};
  std::shared_ptr<Backend> control;
  std::string trouble;
  try {
    control = make_shm_part(members, place, exchange, heartbeat_limit(options.communicator.heartbeat));
  } catch (const CommError& error) {
    trouble = error.what();
  }
  agree(trouble);
  try {
    setup.inside = make_inside(std::move(control), {.communicator = options.communicator, .names = members})->backend();
  } catch (const CommError& error) {
    trouble = error.what();
  }
  agree(trouble);
  setup.flat = flat->backend();
  flat.reset();
  return std::make_shared<Communicator>(std::make_shared<NcclTwoLevelBackend>(std::move(setup)),
                                        std::move(options.communicator));
}

}  // namespace

std::shared_ptr<Communicator> make_nccl_two_level_communicator(std::shared_ptr<Communicator> flat, int cuda_device,
                                                               NcclTwoLevelOptions options) {
  const auto make_inside = [cuda_device](std::shared_ptr<Backend> control, NcclOptions inside) {
    return make_nccl_communicator(std::move(control), cuda_device, std::move(inside));
  };
  use_cuda_device(cuda_device);
  return make_nccl_levels(std::move(flat), cuda_device, make_cuda_streams(cuda_device), make_inside,
                          std::move(options));
}

std::shared_ptr<Communicator> make_nccl_two_level_communicator(std::shared_ptr<Communicator> flat, int cuda_device,
                                                               std::shared_ptr<const NcclTable> table,
                                                               std::shared_ptr<DeviceStreams> streams,
                                                               NcclTwoLevelOptions options) {
  const auto make_inside = [&](std::shared_ptr<Backend> control, NcclOptions inside) {
    return make_nccl_communicator(std::move(control), cuda_device, table, streams, std::move(inside));
  };
  return make_nccl_levels(std::move(flat), cuda_device, streams, make_inside, std::move(options));
}

}  // namespace phalanx
