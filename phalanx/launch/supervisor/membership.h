// Membership: how an agent takes part in a job: it sends messages to the coordinator and gets its orders. Two kinds:
//
//   make_local_membership()   the one node of a job; coordinator and agent are the same thread, no socket is opened
//   NodeMembership            one of many nodes, through the rendezvous store (node_membership.h)
//
// One thread uses it: it polls fd() and then takes events until there is none. Nothing blocks for longer than it takes
// to hand over a message.
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
    std::string broken;   // instead: the way to the coordinator is lost, or was never found; this is the last event
    int exit_status = 1;  // of a launcher that ends with it
  };
  virtual ~Membership() = default;
  /// Readable when next() has something.
  virtual int fd() const = 0;
  virtual std::optional<Event> next() = 0;
  virtual void send(NodeMessage message) = 0;
  /// The number under which this node joined; -1 until its first order.
  virtual int number() const = 0;
  /// By which the other nodes reach this one. Known with the first order.
  virtual std::string own_address() const = 0;
  /// True on the node that hosts the rendezvous.
  virtual bool is_host() const = 0;
};

/// Joins at once.
std::unique_ptr<Membership> make_local_membership(const CoordinatorOptions& options, NodeJoin join);

}  // namespace phalanx
