// MpiRequests: calls of MPI under way, with the memory that they use and that is not the caller's.
//
// Used by one thread at a time, inside MpiProcess::enter(). Requests that are not done when this goes away are left to
// the process, with their memory: MPI may still write there.
//
//   std::byte* box = requests.bytes(64);
//   requests.call("MPI_Irecv", MPI_Irecv(box, 64, MPI_BYTE, peer, tag, comm, requests.next()));
//   ...
//   if (requests.are_done()) use(box);      // throws what went wrong
//   requests.clear();                       // lets go of the memory
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

  /// Where the next call puts its request; valid until the one after.
  MPI_Request* next();
  /// The status that the call returned.
  void call(const char* name, int status);

  /// Memory and arguments that live as long as the requests. Never null.
  std::byte* bytes(std::size_t count);
  const int* ints(std::vector<int> values);
  void keep(std::shared_ptr<void> memory) { memory_->others.push_back(std::move(memory)); }

  bool are_done();  // asks MPI; throws CommError
  bool is_empty() const noexcept { return requests_.empty(); }
  void clear();  // when they are done
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

/// For moving elements of `type`: only their size counts.
MPI_Datatype mover_of(DataType type);

}  // namespace phalanx
