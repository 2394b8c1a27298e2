#include "phalanx/launch/rendezvous/own_address.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr const char* kInterfaceVariable = "PHALANX_SOCKET_IFNAME";

std::optional<std::string> numeric_address(const sockaddr* address) {
  const socklen_t size = address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  char text[NI_MAXHOST];
  if (getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return std::nullopt;
  return text;
}

bool belongs_here(const std::string& address, const std::vector<Interface>& interfaces) {
  return std::any_of(interfaces.begin(), interfaces.end(), [&](const auto& own) { return own.address == address; });
}

// The address that this host's name resolves to, if other nodes can use it.
std::optional<std::string> address_of_host_name(const std::vector<Interface>& interfaces) {
  char name[256] = "";
  if (gethostname(name, sizeof name - 1) != 0) return std::nullopt;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(name, nullptr, &hints, &list) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, &freeaddrinfo);
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    auto address = numeric_address(entry->ai_addr);
    if (address && !is_loopback(*address) && belongs_here(*address, interfaces)) return address;
  }
  return std::nullopt;
}

}  // namespace

std::vector<Interface> network_interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  std::vector<Interface> v4, v6;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(*entry->ifa_addr).sin6_addr))
      continue;
    if (const auto address = numeric_address(entry->ifa_addr))
      (family == AF_INET ? v4 : v6).push_back({entry->ifa_name, *address, (entry->ifa_flags & IFF_LOOPBACK) != 0});
  }
  v4.insert(v4.end(), v6.begin(), v6.end());
  return v4;
}

std::string address_of_interface(const std::string& name_or_address, const std::string& what) {
  std::string known;
  for (const auto& own : network_interfaces()) {
    if (own.name == name_or_address || own.address == name_or_address) return own.address;
    known += fmt::format("{}{} ({})", known.empty() ? "" : ", ", own.name, own.address);
  }
  throw ConfigError(
      fmt::format("{} is '{}': no interface of this node that is up has this name or address; there are {}", what,
                  name_or_address, known.empty() ? "none" : known));
}

std::optional<std::string> chosen_address() {
  if (const auto chosen = env_string(kInterfaceVariable)) return address_of_interface(*chosen, kInterfaceVariable);
  return std::nullopt;
}

std::string own_address(const std::optional<HostPort>& towards) {
  if (const auto chosen = chosen_address()) return *chosen;
  const auto interfaces = network_interfaces();
  if (towards) {
    try {
      std::string address = address_towards(*towards);
      if (!is_loopback(address)) return address;
    } catch (const CommError&) {
      // No route or an unknown name: the later connection reports it.
    }
  }
  if (const auto address = address_of_host_name(interfaces)) return *address;
  for (const auto& own : interfaces)
    if (!own.loopback) return own.address;
  return "127.0.0.1";
}

}  // namespace phalanx
