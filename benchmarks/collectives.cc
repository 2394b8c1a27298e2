// `phalanx bench comm` with Open MPI for comparison: the same options, and `openmpi` among the backends.
//
//   collectives --ranks 2 --backends shm,heap,symmetric,c10d,openmpi
//   collectives --ranks 2 --backends mpi,openmpi --ops all_reduce --sizes 64K,1M
//
// mpirun starts the ranks, because MPI's own calls need it. If our `mpi` is not measured too, MPI is initialised for
// one thread, which is its fastest mode.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "benchmarks/open_mpi_baseline.h"
#include "cli/bench_arguments.h"
#include "cli/command.h"
#include "cli/worker/bench_worker.h"
#include "phalanx/base/error.h"

namespace {

using phalanx::cli::Arguments;

// Replaces this process by mpirun, which starts this program again as each of the ranks.
[[noreturn]] void become_mpirun(const Arguments& arguments) {
  std::string ranks = phalanx::cli::parse_bench_arguments(arguments).ranks;
  if (ranks.empty()) ranks = "2";
  std::vector<std::string> words{"mpirun", "-np", ranks, "--oversubscribe", "--bind-to", "none"};
  words.push_back(std::filesystem::read_symlink("/proc/self/exe"));
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  execvp("mpirun", pointers.data());
  throw phalanx::Error(
      fmt::format("mpirun cannot be started: {} (Debian: openmpi-bin); without Open MPI: phalanx bench "
                  "comm",
                  std::strerror(errno)));
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments(argv + 1, argv + argc);
  try {
    if (!arguments.empty() && (arguments[0] == "-h" || arguments[0] == "--help")) {
      fmt::print("{}", phalanx::cli::kBenchHelp);
      return 0;
    }
    if (std::getenv("OMPI_COMM_WORLD_RANK") == nullptr) become_mpirun(arguments);
    return phalanx::cli::bench_worker(arguments, {phalanx::benchmarks::open_mpi_baseline()});
  } catch (const std::exception& error) {
    fmt::print(stderr, "collectives: {}\n", error.what());
    return dynamic_cast<const phalanx::UsageError*>(&error) != nullptr ? 2 : 1;
  }
}
