// The address under which other nodes reach this one. Torch-free.
//
// If PHALANX_SOCKET_IFNAME is set, it decides: it names an interface ("ib0") or an address ("10.1.0.7"). Otherwise
// own_address() takes the first of these:
//   1. the local address of a connection to `towards`, if that is another node
//   2. the address that this host's name resolves to, if it is an address of this node and not loopback (on Debian it
//      is 127.0.1.1, which is loopback)
//   3. the first interface that is up
//   4. 127.0.0.1: a node without a network has no other nodes to talk to
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

struct Interface {
  std::string name, address;
  bool loopback = false;
};

/// The interfaces that are up and have an address, IPv4 first, without link-local ones.
std::vector<Interface> network_interfaces();

/// The address of the named interface, or the given address itself. Throws ConfigError; the error names `what` and the
/// interfaces of this node.
std::string address_of_interface(const std::string& name_or_address, const std::string& what);

/// The address that PHALANX_SOCKET_IFNAME names; nullopt if it is not set.
std::optional<std::string> chosen_address();

std::string own_address(const std::optional<HostPort>& towards = {});

}  // namespace phalanx
