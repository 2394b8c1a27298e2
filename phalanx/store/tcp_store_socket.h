// Stream sockets for store/, launch/ and comm/backends/gloo/: resolve, listen, connect with retries. Errors name the
// address.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "phalanx/base/unique_fd.h"

namespace phalanx {

/// A point in time, set by any thread, at which threads that wait for a socket give up.
class SocketInterrupt {
 public:
  SocketInterrupt();                                             // throws CommError if no descriptor is left
  void at(std::chrono::steady_clock::time_point time) noexcept;  // the earliest counts
  bool is_due() const noexcept;
  /// Poll it together with the socket: it is readable from that time on.
  int fd() const noexcept { return timer_.get(); }

 private:
  UniqueFd timer_;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point time_ = std::chrono::steady_clock::time_point::max();
};

struct HostPort {
  std::string host;
  std::uint16_t port = 0;
  std::string text() const;  // "host:port", "[::1]:port"
};

/// Parses "host:port" or "[v6]:port"; throws ConfigError naming `what`.
HostPort parse_host_port(const std::string& text, const std::string& what);

/// A listening socket. host: a name or an address of this node, or "*" for every interface. port 0: any free one.
/// Throws CommError if the name does not resolve, the address is not of this node, or the port is in use.
UniqueFd listen_on(const HostPort& address);
std::uint16_t local_port(int fd);
/// The numeric address of this end of a socket. Throws CommError.
HostPort local_address(int fd);

struct ConnectOptions {
  bool was_up = false;  // the server was up before: a refusal means that it has ended
  const SocketInterrupt* interrupt = nullptr;
};
/// Connects. While the connection is refused it retries, with short, growing pauses: the server may just be starting.
/// Throws CommError after the timeout, when interrupted, or at once if the name does not resolve. Errors name the
/// server by `what`. Name resolution cannot be interrupted.
UniqueFd connect_to(const HostPort& address, std::chrono::milliseconds timeout, const std::string& what,
                    ConnectOptions options = {});

/// Begins to connect to a numeric address. The socket does not block. It is writable once it is connected, or refused.
/// Throws CommError if it fails at once.
UniqueFd begin_connect(const HostPort& address);

/// Sends or receives exactly that many bytes on a non-blocking socket. The result: done; closed by the peer (or
/// broken); late, at the deadline; interrupted before the deadline.
enum class IoResult { done, closed, late, interrupted };
IoResult send_all(int fd, std::string_view bytes, std::chrono::steady_clock::time_point deadline,
                  const SocketInterrupt* interrupt = nullptr);
IoResult receive_all(int fd, char* data, std::size_t size, std::chrono::steady_clock::time_point deadline,
                     const SocketInterrupt* interrupt = nullptr);

/// The numeric address of the other end of a connection; nullopt if it has been closed.
std::optional<HostPort> peer_address(int fd);

/// "10.0.0.3:41522", for the log.
std::string peer_name(const sockaddr_storage& address);

/// True if the host's name resolves to an address in 127/8 or to ::1.
bool is_loopback(const std::string& host);

/// The address that this node uses to reach `other`. Sends nothing. Throws CommError.
std::string address_towards(const HostPort& other);

}  // namespace phalanx
