// Coordinator: decides which nodes form a round, when ranks restart, and when the job ends. It uses no sockets,
// processes or clock: the caller passes in events and the time, and fetches orders for all nodes. One node hosts it.
//
// - Gathering: a round starts at once when max_nodes nodes have joined, or last_call after min_nodes have joined. If
//   too few join within join_timeout, the job ends; the error names the missing nodes.
// - Node ranks are given (static), or assigned in this order: the host, the nodes of the last round, then the other
//   nodes in order of arrival. The first global rank of a node is the sum of the local world sizes before it.
// - A failed rank or a lost node stops the ranks of all nodes. They restart in a new round while restarts are left. The
//   ranks also restart when a node joins while there is room, or leaves while enough others remain; this does not count
//   as a restart.
// - If all ranks of a leaving node end with 0, the ranks of the other nodes may be about to end too. These restart if
//   one of them fails, or after `drain_timeout`. If they all end with 0 before that, the job ends with 0.
// - A stop signal to one node goes to the ranks of all nodes if the job cannot continue without that node. A node that
//   only waits for an assignment may always leave.
// - A node that is refused (other --nnodes, a node rank given twice, ...) gets the reason. The other nodes are not
//   disturbed.
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
  bool fixed_node_ranks = false;  // every node gives its node rank
  int max_restarts = 0;
  std::string run_id = "none";
  std::chrono::milliseconds join_timeout{600'000};
  std::chrono::milliseconds last_call{30'000};
  std::chrono::milliseconds drain_timeout{30'000};  // for the other ranks to end after those of a leaving node
  std::string address;                              // where nodes join; used in errors
};

class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;

  Coordinator(CoordinatorOptions options, Clock::time_point now);

  void handle(int member, const NodeMessage& message, Clock::time_point now);
  /// The node has sent no heartbeat for the time `silent`. `how` is a text for the user.
  void lost(int member, const std::string& how, std::chrono::duration<double> silent, Clock::time_point now);
  void tick(Clock::time_point now);
  /// When tick() has something to do; time_point::max() if nothing is due.
  Clock::time_point next_deadline() const;

  /// The orders since the last call.
  std::vector<Order> take_orders();
  bool has_ended() const { return state_ == State::ended; }
  /// Ends the job in any state, because orders are no longer reliable; `reason` says why.
  void give_up(const std::string& reason);
  /// The nodes that have joined and have not left and were not lost or refused.
  std::vector<int> present() const;

 private:
  enum class State { gathering, preparing, running, stopping, ended };
  enum class StopReason { failure, membership, signal };
  struct Member {
    NodeJoin join;
    int last_node_rank = -1;
    bool assigned = false;  // has a node assignment in this round
    bool done = false;      // all its ranks have ended with 0
    bool stopped = false;   // none of its ranks of this round runs
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
  std::vector<WorkerFailure> last_failures_;  // of the round before: the reason for gathering a new one
  std::vector<NodeAssignment> assignments_;
  std::vector<Order> orders_;
  int round_ = 0;
  int restarts_ = 0;
  int stop_signal_ = 0;
  std::string stop_text_;
  bool cut_short_ = false;  // a node left during a stop by signal, so not all ranks ended with 0
  Clock::time_point gather_since_;
  std::optional<Clock::time_point> last_call_ends_;
  std::optional<Clock::time_point> drain_ends_;  // set when all ranks of a leaving node have ended with 0
  std::string drained_host_;                     // the host of that node
};

}  // namespace phalanx
