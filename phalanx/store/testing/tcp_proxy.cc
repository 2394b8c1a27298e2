#include "phalanx/store/testing/tcp_proxy.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <string>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kRetransmission{200};
constexpr std::size_t kMaxPieces = 64;  // on their way in one direction; then nothing more is read

struct Piece {
  Clock::time_point due;
  std::string bytes;  // none: the end of what this side sends
};

// Both ends, though the file descriptor may have been inherited by a forked child.
void break_off(const UniqueFd& fd) { shutdown(fd.get(), SHUT_RDWR); }

}  // namespace

struct TcpProxy::Connection {
  UniqueFd ends[2];                 // the client's, the target's
  std::deque<Piece> on_the_way[2];  // [i]: read from ends[i]
  bool ended[2] = {false, false};   // ends[i] sends no more
  bool broken = false;

  bool is_over() const { return broken || (ended[0] && ended[1] && on_the_way[0].empty() && on_the_way[1].empty()); }
};

TcpProxy::TcpProxy(HostPort target)
    : target_(std::move(target)),
      listener_(listen_on({"127.0.0.1", 0})),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      address_{"127.0.0.1", local_port(listener_.get())},
      thread_([this] { serve(); }) {}

TcpProxy::~TcpProxy() {
  stopping_.store(true);
  wake();
  thread_.join();
}

void TcpProxy::wake() { eventfd_write(wake_.get(), 1); }

void TcpProxy::delay(std::chrono::milliseconds each_way) { delay_ms_.store(each_way.count()); }
void TcpProxy::lose_one_of(int pieces) { lose_one_of_.store(pieces); }

void TcpProxy::stall() {
  stalled_.store(true);
  wake();
}

void TcpProxy::resume() {
  stalled_.store(false);
  wake();
}

void TcpProxy::cut() {
  cut_.store(true);
  wake();
}

void TcpProxy::accept_one() {
  UniqueFd client(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!client) return;
  try {
    auto connection = std::make_unique<Connection>();
    connection->ends[1] = connect_to(target_, std::chrono::seconds(1), "the proxy's target");
    connection->ends[0] = std::move(client);
    const int on = 1;
    for (const UniqueFd& end : connection->ends) setsockopt(end.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    connections_.push_back(std::move(connection));
  } catch (const Error&) {
    break_off(client);  // nobody listens there yet: the client may try again
  }
}

void TcpProxy::take_from(Connection& connection, int i) {
  auto& incoming = connection.on_the_way[i];
  if (connection.broken || connection.ended[i] || incoming.size() >= kMaxPieces) return;
  char buffer[16 * 1024];
  const ssize_t got = recv(connection.ends[i].get(), buffer, sizeof buffer, 0);
  if (got < 0) {
    connection.broken = errno != EAGAIN && errno != EINTR;
    return;
  }
  connection.ended[i] = got == 0;
  auto due = Clock::now() + std::chrono::milliseconds(delay_ms_.load());
  if (const int one_of = lose_one_of_.load(); one_of > 0 && ++pieces_ % one_of == 0) due += kRetransmission;
  if (!incoming.empty()) due = std::max(due, incoming.back().due);
  incoming.push_back({due, std::string(buffer, static_cast<std::size_t>(got))});
}

void TcpProxy::pass_on_to(Connection& connection, int i) {
  auto& outgoing = connection.on_the_way[1 - i];
  while (!connection.broken && !outgoing.empty() && outgoing.front().due <= Clock::now()) {
    Piece& piece = outgoing.front();
    if (piece.bytes.empty()) {
      shutdown(connection.ends[i].get(), SHUT_WR);
    } else {
      const ssize_t sent = send(connection.ends[i].get(), piece.bytes.data(), piece.bytes.size(), MSG_NOSIGNAL);
      if (sent < 0) {
        connection.broken = errno != EAGAIN && errno != EINTR;
        return;
      }
      bytes_.fetch_add(sent);
      piece.bytes.erase(0, static_cast<std::size_t>(sent));
    }
    if (piece.bytes.empty()) outgoing.pop_front();
  }
}

void TcpProxy::serve() {
  while (!stopping_.load()) {
    const bool moves = !stalled_.load();
    const auto now = Clock::now();
    std::vector<pollfd> fds{{wake_.get(), POLLIN, 0}, {moves ? listener_.get() : -1, POLLIN, 0}};
    auto next = now + std::chrono::hours(1);
    for (const auto& connection : connections_)
      for (int i = 0; i < 2; ++i) {
        const auto& incoming = connection->on_the_way[i];
        const auto& outgoing = connection->on_the_way[1 - i];
        short events = 0;
        if (!connection->ended[i] && incoming.size() < kMaxPieces) events |= POLLIN;
        if (!outgoing.empty() && outgoing.front().due <= now) events |= POLLOUT;
        if (!incoming.empty() && incoming.front().due > now) next = std::min(next, incoming.front().due);
        fds.push_back({moves && events != 0 ? connection->ends[i].get() : -1, events, 0});
      }
    const auto pause = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
    poll(fds.data(), fds.size(), moves ? static_cast<int>(pause) : -1);
    eventfd_t ignored = 0;
    eventfd_read(wake_.get(), &ignored);
    if (cut_.load())
      for (const auto& connection : connections_) connection->broken = true;
    if (moves && !stalled_.load()) {
      for (std::size_t c = 0; c < connections_.size(); ++c)
        for (int i = 0; i < 2; ++i) {
          const short ready = fds[2 + 2 * c + static_cast<std::size_t>(i)].revents;
          if ((ready & (POLLIN | POLLHUP | POLLERR)) != 0) take_from(*connections_[c], i);
          pass_on_to(*connections_[c], i);
        }
      if ((fds[1].revents & POLLIN) != 0) accept_one();
    }
    if (cut_.load())
      for (const auto& connection : connections_) connection->broken = true;
    std::erase_if(connections_, [](const auto& connection) {
      if (!connection->is_over()) return false;
      for (const UniqueFd& end : connection->ends) break_off(end);
      return true;
    });
  }
  for (const auto& connection : connections_)
    for (const UniqueFd& end : connection->ends) break_off(end);
}

}  // namespace phalanx
