#include "phalanx/comm/hierarchical/two_level.h"

#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/hierarchical/machine_proof.h"
#include "phalanx/comm/hierarchical/nccl_two_level_backend.h"
#include "phalanx/comm/hierarchical/two_level_backend.h"

namespace phalanx {

std::shared_ptr<Communicator> make_two_level_communicator(std::shared_ptr<Communicator> flat, TwoLevelOptions options) {
  const int rank = flat->rank(), size = flat->size();
  const auto exchange = [&flat](const std::string& value) { return flat->all_gather_bytes(value); };
  if (!options.machines.empty() && static_cast<int>(options.machines.size()) != size)
    throw ConfigError(fmt::format("two levels: the machines of {} ranks are given, and there are {} ranks",
                                  options.machines.size(), size));
  const MachineLayout layout(!options.machines.empty()
                                 ? options.machines
                                 : prove_machines(rank, size, exchange, options.hint.value_or(machine_hint())));
  if (layout.machines() == size) return flat;

  const int machine = layout.machine_of(rank);
  const bool is_alone = layout.members(machine).size() == 1;
  const auto heartbeat = heartbeat_limit(options.communicator.heartbeat);
  std::shared_ptr<Backend> inner;
  std::string trouble;
  try {
    inner = make_shm_part(is_alone ? std::vector<int>() : layout.members(machine),
                          is_alone ? -1 : layout.place_of(rank), exchange, heartbeat);
  } catch (const CommError& error) {
    trouble = error.what();
  }
  for (const std::string& text : exchange(trouble)) {
    if (text.empty()) continue;
    // On one machine the caller has nothing else in mind than what it has.
    if (rank == 0 && layout.machines() > 1)
      log::warn(
          fmt::format("the ranks of a machine cannot share memory, so all use {}: {}", flat->backend_name(), text));
    return flat;
  }
  std::shared_ptr<Backend> backend = flat->backend();
  flat.reset();
  if (layout.machines() == 1) {
    backend = std::move(inner);
  } else {
    backend = std::make_shared<TwoLevelBackend>(std::move(backend), std::move(inner), layout,
                                                TwoLevelBackend::Tuning{.smallest_bytes = options.smallest_bytes,
                                                                        .by_estimate = options.by_estimate,
                                                                        .piece_bytes = options.piece_bytes});
  }
  return std::make_shared<Communicator>(std::move(backend), std::move(options.communicator));
}

std::optional<TransportBytes> transport_bytes(const Backend& backend) {
  const auto* two_level = dynamic_cast<const TwoLevelBackend*>(&backend);
  if (two_level != nullptr) return two_level->bytes();
  const auto* over_nccl = dynamic_cast<const NcclTwoLevelBackend*>(&backend);
  if (over_nccl != nullptr) return over_nccl->bytes();
  return std::nullopt;
}

}  // namespace phalanx
