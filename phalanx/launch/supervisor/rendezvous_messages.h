// What the agents (one `phalanx launch` a node) and their coordinator tell each other. Torch-free.
//
// An agent sends NodeMessages; the coordinator answers all of them with one ordered list of Orders. Both travel as JSON
// through the rendezvous store (node_membership.h), or by plain calls where there is one node.
#pragma once

#include <string>
#include <vector>

#include "phalanx/launch/supervisor/worker_failure.h"

namespace phalanx {

/// How a node introduces itself.
struct NodeJoin {
  std::string host;
  int pid = 0;
  std::string address;  // by which the other nodes reach it
  int local_world_size = 1;
  int node_rank = -1;  // -1: any
  std::string role = "default";
  std::string run_id;
  int min_nodes = 1;
  int max_nodes = 1;
  int max_restarts = 0;
  bool is_host = false;  // of the rendezvous store
};

struct NodeMessage {
  enum class Kind {
    join,        // `join`
    rendezvous,  // the answer to Order::prepare: where the ranks of this round meet
    failed,      // a rank of the round has failed; the others still run
    succeeded,   // every rank of the round has ended with 0
    stopped,     // no rank of the round runs any more; `failures` are all that count
    leaving,     // this node was told to stop by `signal`, which its ranks have already got
    bye          // this node takes part no longer
  };
  Kind kind = Kind::join;
  int round = 0;
  int signal = 0;
  double sent_at_s = 0;  // since the epoch, on the sender's clock
  NodeJoin join;
  std::vector<WorkerFailure> failures;
  std::string store, master_address;  // meeting
  int master_port = 0;
};

/// One node's part in a round.
struct NodeAssignment {
  int member = 0;     // the number under which the node joined
  int node_rank = 0;  // its place in this round
  int first_rank = 0;
  int local_world_size = 1;
  std::string host;
  std::string role = "default";
};

struct Order {
  enum class Kind {
    prepare,  // `member` is to make a store for the round and to answer with `rendezvous`
    start,    // the ranks of `round` start, as the seats say
    stop,     // ranks of `round` are ended; every node of the round answers `stopped`
    signal,   // the same with `signal`, and with the time that ranks take to stop by themselves
    refuse,   // `member` is not, or no longer, taken; `text` says why
    end       // all is over
  };
  Kind kind = Kind::start;
  int round = 0;
  int member = -1;
  int restarts = 0;
  int signal = 0;
  int exit_status = 0;                  // end
  std::vector<NodeAssignment> seats;    // start
  std::vector<WorkerFailure> failures;  // end
  std::string text;                     // for people; may be empty
  std::string store, master_address;    // start
  int master_port = 0;
};

std::string to_json(const NodeMessage& message);
std::string to_json(const Order& order);
/// Throw CommError if the text is not what the other side of the same version writes.
NodeMessage parse_node_message(const std::string& text);
Order parse_order(const std::string& text);

}  // namespace phalanx
