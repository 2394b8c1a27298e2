// FakeNccl: a test double that fills NCCL's function table (tests only). To a backend it behaves like NCCL:
//
// - A call only enqueues a "kernel" in a stream. The kernels of a communicator move their bytes through a host backend
//   (local or shm), so ranks may be threads or processes.
// - Ranks that call different operations hang until ncclCommAbort. The calls are not compared, and nothing times out.
// - Calls are non-blocking: they return in_progress, and the communicator's state becomes success after a few polls.
//   A call while the state is in_progress is an invalid usage, and so is a call outside of its group.
// - Ranks connect on demand (NCCL_RUNTIME_CONNECT). The first collective of a communicator stays in_progress until all
//   ranks have called one. The first message between two ranks stays in_progress until both have called it.
// - A split writes the new communicator when it has finished or failed.
// - Sends and receives of one group run together; those of different groups run one after the other. There are no tags,
//   and a send waits for its receive.
// - Streams are those of FakeStreams, unless a FakeNcclDevice says otherwise.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/backends/nccl/nccl_table.h"

namespace phalanx {

struct FakeNcclComm;
struct FakeGroup;

/// Where the kernels run.
class FakeNcclDevice {
 public:
  struct Range {
    const void* begin = nullptr;
    std::size_t bytes = 0;
    bool is_write = false;
  };
  virtual ~FakeNcclDevice() = default;
  /// `name` is that of the call: "all_reduce", ... The kernel uses these ranges, by way of kernel_view().
  virtual void launch(DeviceStream stream, const char* name, const std::vector<Range>& ranges,
                      std::function<void()> kernel);
  /// The address by which a kernel uses memory of the device.
  virtual void* kernel_view(const void* address) const { return const_cast<void*>(address); }
};

/// One rank's library.
class FakeNccl {
 public:
  /// `transport` moves the bytes between the ranks that create a communicator.
  explicit FakeNccl(std::shared_ptr<Backend> transport,
                    std::shared_ptr<FakeNcclDevice> device = std::make_shared<FakeNcclDevice>());
  ~FakeNccl();
  std::shared_ptr<const NcclTable> table();

  /// From now on every communicator has this state.
  void fail_with(NcclResult result) { failure_.store(static_cast<int>(result)); }
  /// The creation of a communicator never finishes.
  void never_connect() { connects_ = false; }
  /// Calls succeed at once and do not wait for connections: kernels are launched in the order of the calls.
  void take_at_once() { takes_at_once_ = true; }
  /// The calls so far, in order: "all_reduce", "group(send 1, recv 1)", "split", "abort", ...
  std::vector<std::string> calls() const;
  /// The number of calls that NCCL does not allow.
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
  std::shared_ptr<FakeNcclDevice> device_;
  std::atomic<int> failure_{0};
  std::atomic<int> misuses_{0};
  bool connects_ = true, takes_at_once_ = false;
  mutable std::mutex mutex_;
  std::vector<std::string> calls_;
  std::vector<std::unique_ptr<FakeNcclComm>> comms_;
};

}  // namespace phalanx
