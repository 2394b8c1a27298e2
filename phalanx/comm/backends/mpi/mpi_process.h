// MPI in this process. There is one MPI to a process by its standard, so there is one of these.
//
// - One thread at a time begins and advances operations: who does not get in comes again. MPI_THREAD_MULTIPLE would let
//   them in together, to wait for each other inside. It is needed all the same: a communicator is made by a thread of
//   its own, in calls that block (MpiBackend::make_comm), beside whoever advances the operations of others.
// - What MPI may still touch when an operation is given up (it can cancel neither collectives nor sends) is left here,
//   and lives until the process ends.
// - Errors come back as status codes, and as CommError from check_mpi(), with MPI's own text.
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
  /// Initialises MPI at the first call, unless the program has. Throws ConfigError if it does not take calls from any
  /// thread, or is over.
  static MpiProcess& get();
  MpiProcess(const MpiProcess&) = delete;
  MpiProcess& operator=(const MpiProcess&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  int largest_tag() const noexcept { return largest_tag_; }

  std::unique_lock<std::mutex> try_enter() { return std::unique_lock(mutex_, std::try_to_lock); }
  std::unique_lock<std::mutex> enter() { return std::unique_lock(mutex_); }

  /// Some group has failed: MPI_Finalize might wait for ever.
  void note_failure() noexcept { has_failed_.store(true); }
  void leave(std::vector<MPI_Request> requests, std::shared_ptr<void> memory);
  /// Says why on standard error and ends all ranks.
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
