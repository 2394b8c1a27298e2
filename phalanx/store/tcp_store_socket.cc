#include "phalanx/store/tcp_store_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "phalanx/base/error.h"
#include "phalanx/base/remedy.h"

namespace phalanx {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
using Clock = std::chrono::steady_clock;

AddressList resolve_host(const HostPort& address, bool passive) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  const char* node = passive && address.host == "*" ? nullptr : address.host.c_str();
  addrinfo* list = nullptr;
  const int status = getaddrinfo(node, std::to_string(address.port).c_str(), &hints, &list);
  if (status != 0)
    throw CommError(fmt::format("the host name '{}' does not resolve: {}", address.host,
                                status == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(status)));
  return {list, &freeaddrinfo};
}

void set_no_delay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

bool numeric_address(const sockaddr_storage& address, HostPort& result) {
  char host[NI_MAXHOST];
  const bool is_v6 = address.ss_family == AF_INET6;
  if (getnameinfo(reinterpret_cast<const sockaddr*>(&address), is_v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in), host,
                  sizeof host, nullptr, 0, NI_NUMERICHOST) != 0)
    return false;
  result.host = host;
  result.port = ntohs(is_v6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                            : reinterpret_cast<const sockaddr_in&>(address).sin_port);
  return true;
}

// Waits until the descriptor is ready; -1: until the deadline. Calls interrupted by signals are repeated.
IoResult wait_ready(int fd, short events, Clock::time_point deadline, const SocketInterrupt* interrupt) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return IoResult::late;
    pollfd fds[2] = {{fd, events, 0}, {interrupt ? interrupt->fd() : -1, POLLIN, 0}};
    const int ready = poll(fds, 2, static_cast<int>(std::min<std::int64_t>(left, 60'000)));
    if (ready < 0 && errno != EINTR) return IoResult::closed;
    if (ready <= 0) continue;
    return fds[0].revents != 0 ? IoResult::done : IoResult::interrupted;
  }
}

// 0 when connected, else the errno; ETIMEDOUT at the deadline, ECANCELED when interrupted.
int connect_once(const addrinfo& address, Clock::time_point deadline, const SocketInterrupt* interrupt,
                 UniqueFd& result) {
  UniqueFd fd(socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, address.ai_protocol));
  if (!fd) return errno;
  if (connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return errno;
    const IoResult waited = wait_ready(fd.get(), POLLOUT, deadline, interrupt);
    if (waited == IoResult::late) return ETIMEDOUT;
    if (waited == IoResult::interrupted) return ECANCELED;
    if (waited == IoResult::closed) return errno;
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return error;
  }
  // A connect to a free port of this node's ephemeral range may connect to itself (TCP simultaneous open): no server.
  sockaddr_storage mine{}, theirs{};
  socklen_t mine_size = sizeof mine, theirs_size = sizeof theirs;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&mine), &mine_size) == 0 &&
      getpeername(fd.get(), reinterpret_cast<sockaddr*>(&theirs), &theirs_size) == 0 && mine_size == theirs_size &&
      std::memcmp(&mine, &theirs, mine_size) == 0)
    return ECONNREFUSED;
  set_no_delay(fd.get());
  result = std::move(fd);
  return 0;
}

}  // namespace

SocketInterrupt::SocketInterrupt() : timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (!timer_) throw CommError(fmt::format("no descriptor for a timer: {}", std::strerror(errno)));
}

void SocketInterrupt::at(Clock::time_point time) noexcept {
  const std::lock_guard lock(mutex_);
  if (time >= time_) return;
  time_ = time;
  // The timer uses the steady clock, whose zero is the boot time. A zero time would disarm the timer.
  const auto since = std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  itimerspec spec{};
  spec.it_value.tv_sec = since / 1'000'000'000;
  spec.it_value.tv_nsec = since % 1'000'000'000;
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

bool SocketInterrupt::is_due() const noexcept {
  pollfd poll_fd{timer_.get(), POLLIN, 0};
  return poll(&poll_fd, 1, 0) > 0;
}

std::string HostPort::text() const {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port) : fmt::format("[{}]:{}", host, port);
}

HostPort parse_host_port(const std::string& text, const std::string& what) {
  const auto colon = text.rfind(':');
  HostPort result;
  bool good = colon != std::string::npos && colon > 0;
  if (good) {
    result.host = text.substr(0, colon);
    const char *begin = text.data() + colon + 1, *end = text.data() + text.size();
    const auto parsed = std::from_chars(begin, end, result.port);
    good = parsed.ec == std::errc{} && parsed.ptr == end && begin != end;
    if (result.host.front() == '[' && result.host.back() == ']')
      result.host = result.host.substr(1, result.host.size() - 2);
    else if (result.host.find(':') != std::string::npos)
      good = false;
    good = good && !result.host.empty();
  }
  if (!good) throw ConfigError(fmt::format("{} is '{}': expected host:port with a port from 0 to 65535", what, text));
  return result;
}

