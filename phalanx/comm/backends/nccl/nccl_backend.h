// NcclBackend: collectives of CUDA tensors through NCCL, stream-ordered; see nccl.h for what it promises.
//
// Two planes. Data of an accelerator go through NCCL on a stream of the group's own; everything else goes through the
// control backend (shm or gloo) of the same ranks: tensors and byte objects in host memory, barriers, the comparison of
// signatures, news of dead ranks and of aborts, and what a split has to agree on.
//
// An operation with device data, step by step:
//   launch()   the communication stream waits for what the caller's current stream has in hand; NCCL is called;
//              an event marks the end of its kernels. `strict`: nothing yet.
//   advance()  launches what launch() could not: where the call before has not been taken yet, NCCL does not take this
//              one within a moment (nccl_operation.h), or, `strict`, ranks had to agree first. Compares signatures with
//              the other ranks (in the order of issue); looks for errors that NCCL reports; done when the event is.
// A mismatch or a time-out aborts NCCL's communicator, which ends the kernels that wait in vain.
//
// What NCCL lacks is made of its calls in one group: gather, scatter, all_to_all of sends and receives; the uneven
// all_gather and reduce_scatter of one broadcast or reduce per rank. Messages between two ranks match in the order of
// issue and must have the same tag on both sides. Those of a rank to itself are copies.
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
    std::shared_ptr<Backend> control;  // host memory, same ranks; nobody else drives it
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

  struct SelfMessage {  // a rank's message to itself: kept until it is asked for
    int tag = 0;
    DataType dtype = DataType::u8;
    std::int64_t count = 0;
    const void* data = nullptr;
    std::shared_ptr<DeviceEvent> ready;
    std::shared_ptr<DeviceCompletion> consumed;
  };
  std::mutex& self_mutex() { return self_mutex_; }
  std::deque<SelfMessage>& self_messages() { return self_messages_; }

  /// NCCL's calls are made in the order of issue, also when one waits for something.
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
