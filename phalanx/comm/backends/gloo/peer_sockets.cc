#include "phalanx/comm/backends/gloo/peer_sockets.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>

#include "phalanx/base/descriptor_limit.h"
#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/remedy.h"
#include "phalanx/store/job_secret.h"
#include "phalanx/store/refusal_log.h"
#include "phalanx/store/store_handshake.h"
#include "phalanx/store/store_proof.h"
#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kCheckInterval{100};
constexpr std::chrono::seconds kGreetingTimeout{10};
constexpr std::size_t kMoreUnknown = 256;  // connections in their greeting, beyond one a rank
constexpr int kAcceptedAtOnce = 64;        // before those that are greeting get their turn
constexpr int kAttempts = 5;               // a connection may be closed in favour of newer ones before it has greeted
constexpr std::chrono::milliseconds kPause{50};  // before the next attempt

// An offer is "HOST:PORT TOKEN".
HostPort address_in(const std::string& offer) {
  return parse_host_port(offer.substr(0, offer.find(' ')), "the address of a rank");
}

// One connection that is being made. After the handshake the rank that connects sends its number, as a u32.
struct Greeting {
  UniqueFd fd;
  std::string secret;                     // the handshakes keep views of it
  int peer = -1;                          // this rank connects to it; -1: accepted, and not known yet
  std::string address;                    // of an accepted connection
  std::optional<ClientHandshake> client;  // or
  std::optional<StoreHandshake> server;
  std::string output, number;
  bool is_done = false;
  int error = 0;  // errno with which it broke; 0: the other side has closed it
  Clock::time_point deadline = Clock::now() + kGreetingTimeout;

  std::size_t wanted() const {
    const std::size_t left = client ? client->wanted() : server->wanted();
    return server && server->state() == StoreHandshake::State::welcome ? sizeof(std::uint32_t) - number.size() : left;
  }
};

class Greetings {
 public:
  Greetings(int rank, const std::vector<std::string>& offers, const std::string& key, int listener)
      : rank_(rank), offers_(offers), key_(key), listener_(listener), peers_(offers.size()), attempts_(offers.size()) {
    for (std::size_t peer = 0; peer < offers_.size(); ++peer)
      if (static_cast<int>(peer) != rank_) call(static_cast<int>(peer));
  }

