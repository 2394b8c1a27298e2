// NcclCommunicator: one NCCL communicator, from creation to end. It is non-blocking: no NCCL call can hang a thread of
// ours, and abort() ends whatever runs on the device.
//
// - Calls of one communicator are made one after the other, from any thread; NCCL executes them in that order. NCCL has
//   taken a call when its kernels are in their stream. That may take long: at a group's first calls NCCL connects the
//   ranks, so it waits for those that have not made the call. No thread blocks for it: the caller polls is_enqueued().
// - abort(reason) returns at once. A separate thread calls ncclCommAbort, which waits for the device. From then on
//   every call throws and names the reason, and the group's streams soon continue.
// - A failure of NCCL is a CommError with NCCL's own text.
//
//   auto group = NcclCommunicator::make({table, streams, 300s}, id, size, rank);
//   group->begin("all_reduce", [&](NcclComm* comm) {
//     return table->all_reduce(data, data, count, NcclType::float32, NcclOp::sum, comm, stream);
//   });
//   while (!group->is_enqueued()) std::this_thread::yield();   // or do something else
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/comm/abort_state.h"
#include "phalanx/comm/backends/nccl/nccl_table.h"
#include "phalanx/comm/device/device_streams.h"

namespace phalanx {

class NcclCommunicator {
 public:
  struct Setup {
    std::shared_ptr<const NcclTable> table;
    std::shared_ptr<DeviceStreams> streams;
    std::chrono::milliseconds timeout{};  // for creation and split, and until NCCL has taken a call that all ranks made
  };

  /// Collective over the ranks that hold the same id. give_up() is called while waiting for the others; it may throw to
  /// give up.
  static std::shared_ptr<NcclCommunicator> make(Setup setup, const NcclUniqueId& id, int size, int rank,
                                                const std::function<void()>& give_up = {});
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  /// Collective over this group. Returns nullptr for color kNcclNoColor. If it throws, this group can no longer be
  /// used.
  /// REQUIRES: nothing is in flight on this group.
  std::shared_ptr<NcclCommunicator> split(int color, int key, const std::function<void()>& give_up = {});

  /// Makes a call. Never blocks. Errors name `what`, which outlives the call.
  /// REQUIRES: NCCL has taken the previous call.
  void begin(const char* what, const std::function<NcclResult(NcclComm*)>& body);
  /// The same between ncclGroupStart and ncclGroupEnd. The body throws nothing and returns the first result that is not
  /// a success.
  void begin_group(const char* what, const std::function<NcclResult(NcclComm*)>& body);
  /// Whether NCCL has taken the last call. Never blocks. async_error() reports what goes wrong meanwhile.
  bool is_enqueued();

  /// An error that NCCL has detected since; empty if all is well. Never blocks.
  std::string async_error();

  /// Later reasons are ignored.
  void abort(const std::string& reason) noexcept;
  bool is_aborted() const noexcept { return abort_.is_set(); }
  /// After abort(): NCCL puts nothing into any stream any more.
  bool has_ended() const noexcept { return ended_.load(std::memory_order_acquire); }
  std::chrono::milliseconds timeout() const noexcept { return setup_.timeout; }

 private:
  explicit NcclCommunicator(Setup setup) : setup_(std::move(setup)) {}
  NcclConfig config() const;
  std::string text_of(NcclResult result) const;
  // Calls is_done() until it is true. Throws after the timeout, or what `give_up` throws.
  void poll_until(const char* what, const std::function<void()>& give_up, const std::function<bool()>& is_done) const;
  void await(const char* what, NcclResult first, NcclComm* comm, const std::function<void()>& give_up) const;
  void throw_if_aborted(const char* what) const;
  std::unique_lock<std::mutex> lock_for(const char* what);

  Setup setup_;
  NcclComm* comm_ = nullptr;
  std::mutex call_mutex_;
  const char* last_call_ = "";
  NcclResult last_result_ = NcclResult::success;
  AbortState abort_;
  std::atomic<bool> ended_{false};
  // Of a split that failed: NCCL may write to its communicator until this group's abort is through.
  std::shared_ptr<NcclCommunicator> left_behind_;
  std::vector<std::shared_ptr<NcclCommunicator>> no_groups_;  // of splits in which this rank took no part
  std::thread aborter_;
};

}  // namespace phalanx
