// RendezvousHost: what the ranks of one round need for their rendezvous. It is a new store, and a port for programs
// that do their own rendezvous. The agent with node rank 0 owns it for the duration of the round.
#pragma once

#include <memory>
#include <string>

#include "phalanx/store/tcp_store.h"

namespace phalanx {

class RendezvousHost {
 public:
  /// Listens on `address`, which belongs to this node. master_port 0: a free port. Throws CommError.
  RendezvousHost(const std::string& address, int master_port, const std::string& secret);

  HostPort store() const { return server_.address(); }
  const std::string& master_address() const { return address_; }
  int master_port() const { return master_port_; }

 private:
  std::string address_;
  TcpStoreServer server_;
  // This socket is bound but does not listen. So the system gives the port to no other process, but a server that sets
  // SO_REUSEADDR, as the usual ones do, can still bind it.
  UniqueFd reserved_;
  int master_port_ = 0;
};

}  // namespace phalanx
