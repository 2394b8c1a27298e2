// Coordinator: decides which nodes form a round, when ranks restart, and when all is over. It knows no sockets, no
// processes and no clock: it is told what happened and when, and answers with orders for every node. One node hosts it.
//
// - gathering: a round starts at once with max_nodes nodes, or last_call after min_nodes have come. Too few within
//   join_timeout end the job; the error names who is missing.
// - Node ranks are as given (static), or: the host first, then who had a place in the last round, then in order of
//   arrival. Global ranks follow from them: the sum of the local world sizes of the nodes before.
// - A failed rank or a lost node stops the ranks of all nodes; they restart in a new round while restarts are left. A
//   node that comes while there is room, or that leaves while enough others remain, restarts them too and costs none.
// - Where the ranks of a leaving node all end with 0, those of the others may be ending with them: they restart when
//   one fails, or after `drain_timeout`; if all end with 0 before, the job has.
// - A signal to one node of a job that cannot do without it goes to the ranks of all. A node that only waits may always
//   go.
// - A node that is refused (wrong world size, a node rank given twice, ...) is told why; the others are not disturbed.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/launch/supervisor/rendezvous_messages.h"

namespace phalanx {

struct CoordinatorOptions {
  int min_nodes = 1;
  int max_nodes = 1;
  bool fixed_node_ranks = false;  // every node says which one it is
  int max_restarts = 0;
  std::string run_id = "none";
  std::chrono::milliseconds join_timeout{600'000};
  std::chrono::milliseconds last_call{30'000};
  std::chrono::milliseconds drain_timeout{30'000};  // for the others' ranks to end with those of a node that leaves
  std::string address;                              // where nodes join, for errors
};

class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;

  Coordinator(CoordinatorOptions options, Clock::time_point now);

  void handle(int member, const NodeMessage& message, Clock::time_point now);
  /// The node gives no sign of life since `silent`; `how` is for people.
  void lost(int member, const std::string& how, std::chrono::duration<double> silent, Clock::time_point now);
  void tick(Clock::time_point now);
  /// When tick() has something to do; time_point::max() where nothing is due.
  Clock::time_point next_deadline() const;

  /// What has been decided since the last call.
  std::vector<Order> take_orders();
  bool has_ended() const { return state_ == State::ended; }
  /// Ends the job, whatever runs: orders cannot be relied on any more, for the reason given.
  void give_up(const std::string& reason);
  /// Nodes that have joined and neither left nor were lost or refused.
  std::vector<int> present() const;

 private:
  enum class State { gathering, preparing, running, stopping, ended };
  enum class StopReason { failure, membership, signal };
  struct Member {
    NodeJoin join;
    int last_node_rank = -1;
    bool assigned = false;  // in this round
    bool done = false;      // its ranks have all ended with 0
    bool stopped = false;   // no rank of the round runs
    bool leaving = false;
    std::vector<WorkerFailure> failures;
  };

  void joined(int member, const NodeJoin& join, Clock::time_point now);
  void leaving(int member, int signal, Clock::time_point now);
  void gone(int member, Clock::time_point now);
  bool has_assignment(int member) const;
  std::string who_leaves() const;
  std::string objection(const NodeJoin& join) const;
  void gather(Clock::time_point now);
  void consider(Clock::time_point now);
  void prepare();
  void begin_stop(StopReason why, std::string text, int signal = 0);
  void settle(Clock::time_point now);
  void end(int exit_status, std::vector<WorkerFailure> failures, std::string text = "");
  void send_refusal(int member, std::string text);
  void dismiss(int member, Clock::time_point now);
  std::vector<int> available() const;
  std::vector<WorkerFailure> all_failures() const;
  WorkerFailure missing_nodes() const;
  std::string name_of(const Member& member) const;

  CoordinatorOptions options_;
  State state_ = State::gathering;
  StopReason stop_reason_ = StopReason::failure;
  std::map<int, Member> members_;
  std::vector<WorkerFailure> node_failures_;  // of this round
  std::vector<WorkerFailure> last_failures_;  // of the round before: why one is being gathered
  std::vector<NodeAssignment> assignments_;
  std::vector<Order> orders_;
  int round_ = 0;
  int restarts_ = 0;
  int stop_signal_ = 0;
  std::string stop_text_;
  bool cut_short_ = false;  // a node went in the middle of the stop by a signal: not all ranks ended well
  Clock::time_point gather_since_;
  std::optional<Clock::time_point> last_call_ends_;
  std::optional<Clock::time_point> drain_ends_;  // ranks of this round have gone in peace with their node,
  std::string drained_host_;                     // which is this one
};

}  // namespace phalanx
