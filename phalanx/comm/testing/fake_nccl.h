// FakeNccl: NCCL's table filled by a double (tests only). It behaves as NCCL does as far as a backend can see:
//
// - A call only puts a "kernel" into a stream. Kernels of a communicator move their bytes through a host backend (local
//   or shm), so ranks may be threads or processes.
// - Ranks that call different things hang, until ncclCommAbort. Nothing is compared for the caller, nothing times out.
// - Calls are non-blocking: they answer in_progress, and the communicator's state becomes success after a few looks.
//   A call made while the state is in_progress is an invalid usage, as is one outside of its group.
// - Ranks are connected when they are needed: the first collective of a communicator stays in_progress until all ranks
//   have called one, the first message between two ranks until both have called it (NCCL_RUNTIME_CONNECT).
// - A split writes down the new communicator when it is through, or has failed.
// - Sends and receives of one group run together; those of different groups one after the other. There are no tags, and
//   a send waits for its receive.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/backends/nccl/nccl_table.h"

namespace phalanx {

struct FakeNcclComm;
struct FakeGroup;

/// One rank's library.
class FakeNccl {
 public:
  /// transport: the bytes' way between the ranks that will make a communicator.
  explicit FakeNccl(std::shared_ptr<Backend> transport);
  ~FakeNccl();
  std::shared_ptr<const NcclTable> table();

  /// From now on every communicator's state is this.
  void fail_with(NcclResult result) { failure_.store(static_cast<int>(result)); }
  /// The making of a communicator is never finished.
  void never_connect() { connects_ = false; }
  /// Calls are taken at once, and ranks need not be connected: kernels are launched in the order of the calls.
  void take_at_once() { takes_at_once_ = true; }
  /// What was called, in order: "all_reduce", "group(send 1, recv 1)", "split", "abort", ...
  std::vector<std::string> calls() const;
  /// Calls that NCCL would not have allowed.
  int misuses() const { return misuses_.load(); }

 private:
  friend struct FakeNcclComm;
  void note(std::string call);
  FakeNcclComm* add(std::shared_ptr<Backend> transport);
  bool may_call(FakeNcclComm* comm);
  NcclResult submit(FakeNcclComm* comm, DeviceStream stream, OperationDescription description, const void* copy_from,
                    std::string name);
  NcclResult end_group();
  void put(FakeNcclComm* comm, FakeGroup& group) const;
  NcclResult split(FakeNcclComm* comm, int color, int key, NcclComm** result);
  NcclResult state_of(FakeNcclComm* comm, NcclResult* state);
  NcclResult abort(FakeNcclComm* comm);

  std::shared_ptr<Backend> transport_;
  std::atomic<int> failure_{0};
  std::atomic<int> misuses_{0};
  bool connects_ = true, takes_at_once_ = false;
  mutable std::mutex mutex_;
  std::vector<std::string> calls_;
  std::vector<std::unique_ptr<FakeNcclComm>> comms_;
};

}  // namespace phalanx
