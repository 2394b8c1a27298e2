#include "phalanx/comm/backends/mpi/mpi.h"

#include <fmt/format.h>

#include <array>

#include "phalanx/base/error.h"

#ifdef PHALANX_HAVE_MPI
#include "phalanx/comm/backends/mpi/mpi_backend.h"
#endif

namespace phalanx {

#ifdef PHALANX_HAVE_MPI

std::shared_ptr<Communicator> make_mpi_communicator(std::shared_ptr<Store> store, int rank, int world_size,
                                                    MpiOptions options) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw ConfigError(fmt::format("rank {} of a world of {}: expected ranks from 0", rank, world_size));
  const MpiProcess& process = MpiProcess::get();
  if (process.rank() != rank || process.size() != world_size)
    throw ConfigError(
        fmt::format("backend mpi: this process is rank {} of {}, but MPI calls it rank {} of {}: start all "
                    "ranks with one mpirun or srun, or choose another backend",
                    rank, world_size, process.rank(), process.size()));
  // Every rank makes its communicators in the same order, so all ranks agree on this number.
  const auto serial = store->add(fmt::format("mpi/made/{}", rank), 1);
  auto prefixed = std::make_shared<PrefixStore>(std::move(store), fmt::format("mpi/{}", serial));
  const HeartbeatMonitor peers(prefixed, rank, world_size,
                               {.backend = "mpi",
                                .group = fmt::format("world{}", serial),
                                .heartbeat = heartbeat_limit(options.communicator.heartbeat),
                                .store_rank = options.store_rank,
                                .connect_timeout = options.communicator.first_timeout});
  MpiBackend::Setup setup{.peers = peers,
                          .identity = options.identity.empty() ? ProcessProbe::identity() : std::move(options.identity),
                          .deterministic = options.deterministic,
                          .largest_call = options.largest_call};
  return std::make_shared<Communicator>(std::make_shared<MpiBackend>(std::move(setup)), options.communicator);
}

std::optional<std::string> mpi_library() {
  const MpiTable* table = nullptr;
  try {
    table = &mpi();
  } catch (const ConfigError&) {  // no Open MPI on this node
    return std::nullopt;
  }
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  if (table->get_library_version(text.data(), &length) != MPI_SUCCESS) return "unknown version";
  const std::string version(text.data(), static_cast<std::size_t>(length));
  return version.substr(0, version.find_first_of(",\n"));
}

#else

std::shared_ptr<Communicator> make_mpi_communicator(std::shared_ptr<Store>, int, int, MpiOptions) {
  throw ConfigError(
      "backend mpi: this build has no MPI: install Open MPI (scripts/bootstrap.sh --mpi), configure and "
      "build again, or choose another backend");
}

std::optional<std::string> mpi_library() { return std::nullopt; }

#endif

}  // namespace phalanx
