// CollectiveSchedule: a hierarchical collective, as a list of what this rank does and in which order it may.
//
// A step is a collective inside the node, a message, a piece of work in memory, or an operation of the flat backend.
// Each waits for the steps that it names, which stand before it in the list; otherwise steps go on side by side:
//   - collectives inside the node one after the other, in the order of the list, which is the same on all its ranks;
//   - messages to (or from) one rank begin in the order of the list, and at most kMessagesAtOnce are under way.
// So a piece can be on the wire while the one before it is passed on inside. No rank waits for a cycle if all lists put
// their steps in an order that agrees with some order of the whole operation (here: by pieces).
#pragma once

#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#include "phalanx/comm/hierarchical/hierarchical_backend.h"

namespace phalanx {

class CollectiveSchedule {
 public:
  using Id = int;
  static constexpr Id kNone = -1;  // done before it began
  using After = std::initializer_list<Id>;

  explicit CollectiveSchedule(HierarchicalBackend& backend);
  ~CollectiveSchedule();
  CollectiveSchedule(const CollectiveSchedule&) = delete;
  CollectiveSchedule& operator=(const CollectiveSchedule&) = delete;

  /// Ranks (root) are those of the node.
  Id intra_node(OperationDescription description, After after = {});
  /// With any rank of the group, by whichever way leads there.
  Id send(const void* data, std::size_t bytes, int peer, After after = {});
  Id receive(void* data, std::size_t bytes, int peer, After after = {});
  Id work(std::function<void()> body, After after = {});
  Id flat(const OperationDescription& description);  // the whole of it, or compare_only
  std::byte* memory(std::size_t bytes);

  /// A bounded piece of everything that can go on; done when all steps are.
  Progress advance();
  bool add_doorbells(std::vector<Doorbell>& bells);
  void check_peers();
  bool retire() noexcept;
  std::vector<int> missing_ranks();  // of the group

 private:
  enum class Kind : std::uint8_t { intra_node, message, work, flat };
  enum class State : std::uint8_t { waits, runs, done };
  struct Step {
    Kind kind = Kind::work;
    State state = State::waits;
    bool is_intra_node = false;  // which of the two backends
    std::size_t sent = 0;        // bytes that this rank gives to others
    OperationDescription description;
    std::function<void()> body;
    std::vector<Id> after;
    std::unique_ptr<Operation> operation;
  };
  struct Way {  // messages with one rank in one direction
    int running = 0;
    std::uint64_t closed_in = 0;  // the pass in which an earlier one had to wait
  };
  static constexpr int kMessagesAtOnce = 3;
  static constexpr std::size_t kWindow = 256;  // steps that are looked at

  Id add(Step step, After after);
  Id message(bool is_send, void* data, std::size_t bytes, int peer, After after);
  Way& way_of(const Step& step);
  bool may_start(const Step& step) const;
  bool start(Step& step);
  template <class Body>
  void for_each_running(Body body);

  HierarchicalBackend& backend_;
  std::deque<Step> steps_;  // never moved: operations point into them
  std::size_t first_ = 0;   // all before it are done
  std::uint64_t pass_ = 0;
  std::vector<Way> ways_;  // [2 * rank + is_send]
  std::vector<std::pair<std::size_t, std::unique_ptr<std::byte[]>>> memory_;
};

/// False for what the flat backend does as well; the same on all ranks.
bool uses_hierarchy(const HierarchicalBackend& backend, const OperationDescription& description);
/// The data of a collective, once all ranks are known to ask alike.
void add_data_steps(HierarchicalBackend& backend, const OperationDescription& description,
                    CollectiveSchedule& schedule);
void add_reduction_steps(HierarchicalBackend& backend, const OperationDescription& description,
                         CollectiveSchedule& schedule);

}  // namespace phalanx
