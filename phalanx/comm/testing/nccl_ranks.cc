#include "phalanx/comm/testing/nccl_ranks.h"

#include <fmt/format.h>

#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "phalanx/comm/backends/local_shm/local_backend.h"

namespace phalanx {

std::string run_nccl_threads(int world, const NcclBody& body, const NcclOptions& options,
                             FakeStreams::Kernels kernels) {
  const auto control = make_local_backends(world);
  const auto transport = make_local_backends(world);
  std::mutex mutex;
  std::string failures;
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < control.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        NcclRank rank{.streams = std::make_shared<FakeStreams>(kernels)};
        rank.nccl = std::make_shared<FakeNccl>(transport[r]);
        if (kernels == FakeStreams::Kernels::one_at_a_time) rank.nccl->take_at_once();
        rank.comm = make_nccl_communicator(control[r], -1, rank.nccl->table(), rank.streams, options);
        rank.comm->barrier();  // all ranks must exist before a rank may fail
        try {
          body(rank);
        } catch (const std::exception& error) {
          rank.comm->abort(error.what());
          throw;
        }
        rank.comm.reset();
        if (rank.nccl->misuses() != 0) throw std::runtime_error("NCCL was called in a way that it does not allow");
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        failures += fmt::format("rank {}: {}\n", r, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

}  // namespace phalanx
