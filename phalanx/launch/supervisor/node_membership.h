// NodeMembership: the membership of one of many nodes. It finds the rendezvous store, joins, and sends heartbeats.
// Torch-free.
//
// - Static: node rank 0 hosts the store at the endpoint. Dynamic: a node hosts it if the endpoint's name resolves to an
//   address of one of its interfaces and the port is free, or if the options say so; the other nodes connect. Nodes may
//   start in any order: a node tries to reach the host until join_timeout.
// - The host also runs the coordinator. All keys in the store begin with "rendezvous/":
//     message/<member>/<n>   the member's messages, in order; a node becomes member m by claiming message/<m>/0
//     order/<n>              the coordinator's decisions, in order, for all nodes
//     beat/<member>          a counter; a member whose counter does not change for missed_keep_alives * keep_alive is
//                            lost
//     lost/<member>          set by the store when the member's process or connection is gone
// - If a node cannot reach the host any more, next() returns an event with `broken` set. The host itself does not lose
//   its own store.
//
// Separate threads do all waiting. The destructor sends a goodbye and ends them. On the host it waits until the other
// nodes know how the job ended, for at most close_timeout.
#pragma once

#include <memory>
#include <string>

#include "phalanx/launch/supervisor/membership.h"
#include "phalanx/launch/supervisor/supervisor.h"

namespace phalanx {

class NodeMembership final : public Membership {
 public:
  /// Returns at once; next() reports errors as events.
  NodeMembership(const NodesOptions& options, NodeJoin join, std::string secret);
  ~NodeMembership() override;
  int fd() const override;
  std::optional<Event> next() override;
  void send(NodeMessage message) override;
  int number() const override;
  std::string own_address() const override;
  bool is_host() const override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// True if `host` names an address of an interface of this machine. Throws CommError if it does not resolve.
bool is_own_address(const std::string& host);

}  // namespace phalanx