  bool is_complete() const { return count_ == 2 * (peers_.size() - 1); }
  std::vector<PeerSockets> take() { return std::move(peers_); }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (std::size_t peer = 0; peer < peers_.size(); ++peer)
      if (static_cast<int>(peer) != rank_ && !(peers_[peer].to && peers_[peer].from))
        ranks.push_back(static_cast<int>(peer));
    return ranks;
  }

  // Sleeps until a socket is ready, at most for kCheckInterval, and moves on what can.
  void step() {
    call_again();
    std::vector<pollfd> fds{{listener_, POLLIN, 0}};
    for (const Greeting& greeting : greetings_)
      fds.push_back({greeting.fd.get(), static_cast<short>(greeting.output.empty() ? POLLIN : POLLOUT), 0});
    if (poll(fds.data(), fds.size(), static_cast<int>(kCheckInterval.count())) < 0 && errno != EINTR)
      throw CommError(fmt::format("cannot wait for the connections of other ranks: {}", with_remedy(strerror(errno))));
    auto ready = fds.begin() + 1;
    for (auto greeting = greetings_.begin(); greeting != greetings_.end();) {
      const bool keep = (ready++)->revents != 0 ? advance(*greeting) : is_in_time(*greeting);
      greeting = keep ? std::next(greeting) : greetings_.erase(greeting);
    }
    if (fds.front().revents != 0) accept_some();
  }

 private:
  std::string secret_of(int rank) const { return hmac_sha256(key_, offers_[static_cast<std::size_t>(rank)]); }
  std::string name_of(int rank) const {
    return fmt::format("rank {} at {}", rank, address_in(offers_[static_cast<std::size_t>(rank)]).text());
  }

  void call(int peer) {
    ++attempts_[static_cast<std::size_t>(peer)];
    Greeting& greeting = greetings_.emplace_front();
    greeting.peer = peer;
    greeting.secret = secret_of(peer);
    greeting.fd = begin_connect(address_in(offers_[static_cast<std::size_t>(peer)]));
    greeting.client.emplace(greeting.secret, name_of(peer));
    greeting.output = greeting.client->begin();
    greeting.deadline = Clock::time_point::max();  // the caller's timeout applies
  }

  void call_again() {
    const auto now = Clock::now();
    const auto due = std::partition(again_.begin(), again_.end(), [&](const Again& one) { return one.at > now; });
    for (auto one = due; one != again_.end(); ++one) call(one->peer);
    again_.erase(due, again_.end());
  }

  void accept_some() {
    for (int i = 0; i < kAcceptedAtOnce; ++i) {
      sockaddr_storage address{};
      socklen_t size = sizeof address;
      UniqueFd fd(accept4(listener_, reinterpret_cast<sockaddr*>(&address), &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd && (errno == EINTR || errno == ECONNABORTED)) continue;
      if (!fd && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (!fd)
        throw CommError(fmt::format("cannot accept the connections of other ranks: {}", with_remedy(strerror(errno))));
      const int on = 1;
      setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      make_room();
      Greeting& greeting = greetings_.emplace_back();
      greeting.fd = std::move(fd);
      greeting.secret = secret_of(rank_);
      greeting.address = peer_name(address);
      greeting.server.emplace(greeting.secret);
    }
  }

  // Closes the oldest accepted connection if there are too many. Accepted ones stand behind this rank's own.
  void make_room() {
    const auto is_accepted = [](const Greeting& greeting) { return greeting.peer < 0; };
    const auto oldest = std::find_if(greetings_.begin(), greetings_.end(), is_accepted);
    if (std::count_if(oldest, greetings_.end(), is_accepted) <
        static_cast<std::ptrdiff_t>(peers_.size() + kMoreUnknown))
      return;
    refuse(*oldest, "too many connections have not greeted yet, and it is the oldest of them");
    greetings_.erase(oldest);
  }

  void refuse(const Greeting& greeting, const std::string& reason) {
    const auto text = refusals_.line(name_of(rank_), greeting.address, reason);
    if (text) log::warn(*text);
  }

  bool is_in_time(const Greeting& greeting) {
    if (Clock::now() < greeting.deadline) return true;
    refuse(greeting, fmt::format("it has not greeted within {} s", kGreetingTimeout.count()));
    return false;
  }

  // False: the connection is complete, or is to be closed.
  bool advance(Greeting& greeting) {
    const bool open = greeting.output.empty() ? receive(greeting) : flush(greeting);
    if (!open) return lost(greeting), false;
    if (greeting.is_done && greeting.output.empty()) return finish(greeting), false;
    return is_in_time(greeting);
  }

  // After a system call that failed.
  static bool may_go_on(Greeting& greeting) {
    greeting.error = errno;
    return errno == EAGAIN || errno == EINTR;
  }

  static bool flush(Greeting& greeting) {
    const ssize_t sent = send(greeting.fd.get(), greeting.output.data(), greeting.output.size(), MSG_NOSIGNAL);
    if (sent < 0) return may_go_on(greeting);
    greeting.output.erase(0, static_cast<std::size_t>(sent));
    return true;
  }

  bool receive(Greeting& greeting) {
    char bytes[128];
    const ssize_t got = recv(greeting.fd.get(), bytes, std::min(greeting.wanted(), sizeof bytes), 0);
    if (got < 0) return may_go_on(greeting);
    if (got == 0) return greeting.error = 0, false;
    const std::string_view text(bytes, static_cast<std::size_t>(got));
    return greeting.client ? take_from_server(greeting, text) : take_from_client(greeting, text);
  }

  bool take_from_server(Greeting& greeting, std::string_view text) {
    try {
      greeting.output = greeting.client->take(text);
    } catch (const ConfigError&) {  // its text is about the store
      throw CommError(fmt::format("{}: what listens there is not that rank of this job", name_of(greeting.peer)));
    }
    if (greeting.client->wanted() > 0) return true;
    const auto number = static_cast<std::uint32_t>(rank_);
    greeting.output.append(reinterpret_cast<const char*>(&number), sizeof number);
    greeting.is_done = true;
    return true;
  }

  bool take_from_client(Greeting& greeting, std::string_view text) {
    StoreHandshake& handshake = *greeting.server;
    if (handshake.state() != StoreHandshake::State::welcome) {
      greeting.output = handshake.take(text);
      if (handshake.state() != StoreHandshake::State::refused) return true;
      refuse(greeting, handshake.refusal());
      flush(greeting);
      greeting.address.clear();
      return false;
    }
    greeting.number += text;
    greeting.is_done = greeting.wanted() == 0;
    return true;
  }

  void lost(Greeting& greeting) {
    if (greeting.peer >= 0) {
      if (attempts_[static_cast<std::size_t>(greeting.peer)] < kAttempts && greeting.error != ECONNREFUSED)
        return again_.push_back({greeting.peer, Clock::now() + kPause});
      throw CommError(fmt::format("cannot connect to {}: it has closed the connection, or listens no longer{}",
                                  name_of(greeting.peer),
                                  greeting.error == 0 ? "" : fmt::format(" ({})", strerror(greeting.error))));
    }
    // One that only looked whether the port is open is not logged.
    if (!greeting.address.empty() && greeting.server->has_begun())
      refuse(greeting, "it left in the middle of the greeting");
  }

  void finish(Greeting& greeting) {
    if (greeting.peer >= 0) return keep(peers_[static_cast<std::size_t>(greeting.peer)].from, greeting);
    std::uint32_t number = 0;
    std::memcpy(&number, greeting.number.data(), sizeof number);
    if (number >= peers_.size() || static_cast<int>(number) == rank_ || peers_[number].to)
      return refuse(greeting, fmt::format("it says that it is rank {}, which is no rank, or has come before", number));
    keep(peers_[number].to, greeting);
  }
  void keep(UniqueFd& place, Greeting& greeting) {
    place = std::move(greeting.fd);
    ++count_;
  }

  struct Again {
    int peer = 0;
    Clock::time_point at;
  };

  const int rank_;
  const std::vector<std::string>& offers_;
  const std::string& key_;
  const int listener_;
  std::vector<PeerSockets> peers_;
  std::vector<int> attempts_;
  std::vector<Again> again_;  // connections to make later
  std::size_t count_ = 0;
  std::list<Greeting> greetings_;  // this rank's own, then the accepted ones, the oldest first
  RefusalLog refusals_;
};

}  // namespace

PeerListener::PeerListener(const std::string& host, std::string key)
    : key_(std::move(key)), listener_(listen_on({host, 0})) {
  offer_ = fmt::format("{} {}", local_address(listener_.get()).text(), generate_job_secret());
}

std::vector<PeerSockets> PeerListener::connect(int rank, const std::vector<std::string>& offers,
                                               std::chrono::milliseconds timeout, const std::function<void()>& check) {
  const UniqueFd listener = std::move(listener_);  // closed at the end, also by an error
  raise_descriptor_limit();                        // a large world needs more than the usual limit
  Greetings greetings(rank, offers, key_, listener.get());
  const auto deadline = Clock::now() + timeout;
  auto looked = Clock::now();
  while (!greetings.is_complete()) {
    greetings.step();
    const auto now = Clock::now();
    if (now - looked >= kCheckInterval) {
      looked = now;
      check();
    }
    if (now >= deadline && !greetings.is_complete())
      throw CommError(fmt::format("these ranks have not connected to rank {} at {} within {} s: {}", rank,
                                  address_in(offer_).text(), static_cast<double>(timeout.count()) / 1000,
                                  fmt::join(greetings.missing(), ", ")));
  }
  return greetings.take();
}

}  // namespace phalanx
