#include "phalanx/comm/backends/local_shm/local.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/error_serialization.h"
#include "phalanx/base/log.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/comm/backends/local_shm/local_backend.h"

namespace phalanx {
namespace {

// Rethrows the error with the rank in its message; an error of ours keeps its class.
[[noreturn]] void rethrow_from_rank(const std::exception_ptr& error, int rank) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    throw_serialized_error(serialize_error(ours), fmt::format("rank {}: ", rank));
  }
}

}  // namespace

void run_local_ranks(int world_size, const std::function<void(const std::shared_ptr<Communicator>&)>& body,
                     const CommunicatorOptions& options) {
  if (world_size < 1) throw Error(fmt::format("run_local_ranks: {} ranks; expected at least 1", world_size));
  std::vector<std::shared_ptr<Communicator>> world;
  const auto backends = make_local_backends(world_size);
  for (const auto& backend : backends) world.push_back(std::make_shared<Communicator>(backend, options));

  std::mutex mutex;
  std::exception_ptr first_error;
  int first_rank = -1;
  const auto run_rank = [&](int rank) {
    // The rank threads must not each start a pool of worker threads.
    at::set_num_threads(1);
    log::set_thread_rank(rank, world_size);
    try {
      const auto& comm = world[static_cast<std::size_t>(rank)];
      body(comm);
      // The others may still wait for operations that it left in flight.
      if (comm->is_idle()) mark_local_rank_gone(*backends[static_cast<std::size_t>(rank)]);
    } catch (...) {
      {
        const std::lock_guard lock(mutex);
        if (!first_error) {
          first_error = std::current_exception();
          first_rank = rank;
        }
      }
      std::string why = "an exception of an unknown type";
      try {
        throw;
      } catch (const std::exception& e) {
        why = e.what();
      } catch (...) {
      }
      world[static_cast<std::size_t>(rank)]->abort(why);
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank)
    threads.push_back(start_thread("a rank", [&, rank] { run_rank(rank); }));
  for (std::thread& thread : threads) thread.join();
  if (first_error) rethrow_from_rank(first_error, first_rank);
}

}  // namespace phalanx
