#include "phalanx/comm/backends/mpi/mpi_process.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdlib>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"

namespace phalanx {
namespace {

// In this case Open MPI would print a page about how it was built, and end the process.
void throw_if_srun_gave_no_pmi() {
  if (!env_string("SLURM_PROCID") || !env_string("SLURM_STEP_NUM_TASKS")) return;  // no task of srun's
  for (const char* given : {"PMIX_NAMESPACE", "PMI_FD", "PMI_RANK", "OMPI_COMM_WORLD_RANK"})
    if (env_string(given)) return;
  throw ConfigError(
      "backend mpi: srun has started this rank without PMIx, by which the ranks of Open MPI find each other: use `srun "
      "--mpi=pmix` (`srun --mpi=list` says whether this Slurm has it), or mpirun, or another backend");
}

}  // namespace

void check_mpi(int status, const char* call) {
  if (status == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (mpi().error_string(status, text.data(), &length) != MPI_SUCCESS) length = 0;
  throw CommError(fmt::format(
      "{}: {}", call,
      length > 0 ? std::string(text.data(), static_cast<std::size_t>(length)) : fmt::format("error {}", status)));
}

MpiProcess& MpiProcess::get() {
  // Never destroyed: the memory left here must outlive everything that MPI does until the process has ended.
  static MpiProcess* const process = new MpiProcess;
  int is_finalised = 0;
  check_mpi(mpi().finalized(&is_finalised), "MPI_Finalized");
  if (is_finalised != 0)
    throw ConfigError("backend mpi: the program has called MPI_Finalize, and MPI cannot be started a second time");
  return *process;
}

MpiProcess::MpiProcess() {
  int is_initialised = 0, provided = 0;
  check_mpi(mpi().initialized(&is_initialised), "MPI_Initialized");
  if (is_initialised != 0) {
    check_mpi(mpi().query_thread(&provided), "MPI_Query_thread");
  } else {
    throw_if_srun_gave_no_pmi();
    check_mpi(mpi().init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    check_mpi(mpi().comm_set_errhandler(mpi().comm_world, mpi().errors_return), "MPI_Comm_set_errhandler");
    std::atexit(&MpiProcess::finalise_at_exit);
  }
  if (provided != MPI_THREAD_MULTIPLE)
    throw ConfigError(
        is_initialised != 0
            ? "backend mpi: the program has initialised MPI for fewer threads than MPI_THREAD_MULTIPLE: call "
              "MPI_Init_thread with that, or leave it to this library"
            : "backend mpi: this MPI does not provide MPI_THREAD_MULTIPLE: use one that was built with it, or "
              "another backend");
  check_mpi(mpi().comm_rank(mpi().comm_world, &rank_), "MPI_Comm_rank");
  check_mpi(mpi().comm_size(mpi().comm_world, &size_), "MPI_Comm_size");
  int* largest = nullptr;
  int is_set = 0;
  check_mpi(mpi().comm_get_attr(mpi().comm_world, MPI_TAG_UB, static_cast<void*>(&largest), &is_set),
            "MPI_Comm_get_attr");
  if (is_set != 0) largest_tag_ = *largest;
}

void MpiProcess::finalise_at_exit() {
  int is_finalised = 0;
  if (mpi().finalized(&is_finalised) != MPI_SUCCESS || is_finalised != 0 || get().has_failed_.load()) return;
  mpi().finalize();
}

void MpiProcess::leave(std::vector<MPI_Request> requests, std::shared_ptr<void> memory) {
  const std::lock_guard lock(left_mutex_);
  left_.push_back({std::move(requests), std::move(memory)});
}

void MpiProcess::end_job(const std::string& why) noexcept {
  try {
    const std::string text = fmt::format("phalanx: {}\nphalanx: rank {} ends the job\n", why, rank_);
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  } catch (...) {  // no memory for the text: the job ends all the same
  }
  mpi().abort(mpi().comm_world, 1);
  ::_exit(1);
}

}  // namespace phalanx
