#include "phalanx/launch/supervisor/rendezvous_host.h"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

UniqueFd reserve_port(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int status = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (status != 0) throw CommError(fmt::format("'{}' is not an address: {}", address, gai_strerror(status)));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, &freeaddrinfo);
  UniqueFd fd(socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) throw CommError(fmt::format("a socket for {}: {}", address, std::strerror(errno)));
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd.get(), list->ai_addr, list->ai_addrlen) == 0) return fd;
  if (errno == EADDRINUSE)
    throw CommError(
        fmt::format("--master-port {}: the port is in use by another program on {}: choose another one, or "
                    "leave the flag out for any free port",
                    port, address));
  throw CommError(fmt::format("cannot reserve port {} on {}: {}", port, address, std::strerror(errno)));
}

}  // namespace

RendezvousHost::RendezvousHost(const std::string& address, int master_port, const std::string& secret)
    : address_(address), server_({.host = address, .secret = secret}), reserved_(reserve_port(address, master_port)) {
  master_port_ = local_port(reserved_.get());
}

}  // namespace phalanx
