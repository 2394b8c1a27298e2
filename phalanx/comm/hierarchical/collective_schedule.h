// CollectiveSchedule: what one rank does in one hierarchical operation: a list of steps, and which of them wait for
// which.
//
// A step is an operation of a backend, a message, a copy, or work in host memory. A step waits for the steps that it
// names, which stand before it in the list. Apart from that, steps run side by side:
//   - Collectives inside the node run one after the other, in the order of the list. All ranks of a node add the same
//     collectives in the same order.
//   - Messages to one rank, and messages from one rank, begin in the order of the list. At most kMessagesAtOnce of each
//     are in flight.
// So one piece can be on the wire while the piece before it is passed on inside the node. Only the next steps_at_once
// steps of the list are looked at. A message waits for its peer, so the lists of all ranks must follow one order of the
// whole operation, as they do here (pieces, then distances between nodes). Then the first step that is not done, of all
// ranks, can always go on.
//
//   const auto got = schedule.receive(data, bytes, 3);        // from rank 3 of the group
//   schedule.send(data, bytes, 7, {got});                     // then to rank 7
//   while (schedule.advance() != Progress::done) { /* wait */ }
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "phalanx/comm/hierarchical/hierarchical_backend.h"

namespace phalanx {

class CollectiveSchedule {
 public:
  using Id = int;
  static constexpr Id kNone = -1;  // a step that is done before it began
  using After = std::vector<Id>;
  /// The memory of a message. `caller`: the memory that the operation is about, on the device if the operation is.
  enum class Memory : std::uint8_t { caller, host };

  /// on_device: the operation moves device memory. REQUIRES: then the backend has a device.
  explicit CollectiveSchedule(HierarchicalBackend& backend, bool on_device = false);
  ~CollectiveSchedule();
  CollectiveSchedule(const CollectiveSchedule&) = delete;
  CollectiveSchedule& operator=(const CollectiveSchedule&) = delete;

  bool on_device() const { return on_device_; }

  /// A collective of this node. Its root is a local rank.
  Id intra_node(OperationDescription description, After after = {});
  /// Any operation of one of the backends: a whole collective, its comparison, or messages that run together.
  Id operation(Backend& transport, OperationDescription description, After after = {});
  /// A message with any other rank of the group.
  Id send(const void* data, std::size_t bytes, int peer, After after = {}, Memory memory = Memory::caller);
  Id receive(void* data, std::size_t bytes, int peer, After after = {}, Memory memory = Memory::caller);
  /// A copy within the memory of the operation. On a device, between any two of device memory and memory().
  Id copy(void* to, const void* from, std::size_t bytes, After after = {});
  /// Work in host memory, about as much as a chunk.
  Id work(std::function<void()> body, After after = {});
  /// Done when all of `after` are.
  Id all(After after);
  /// Host memory (pinned, if there is a device) that lives as long as the schedule.
  std::byte* memory(std::size_t bytes);

  /// Does a bounded piece of everything that can go on. done: all steps are done.
  Progress advance();
  bool add_doorbells(std::vector<Doorbell>& bells);
  void check_peers();
  bool retire() noexcept;
  std::vector<int> missing_ranks();  // ranks of the group

 private:
  enum class Kind : std::uint8_t { collective, message, operation, copy, work };
  enum class State : std::uint8_t { waits, runs, done };
  struct Step {
    Kind kind = Kind::work;
    State state = State::waits;
    Backend* transport = nullptr;
    std::size_t sent = 0;  // bytes of the caller's data that this rank gives to the transport
    OperationDescription description;
    std::function<void()> body;
    After after;
    std::unique_ptr<Operation> operation;
    std::shared_ptr<DeviceEvent> copied;
  };
  struct Way {  // the messages with one rank in one direction
    int running = 0;
    std::uint64_t closed_in = 0;  // the pass in which an earlier message had to wait
  };
  static constexpr int kMessagesAtOnce = 3;

  Id add(Step step, After after);
  Id message(bool is_send, void* data, std::size_t bytes, int peer, After after, Memory memory);
  bool is_intra_node(const Step& step) const { return step.transport == backend_.intra_node(); }
  Way& way_of(const Step& step);
  bool may_start(const Step& step) const;
  bool start(Step& step);
  bool start_message(Step& step);
  Progress poll(Step& step);
  template <class Body>
  void for_each_running(Body body);

  // The steps that advance() looks at.
  std::size_t window_end() const { return std::min(steps_.size(), first_ + backend_.tuning().steps_at_once); }

  HierarchicalBackend& backend_;
  const bool on_device_;
  std::deque<Step> steps_;  // never moved: operations point into them
  std::size_t first_ = 0;   // all steps before it are done
  std::uint64_t pass_ = 0;
  std::vector<Way> ways_;  // [2 * rank + is_send]
  std::vector<std::pair<std::size_t, std::shared_ptr<std::byte>>> memory_;
};

/// False if the flat backend does the whole operation as well. The same on all ranks.
bool uses_hierarchy(const HierarchicalBackend& backend, const OperationDescription& description, bool on_device);
/// Adds the steps of a verb that moves data without reducing them.
/// REQUIRES: all ranks are known to call the same.
void add_data_steps(HierarchicalBackend& backend, const OperationDescription& description,
                    CollectiveSchedule& schedule);
/// Adds the steps of a reduction in host memory, in rank order.
void add_reduction_steps(HierarchicalBackend& backend, const OperationDescription& description,
                         CollectiveSchedule& schedule);
/// Adds the steps of a reduction in device memory: the backend of the node reduces there, the host between nodes.
/// `scratch` is device memory of node_sum_scratch_bytes().
void add_node_sum_steps(HierarchicalBackend& backend, const OperationDescription& description,
                        CollectiveSchedule& schedule, std::byte* scratch);
std::size_t node_sum_scratch_bytes(HierarchicalBackend& backend, const OperationDescription& description);

}  // namespace phalanx
