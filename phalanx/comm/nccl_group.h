// NcclGroup: one NCCL communicator, from its making to its end. Non-blocking throughout: no call of NCCL can hang a
// thread of ours, and abort() ends whatever is under way on the device.
//
// - Calls of one communicator are made one after the other (call()), from any thread; NCCL's order is theirs.
// - abort() returns at once; a thread of its own calls ncclCommAbort, which waits for the device. From then on every
//   call throws, and the group's streams soon run on.
// - A failure of NCCL is a CommError with NCCL's own words.
//
//   auto group = NcclGroup::make(table, streams, id, size, rank, 300s);
//   group->call("all_reduce", [&](NcclComm* comm) { return table->all_reduce(..., comm, stream); });
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "phalanx/comm/device_streams.h"
#include "phalanx/comm/nccl_table.h"

namespace phalanx {

class NcclGroup {
 public:
  struct Setup {
    std::shared_ptr<const NcclTable> table;
    std::shared_ptr<DeviceStreams> streams;
    std::chrono::milliseconds timeout{};  // for making, splitting, and until NCCL has taken a call
  };

  /// Collective over the ranks that hold the same id. give_up() may throw while the others are waited for.
  static std::shared_ptr<NcclGroup> make(Setup setup, const NcclUniqueId& id, int size, int rank,
                                         const std::function<void()>& give_up = {});
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  /// Collective over this group, which must have nothing under way. nullptr for color kNcclNoColor.
  std::shared_ptr<NcclGroup> split(int color, int key, const std::function<void()>& give_up = {});

  /// `what` is named in errors. For several calls in one ncclGroupStart/End, use group_call().
  void call(const char* what, const std::function<NcclResult(NcclComm*)>& body);
  /// Between ncclGroupStart and ncclGroupEnd; the body throws nothing and returns the first result that is no success.
  void group_call(const char* what, const std::function<NcclResult(NcclComm*)>& body);

  /// What NCCL has found out by itself since; empty if all is well. Never blocks.
  std::string async_error();

  void abort() noexcept;
  bool is_aborted() const noexcept { return aborted_.load(std::memory_order_acquire); }

 private:
  explicit NcclGroup(Setup setup) : setup_(std::move(setup)) {}
  NcclConfig config() const;
  std::string text_of(NcclResult result) const;
  void await(const char* what, NcclResult first, NcclComm* comm, const std::function<void()>& give_up) const;
  void throw_if_aborted(const char* what) const;

  Setup setup_;
  NcclComm* comm_ = nullptr;
  std::mutex call_mutex_;
  std::atomic<bool> aborted_{false};
  std::mutex abort_mutex_;
  std::thread aborter_;
};

}  // namespace phalanx
