// Where the ranks of one round meet: a store made for them, and a port for programs that make a rendezvous of their
// own. The agent with node rank 0 holds it for as long as the round goes on.
#pragma once

#include <memory>
#include <string>

#include "phalanx/store/tcp_store.h"

namespace phalanx {

class RendezvousHost {
 public:
  /// On `address`, this node's own. master_port 0: a free one. Throws CommError.
  RendezvousHost(const std::string& address, int master_port, const std::string& secret);

  HostPort store() const { return server_.address(); }
  const std::string& master_address() const { return address_; }
  int master_port() const { return master_port_; }

 private:
  std::string address_;
  TcpStoreServer server_;
  // Bound and not listened on, it is given to nobody else by the system, while a server that sets SO_REUSEADDR, as they
  // do, may still bind it.
  UniqueFd reserved_;
  int master_port_ = 0;
};

}  // namespace phalanx
