// One of many nodes: finds the rendezvous store, joins through it, and keeps giving signs of life. Torch-free.
//
// - Static: node rank 0 hosts the store at the endpoint. Dynamic: whoever has the endpoint's address (its name resolves
//   to an address of an interface of this machine, and the port is free) or was told to; the others connect. Nodes may
//   start in any order: until join_timeout a node tries to reach the host.
// - The host also runs the coordinator. Everything in the store stands under "rendezvous/":
//     message/<member>/<n>   what a member says, in order; claiming message/<m>/0 is how a node becomes member m
//     order/<n>              what the coordinator decides, in order, for all
//     beat/<member>          a counter; unchanged for missed_keep_alives * keep_alive the member is lost
//     lost/<member>          set by the store when the member's process or connection has gone
// - A node that cannot reach the host any more has event().broken. The host's own store is near enough not to.
//
// All waiting is done by threads of its own; the destructor says goodbye and ends them. On the host it waits until the
// others have heard how the job ended, for close_timeout at most.
#pragma once

#include <memory>
#include <string>

#include "phalanx/launch/supervisor/membership.h"
#include "phalanx/launch/supervisor/supervisor.h"

namespace phalanx {

class NodeMembership final : public Membership {
 public:
  /// Returns at once; what goes wrong is an event.
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

/// True if the host's name or address is one of an interface of this machine. Throws CommError if it does not resolve.
bool is_own_address(const std::string& host);

}  // namespace phalanx
