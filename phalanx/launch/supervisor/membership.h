// Membership: an agent's connection to the coordinator. The agent sends messages and receives orders. Two kinds exist:
//
//   make_local_membership()   for a job of one node: coordinator and agent share a thread, and no socket is opened
//   NodeMembership            for one of many nodes, through the rendezvous store (node_membership.h)
//
// One thread uses it: it polls fd() and then calls next() until there is no event. No call blocks for longer than it
// takes to hand over a message.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "phalanx/launch/supervisor/coordinator.h"
#include "phalanx/launch/supervisor/rendezvous_messages.h"

namespace phalanx {

class Membership {
 public:
  struct Event {
    std::optional<Order> order;
    std::string broken;   // set instead if the coordinator cannot be reached (any more); this is the last event
    int exit_status = 1;  // of the launcher if it ends because of `broken`
  };
  virtual ~Membership() = default;
  /// Readable when next() has something.
  virtual int fd() const = 0;
  virtual std::optional<Event> next() = 0;
  virtual void send(NodeMessage message) = 0;
  /// The member number of this node; -1 until its first order.
  virtual int number() const = 0;
  /// The address by which other nodes reach this one. It is known when the first order arrives.
  virtual std::string own_address() const = 0;
  /// True on the node that hosts the rendezvous.
  virtual bool is_host() const = 0;
};

/// Joins at once.
std::unique_ptr<Membership> make_local_membership(const CoordinatorOptions& options, NodeJoin join);

}  // namespace phalanx
