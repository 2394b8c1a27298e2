// NcclCommunicator: one NCCL communicator, from its making to its end. Non-blocking throughout: no call of NCCL can hang a
// thread of ours, and abort() ends whatever is under way on the device.
//
// - Calls of one communicator are made one after the other, from any thread; NCCL's order is theirs. One has been taken
//   when its kernels are in their stream. That may take long: at a group's first calls NCCL connects the ranks, and so
//   waits for those that have not made the call. Nobody waits for it here: whoever has begun a call asks again.
// - abort(reason) returns at once; a thread of its own calls ncclCommAbort, which waits for the device. From then on
//   every call throws and names the reason, and the group's streams soon run on.
// - A failure of NCCL is a CommError with NCCL's own words.
//
//   auto group = NcclCommunicator::make(table, streams, id, size, rank, 300s);
//   group->begin("all_reduce", [&](NcclComm* comm) { return table->all_reduce(..., comm, stream); });
//   while (!group->is_enqueued()) ...do something else...
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "phalanx/comm/abort_state.h"
#include "phalanx/comm/backends/nccl/nccl_table.h"
#include "phalanx/comm/device/device_streams.h"

namespace phalanx {

class NcclCommunicator {
 public:
  struct Setup {
    std::shared_ptr<const NcclTable> table;
    std::shared_ptr<DeviceStreams> streams;
    std::chrono::milliseconds timeout{};  // for making and splitting, and until NCCL has taken what all ranks call
  };

  /// Collective over the ranks that hold the same id. give_up() may throw while the others are waited for.
  static std::shared_ptr<NcclCommunicator> make(Setup setup, const NcclUniqueId& id, int size, int rank,
                                                const std::function<void()>& give_up = {});
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  /// Collective over this group, which must have nothing under way. nullptr for color kNcclNoColor. If it throws,
  /// this group can no longer be used.
  std::shared_ptr<NcclCommunicator> split(int color, int key, const std::function<void()>& give_up = {});

  /// Makes a call; the one before must have been taken. `what` is named in errors, and outlives the call. Never blocks.
  void begin(const char* what, const std::function<NcclResult(NcclComm*)>& body);
  /// The same between ncclGroupStart and ncclGroupEnd; the body throws nothing and returns the first result that is no
  /// success.
  void begin_group(const char* what, const std::function<NcclResult(NcclComm*)>& body);
  /// Whether NCCL has taken the last call. What goes wrong meanwhile is async_error()'s to tell. Never blocks.
  bool is_enqueued();

  /// What NCCL has found out by itself since; empty if all is well. Never blocks.
  std::string async_error();

  /// The first reason counts.
  void abort(const std::string& reason) noexcept;
  bool is_aborted() const noexcept { return abort_.is_set(); }
  /// After abort(): NCCL puts nothing into any stream any more.
  bool has_ended() const noexcept { return ended_.load(std::memory_order_acquire); }
  std::chrono::milliseconds timeout() const noexcept { return setup_.timeout; }

 private:
  explicit NcclCommunicator(Setup setup) : setup_(std::move(setup)) {}
  NcclConfig config() const;
  std::string text_of(NcclResult result) const;
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
  std::thread aborter_;
};

}  // namespace phalanx
