#include "phalanx/comm/testing/nccl_levels_rank.h"

#include <fmt/format.h>

#include <chrono>
#include <stdexcept>
#include <utility>

#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/hierarchical/two_level_layout.h"

namespace phalanx {

std::shared_ptr<LevelsRank> make_levels_rank(std::shared_ptr<Communicator> flat, Store& store,
                                             const NcclTwoLevelOptions& options) {
  const MachineLayout layout(options.machines);
  const int machine = layout.machine_of(flat->rank());
  auto made = std::make_shared<LevelsRank>();
  made->nccl = std::make_shared<FakeNccl>(
      make_shm_backend(store, layout.place_of(flat->rank()), static_cast<int>(layout.members(machine).size()),
                       fmt::format("transport/{}", machine), std::chrono::seconds(60)));
  made->comm = make_nccl_two_level_communicator(std::move(flat), -1, made->nccl->table(), made->streams, options);
  return made;
}

void end_levels_rank(LevelsRank& rank) {
  rank.comm.reset();
  if (rank.nccl->misuses() != 0) throw std::runtime_error("NCCL was called in a way that it does not allow");
}

}  // namespace phalanx
