// MpiRequests: MPI calls in flight, with the memory that they use and that is not the caller's.
//
// One thread at a time uses it, inside MpiProcess::enter(). Unfinished requests of a destroyed MpiRequests are left to
// the process, with their memory: MPI may still write there.
//
//   std::byte* box = requests.bytes(64);
//   requests.call("MPI_Irecv", mpi().irecv(box, 64, mpi().byte, peer, tag, comm, requests.next()));
//   // ...
//   if (requests.are_done()) use(box);      // throws if a request failed
//   requests.clear();                       // frees the memory
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "phalanx/comm/backends/mpi/mpi_process.h"
#include "phalanx/comm/types.h"

namespace phalanx {

class MpiRequests {
 public:
  MpiRequests() = default;
  ~MpiRequests() { leave(); }
  MpiRequests(const MpiRequests&) = delete;
  MpiRequests& operator=(const MpiRequests&) = delete;

  /// Where the next MPI call stores its request. Valid until the following call of next().
  MPI_Request* next();
  /// Checks the status that the MPI call returned.
  void call(const char* name, int status);

  /// Memory and arguments that live as long as the requests. Never null.
  std::byte* bytes(std::size_t count);
  const int* ints(std::vector<int> values);
  void keep(std::shared_ptr<void> memory) { memory_->others.push_back(std::move(memory)); }

  bool are_done();  // asks MPI; throws CommError
  bool is_empty() const noexcept { return requests_.empty(); }
  void clear();  // REQUIRES: they are done
  void leave() noexcept;

 private:
  struct Memory {
    std::vector<std::unique_ptr<std::byte[]>> bytes;
    std::vector<std::unique_ptr<std::vector<int>>> ints;
    std::vector<std::shared_ptr<void>> others;
  };
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
};

/// The MPI type for moving elements of `type`: only their size counts.
MPI_Datatype mover_of(DataType type);

}  // namespace phalanx
