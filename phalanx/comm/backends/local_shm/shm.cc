#include "phalanx/comm/backends/local_shm/shm.h"

#include "phalanx/comm/backends/local_shm/shm_backend.h"

namespace phalanx {

std::shared_ptr<Communicator> make_shm_communicator(Store& store, int rank, int world_size,
                                                    CommunicatorOptions options) {
  auto backend = make_shm_backend(store, rank, world_size, options.name, options.first_timeout,
                                  heartbeat_limit(options.heartbeat));
  return std::make_shared<Communicator>(std::move(backend), std::move(options));
}

}  // namespace phalanx
