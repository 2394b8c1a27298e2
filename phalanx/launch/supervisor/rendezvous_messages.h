// The messages between the agents (one `phalanx launch` per node) and their coordinator. Torch-free.
//
// An agent sends NodeMessages. The coordinator answers all agents with one ordered list of Orders. Both travel as JSON
// through the rendezvous store (node_membership.h), or by plain calls if there is one node.
#pragma once

#include <string>
#include <vector>

#include "phalanx/launch/supervisor/worker_failure.h"

namespace phalanx {

/// The description that a node joins with.
struct NodeJoin {
  std::string host;
  int pid = 0;
  std::string address;  // the address by which other nodes reach it
  int local_world_size = 1;
  int node_rank = -1;  // -1: any
  std::string role = "default";
  std::string run_id;
  int min_nodes = 1;
  int max_nodes = 1;
  int max_restarts = 0;
  bool is_host = false;  // it hosts the rendezvous store
};

struct NodeMessage {
  enum class Kind {
    join,        // `join`
    rendezvous,  // the answer to Order::prepare: the address for the rendezvous of this round's ranks
    failed,      // a rank of the node has failed; other ranks may still run
    succeeded,   // every rank of the node has ended with 0
    stopped,     // no rank of the node runs any more; `failures` holds all failures that count
    leaving,     // this node was stopped by `signal`; its ranks have already received the signal
    bye          // this node has left the job
  };
  Kind kind = Kind::join;
  int round = 0;
  int signal = 0;
  double sent_at_s = 0;  // since the epoch, on the sender's clock
  NodeJoin join;
  std::vector<WorkerFailure> failures;
  std::string store, master_address;  // rendezvous
  int master_port = 0;
};

/// The node rank and the global ranks of one node in a round.
struct NodeAssignment {
  int member = 0;     // the node's member number
  int node_rank = 0;  // in this round
  int first_rank = 0;
  int local_world_size = 1;
  std::string host;
  std::string role = "default";
};

struct Order {
  enum class Kind {
    prepare,  // `member` makes a store for the round and answers with `rendezvous`
    start,    // the nodes start the ranks of `round`, with these `assignments`
    stop,     // the nodes end the ranks of `round`; every node of the round answers `stopped`
    signal,   // the same with `signal`; ranks get the time that they need to stop by themselves
    refuse,   // `member` does not, or no longer, take part; `text` gives the reason
    end       // the job has ended
  };
  Kind kind = Kind::start;
  int round = 0;
  int member = -1;
  int restarts = 0;
  int signal = 0;
  int exit_status = 0;                      // end
  std::vector<NodeAssignment> assignments;  // start; "seats" in the JSON text
  std::vector<WorkerFailure> failures;      // end
  std::string text;                         // for the user; may be empty
  std::string store, master_address;        // start
  int master_port = 0;
};

std::string to_json(const NodeMessage& message);
std::string to_json(const Order& order);
/// The parsers throw CommError if the text is not a message of the same version.
NodeMessage parse_node_message(const std::string& text);
Order parse_order(const std::string& text);

}  // namespace phalanx
