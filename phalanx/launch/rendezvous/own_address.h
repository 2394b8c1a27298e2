// The address under which other machines reach this one. Torch-free.
//
// PHALANX_SOCKET_IFNAME names the interface ("ib0") or address ("10.1.0.7") and settles it. Otherwise it is the address
// that this machine uses towards `towards`, if that is another machine; else what the host's own name resolves to, if
// that is an address of this machine and not loopback (Debian's 127.0.1.1 is); else the first interface that is up;
// else 127.0.0.1: a machine without a network has no others to talk to.
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

/// The address of that interface or that address itself; throws ConfigError naming `what` and the interfaces there are.
std::string address_of_interface(const std::string& name_or_address, const std::string& what);

/// What PHALANX_SOCKET_IFNAME names, if it is set.
std::optional<std::string> chosen_address();

std::string own_address(const std::optional<HostPort>& towards = {});

}  // namespace phalanx
