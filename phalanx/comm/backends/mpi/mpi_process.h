// MpiProcess: MPI in this process. The standard allows one MPI per process, so there is one of these.
//
// - One thread at a time starts and advances operations. A thread that cannot enter tries again later.
//   MPI_THREAD_MULTIPLE would admit them together, but they would wait for each other inside. It is still needed: a
//   separate thread makes a communicator, in blocking calls (MpiBackend::make_comm), while other threads advance
//   operations.
// - MPI can cancel neither collectives nor sends. So the memory that MPI may still access when an operation is given up
//   is left here, and lives until the process ends.
// - MPI calls return errors as status codes. check_mpi() turns them into CommError with MPI's own text.
#pragma once

#include <mpi.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "phalanx/comm/backends/mpi/mpi_table.h"

namespace phalanx {

class MpiProcess {
 public:
  /// The first call initialises MPI, unless the program has. Throws ConfigError if MPI does not accept calls from any
  /// thread, or is finalised.
  static MpiProcess& get();
  MpiProcess(const MpiProcess&) = delete;
  MpiProcess& operator=(const MpiProcess&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  int largest_tag() const noexcept { return largest_tag_; }

  std::unique_lock<std::mutex> try_enter() { return std::unique_lock(mutex_, std::try_to_lock); }
  std::unique_lock<std::mutex> enter() { return std::unique_lock(mutex_); }

  /// Some group has failed: MPI_Finalize might wait for ever, so it will not be called.
  void note_failure() noexcept { has_failed_.store(true); }
  void leave(std::vector<MPI_Request> requests, std::shared_ptr<void> memory);
  /// Writes the reason to standard error and ends all ranks.
  [[noreturn]] void end_job(const std::string& why) noexcept;

 private:
  MpiProcess();
  static void finalise_at_exit();

  struct Left {
    std::vector<MPI_Request> requests;
    std::shared_ptr<void> memory;
  };
  int rank_ = 0;
  int size_ = 1;
  int largest_tag_ = 32767;
  std::mutex mutex_;
  std::atomic<bool> has_failed_{false};
  std::mutex left_mutex_;
  std::vector<Left> left_;
};

/// Throws CommError("MPI_Iallreduce: MPI_ERR_TRUNCATE: message truncated") unless status is MPI_SUCCESS.
void check_mpi(int status, const char* call);

}  // namespace phalanx