UniqueFd listen_on(const HostPort& address) {
  const auto list = resolve_host(address, /*passive=*/true);
  int error = 0;
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    UniqueFd fd(socket(entry->ai_family, entry->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, entry->ai_protocol));
    if (!fd) {
      error = errno;
      continue;
    }
    // SO_REUSEADDR: a port whose last user has just ended may be bound again at once; a port in use may not.
    const int on = 1;
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd.get(), entry->ai_addr, entry->ai_addrlen) == 0 && listen(fd.get(), SOMAXCONN) == 0) return fd;
    error = errno;
  }
  if (error == EADDRINUSE)
    throw CommError(
        fmt::format("cannot listen on {}: the port is in use by another program; choose another one, or 0 "
                    "for any free port",
                    address.text()));
  if (error == EADDRNOTAVAIL)
    throw CommError(fmt::format("cannot listen on {}: it is not an address of this machine", address.text()));
  throw CommError(fmt::format("cannot listen on {}: {}", address.text(), std::strerror(error)));
}

HostPort local_address(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  HostPort result;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0 || !numeric_address(address, result))
    throw CommError(fmt::format("getsockname: {}", std::strerror(errno)));
  return result;
}

std::uint16_t local_port(int fd) { return local_address(fd).port; }

UniqueFd connect_to(const HostPort& address, std::chrono::milliseconds timeout, const std::string& what,
                    ConnectOptions options) {
  const auto deadline = Clock::now() + timeout;
  const auto list = resolve_host(address, /*passive=*/false);
  auto pause = std::chrono::milliseconds(2);
  int told = 0;  // errno of the last attempt that our own deadline did not end
  for (int attempts = 1;; ++attempts) {
    int error = options.interrupt && options.interrupt->is_due() ? ECANCELED : 0;
    for (const addrinfo* entry = list.get(); entry != nullptr && error != ECANCELED; entry = entry->ai_next) {
      UniqueFd fd;
      error = connect_once(*entry, deadline, options.interrupt, fd);
      if (error == 0) return fd;
    }
    if (error == ECANCELED)
      throw CommError(
          fmt::format("reaching {} at {}: interrupted, because this process asks it no more", what, address.text()));
    if (error == ETIMEDOUT && told != 0) error = told;
    told = error;
    if (error == ECONNREFUSED && options.was_up)
      throw CommError(fmt::format("{} at {} refuses connections by now: the process that hosts it has ended", what,
                                  address.text()));
    // These pass when the server comes up; anything else (no route, no permission) does not.
    const bool may_pass = error == ECONNREFUSED || error == ECONNRESET || error == ECONNABORTED || error == EAGAIN;
    if (!may_pass || Clock::now() + pause >= deadline) {
      const std::string reason =
          error == ECONNREFUSED ? "connection refused: nothing listens there" : std::strerror(error);
      throw CommError(fmt::format("cannot reach {} at {} after {} attempt{} in {} ms: {}", what, address.text(),
                                  attempts, attempts == 1 ? "" : "s", timeout.count(), reason));
    }
    wait_ready(-1, 0, Clock::now() + pause, options.interrupt);
    pause = std::min(pause * 2, std::chrono::milliseconds(200));
  }
}

UniqueFd begin_connect(const HostPort& address) {
  const auto list = resolve_host(address, /*passive=*/false);
  UniqueFd fd(socket(list->ai_family, list->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, list->ai_protocol));
  if (!fd || (connect(fd.get(), list->ai_addr, list->ai_addrlen) != 0 && errno != EINPROGRESS))
    throw CommError(fmt::format("cannot connect to {}: {}", address.text(), with_remedy(std::strerror(errno))));
  set_no_delay(fd.get());
  return fd;
}

IoResult send_all(int fd, std::string_view bytes, Clock::time_point deadline, const SocketInterrupt* interrupt) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
      if (const auto result = wait_ready(fd, POLLOUT, deadline, interrupt); result != IoResult::done) return result;
    } else {
      return IoResult::closed;
    }
  }
  return IoResult::done;
}

IoResult receive_all(int fd, char* data, std::size_t size, Clock::time_point deadline,
                     const SocketInterrupt* interrupt) {
  while (size > 0) {
    const ssize_t got = recv(fd, data, size, 0);
    if (got > 0) {
      data += got;
      size -= static_cast<std::size_t>(got);
    } else if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      if (const auto result = wait_ready(fd, POLLIN, deadline, interrupt); result != IoResult::done) return result;
    } else {
      return IoResult::closed;
    }
  }
  return IoResult::done;
}

std::optional<HostPort> peer_address(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  HostPort result;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0 || !numeric_address(address, result))
    return std::nullopt;
  return result;
}

std::string peer_name(const sockaddr_storage& address) {
  HostPort result;
  return numeric_address(address, result) ? result.text() : "an unknown address";
}

bool is_loopback(const std::string& host) {
  const auto list = resolve_host({host, 0}, /*passive=*/false);
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family == AF_INET) {
      const auto& v4 = reinterpret_cast<const sockaddr_in&>(*entry->ai_addr);
      if ((ntohl(v4.sin_addr.s_addr) >> 24) == 127) return true;
    } else if (entry->ai_family == AF_INET6) {
      const auto& v6 = reinterpret_cast<const sockaddr_in6&>(*entry->ai_addr);
      if (IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr)) return true;
    }
  }
  return false;
}

std::string address_towards(const HostPort& other) {
  const auto list = resolve_host(other, /*passive=*/false);
  int error = 0;
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    // Connecting a datagram socket only chooses the route.
    const UniqueFd fd(socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    char text[NI_MAXHOST];
    if (fd && connect(fd.get(), entry->ai_addr, entry->ai_addrlen) == 0 &&
        getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0)
      return text;
    error = errno;
  }
  throw CommError(fmt::format("no way to {} from this machine: {}", other.text(), std::strerror(error)));
}

}  // namespace phalanx
