// NcclBackend: collectives of CUDA tensors through NCCL, stream-ordered. nccl.h describes its guarantees.
//
// Data plane: accelerator data goes through NCCL, on a stream that the group owns. Control plane: everything else goes
// through the control backend (shm or gloo) of the same ranks. That is: tensors and byte objects in host memory,
// barriers, the comparison of signatures, news of dead ranks and of aborts, and the agreement of a split.
//
// The steps of an operation with device data:
//   launch()   The communication stream waits for the work queued on the caller's current stream. NCCL is called. An
//              event marks the end of its kernels. `strict`: nothing yet.
//   advance()  Launches what launch() could not: NCCL has not taken the previous call yet, or does not take this one
//              within a moment (nccl_operation.h), or, `strict`, the ranks must agree first. Compares signatures with
//              the other ranks, in issue order. Checks for errors that NCCL reports. Done when the event is.
// A mismatch or a time-out aborts NCCL's communicator, which ends the kernels that wait in vain.
//
// Operations that NCCL lacks are several NCCL calls in one NCCL group: gather, scatter, all_to_all are sends and
// receives; the uneven all_gather and reduce_scatter are one broadcast or reduce per rank. Messages between two ranks
// match in issue order and must have the same tag on both sides. A rank's messages to itself are copies.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "phalanx/comm/abort_state.h"
#include "phalanx/comm/backend.h"
#include "phalanx/comm/backends/nccl/nccl_communicator.h"
#include "phalanx/comm/backends/nccl/signature_window.h"
#include "phalanx/comm/device/device_completion.h"
#include "phalanx/comm/device/device_streams.h"

namespace phalanx {

class NcclBackend final : public Backend {
 public:
  struct Setup {
    std::shared_ptr<const NcclTable> table;
    std::shared_ptr<DeviceStreams> streams;
    std::shared_ptr<Backend> control;  // host memory, same ranks; only this object drives it
    std::shared_ptr<NcclCommunicator> group;
    int cuda_device = -1;
    bool strict = false;
    std::vector<int> names;  // for error texts; empty: 0, 1, ...
  };
  explicit NcclBackend(Setup setup);
  ~NcclBackend() override;

  int rank() const noexcept override { return setup_.control->rank(); }
  int size() const noexcept override { return setup_.control->size(); }
  BackendTraits traits() const noexcept override {
    return {.name = "nccl",
            .host_only = setup_.cuda_device < 0,
            .oversubscribed = setup_.control->traits().oversubscribed,
            .has_tags = false,
            .stream_ordered = true,
            .cuda_device = setup_.cuda_device};
  }
  std::unique_ptr<Operation> start(const OperationDescription& description) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  std::shared_ptr<Backend> split_host(const SplitRequest& request) override;
  void abort(const std::string& reason) noexcept override;
  void check_ranks() override { setup_.control->check_ranks(); }

  // For the operations.
  const NcclTable& table() const { return *setup_.table; }
  DeviceStreams& streams() { return *setup_.streams; }
  const std::shared_ptr<DeviceStreams>& shared_streams() const { return setup_.streams; }
  DeviceStream stream() const { return stream_; }
  NcclCommunicator& group() { return *setup_.group; }
  Backend& control() { return *setup_.control; }
  SignatureWindow& window() { return window_; }
  bool strict() const { return setup_.strict; }
  void throw_if_aborted() const { abort_.throw_if_set(); }
  int name_of(int rank) const { return setup_.names.empty() ? rank : setup_.names[static_cast<std::size_t>(rank)]; }

  struct SelfMessage {  // a rank's message to itself: stored until it is received
    int tag = 0;
    DataType dtype = DataType::u8;
    std::int64_t count = 0;
    const void* data = nullptr;
    std::shared_ptr<DeviceEvent> ready;
    std::shared_ptr<DeviceCompletion> consumed;
  };
  std::mutex& self_mutex() { return self_mutex_; }
  std::deque<SelfMessage>& self_messages() { return self_messages_; }

  /// Turns make NCCL's calls happen in issue order, even when one of them waits for something.
  std::uint64_t take_turn() { return next_turn_++; }
  bool is_turn(std::uint64_t turn) const { return turn == launched_turns_.load(std::memory_order_acquire); }
  void end_turn() { launched_turns_.fetch_add(1, std::memory_order_acq_rel); }

 private:
  Setup setup_;
  DeviceStream stream_ = nullptr;
  SignatureWindow window_;
  std::mutex self_mutex_;
  std::deque<SelfMessage> self_messages_;
  std::uint64_t next_turn_ = 0;
  std::atomic<std::uint64_t> launched_turns_{0};
  AbortState abort_;
};

std::unique_ptr<Operation> make_nccl_collective(NcclBackend& backend, const OperationDescription& description);
std::unique_ptr<Operation> make_nccl_messages(NcclBackend& backend, const OperationDescription& description);

}  // namespace phalanx
