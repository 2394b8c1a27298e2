#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <unordered_map>

#include "phalanx/base/descriptor_limit.h"
#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/remedy.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/store/refusal_log.h"
#include "phalanx/store/store_handshake.h"
#include "phalanx/store/store_table.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/tcp_store_wire.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;
using ServerOperation = store_wire::Operation;
using ServerStatus = store_wire::Status;

constexpr std::uint64_t kListenerId = 0, kStopId = 1, kFirstConnectionId = 2;
constexpr std::size_t kReadChunk = 64 * 1024;

struct StoreConnection {
  UniqueFd fd;
  std::unique_ptr<StoreHandshake> handshake;  // until it is accepted
  std::string peer;                           // its address, until then
  std::string input;                          // at most one frame: a client sends one request at a time
  std::string output;                         // what the socket has not taken yet
  std::size_t sent = 0;
  // The wait in progress, if any.
  ServerOperation waiting = ServerOperation::set;  // set: none
  std::vector<std::string> keys;
  std::size_t missing = 0;  // entries of this connection in waiters_
  Clock::time_point deadline{};
  std::map<std::string, std::string> when_lost;

  bool is_waiting() const { return waiting != ServerOperation::set; }
};

std::string ok_frame() {
  store_wire::Writer writer;
  return writer.u8(static_cast<std::uint8_t>(ServerStatus::ok)).take();
}

}  // namespace

// Everything below the constructor and destructor runs on the one server thread.
class TcpStoreServer::Impl {
 public:
  explicit Impl(TcpStoreServerOptions options) : options_(std::move(options)) {
    listener_ = listen_on({options_.host, options_.port});
    options_.port = local_port(listener_.get());
    if (!options_.on_refusal) options_.on_refusal = [](const std::string& text) { log::warn(text); };
    epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
    stop_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    spare_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!epoll_ || !stop_ || !spare_) throw CommError(fmt::format("the store's server: {}", std::strerror(errno)));
    watch(listener_.get(), kListenerId, EPOLLIN, EPOLL_CTL_ADD);
    watch(stop_.get(), kStopId, EPOLLIN, EPOLL_CTL_ADD);
    thread_ = start_thread("the store", [this] { serve(); });
  }

  ~Impl() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = write(stop_.get(), &one, sizeof one);
    thread_.join();
  }

  HostPort address() const { return {options_.host == "*" ? "127.0.0.1" : options_.host, options_.port}; }

 private:
  using Connections = std::unordered_map<std::uint64_t, StoreConnection>;

  void watch(int fd, std::uint64_t id, std::uint32_t events, int action) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    epoll_ctl(epoll_.get(), action, fd, &event);
  }

  void serve() {
    std::vector<epoll_event> events(64);
    for (;;) {
      int timeout = -1;
      if (!deadlines_.empty()) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadlines_.begin()->first - Clock::now());
        timeout = static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
      }
      const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
      for (int i = 0; i < count; ++i) {
        const std::uint64_t id = events[static_cast<std::size_t>(i)].data.u64;
        if (id == kStopId) return;
        if (id == kListenerId)
          accept_some();
        else
          handle(id, events[static_cast<std::size_t>(i)].events);
      }
      expire();
      bury();
    }
  }

  // Accepts a few at a time, so that accepted connections advance their handshake before they are the oldest.
  void accept_some() {
    for (int accepted = 0; accepted < 64; ++accepted) {
      sockaddr_storage peer{};
      socklen_t peer_size = sizeof peer;
      UniqueFd fd(
          accept4(listener_.get(), reinterpret_cast<sockaddr*>(&peer), &peer_size, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno != EMFILE && errno != ENFILE) return;
        if (errno == EMFILE && raise_descriptor_limit()) continue;
        // Out of descriptors: refuse the client with the spare one, else the listener stays readable for ever.
        spare_.reset();
        UniqueFd(accept(listener_.get(), nullptr, nullptr)).reset();
        log_refusal("a client", with_remedy(std::strerror(EMFILE)));
        spare_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
        return;
      }
      const int on = 1, idle_s = 5, interval_s = 1, probes = 5;
      setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      // A node that disappears silently is noticed after 10 s.
      setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
      setsockopt(fd.get(), IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
      setsockopt(fd.get(), IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
      setsockopt(fd.get(), IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
      const std::uint64_t id = next_id_++;
      watch(fd.get(), id, EPOLLIN | EPOLLRDHUP, EPOLL_CTL_ADD);
      if (handshake_.size() >= options_.max_unauthenticated) turn_away_oldest();
      handshake_.insert(id);
      auto& connection = connections_[id];
      connection.fd = std::move(fd);
      connection.handshake = std::make_unique<StoreHandshake>(options_.secret);
      connection.peer = peer_name(peer);
      set_deadline(id, connection, Clock::now() + options_.hello_timeout);
    }
  }

  void turn_away_oldest() {
    const auto found = connections_.find(*handshake_.begin());
    log_refusal(found->second.peer,
                fmt::format("{} connections have not greeted yet, and it is the oldest of them", handshake_.size()));
    handshake_.erase(handshake_.begin());
    clear_deadline(found->first, found->second);
    connections_.erase(found);
  }

  void log_refusal(const std::string& peer, const std::string& reason) {
    if (const auto text = refusals_.line("store at " + address().text(), peer, reason)) options_.on_refusal(*text);
  }

  void set_deadline(std::uint64_t id, StoreConnection& connection, Clock::time_point deadline) {
    clear_deadline(id, connection);
    connection.deadline = deadline;
    deadlines_.emplace(deadline, id);
  }
  void clear_deadline(std::uint64_t id, StoreConnection& connection) {
    deadlines_.erase({connection.deadline, id});
    connection.deadline = {};
  }

  void handle(std::uint64_t id, std::uint32_t events) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    auto& connection = found->second;
    bool alive = (events & EPOLLERR) == 0;
    if (alive && (events & EPOLLOUT) != 0) alive = flush(id, connection);
    if (alive && (events & (EPOLLIN | EPOLLHUP | EPOLLRDHUP)) != 0) alive = receive(id, connection);
    if (!alive) lost_.push_back(id);
  }

  // False when the connection is to be dropped.
  bool receive(std::uint64_t id, StoreConnection& connection) {
    char chunk[kReadChunk];
    for (;;) {
      // Before it is accepted only the handshake's bytes are read: unauthenticated clients cost no memory.
      const std::size_t room = connection.handshake ? connection.handshake->wanted() : sizeof chunk;
      const ssize_t got = recv(connection.fd.get(), chunk, room, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return true;
      if (got <= 0) {
        // A client that only checked whether the port is open is not logged.
        if (connection.handshake && connection.handshake->has_begun())
          log_refusal(connection.peer, "it left in the middle of the greeting");
        return false;
      }
      const std::string_view bytes(chunk, static_cast<std::size_t>(got));
      if (connection.handshake) {
        if (!greet(id, connection, bytes)) return false;
      } else {
        connection.input += bytes;
        if (!parse(id, connection)) return false;
      }
    }
  }

  bool greet(std::uint64_t id, StoreConnection& connection, std::string_view bytes) {
    std::string answer = connection.handshake->take(bytes);
    // Logged before the answer is sent, so the line exists when the client learns of its refusal.
    const bool is_refused = connection.handshake->state() == StoreHandshake::State::refused;
    if (is_refused) log_refusal(connection.peer, connection.handshake->refusal());
    // The few bytes of a refusal fit any socket's buffer, so closing right after it loses nothing.
    if (!answer.empty() && !reply(id, connection, std::move(answer))) return false;
    if (is_refused) return false;
    if (connection.handshake->state() == StoreHandshake::State::welcome) {
      connection.handshake.reset();
      connection.peer = {};
      handshake_.erase(id);
      clear_deadline(id, connection);
    }
    return true;
  }

  bool parse(std::uint64_t id, StoreConnection& connection) {
    // One request at a time: a client that sends more before the answer violates the protocol.
    if (connection.is_waiting() || !connection.output.empty()) return false;
    std::string& input = connection.input;
    if (input.size() < 4) return true;
    std::uint32_t length = 0;
    std::memcpy(&length, input.data(), 4);
    if (length == 0 || length > store_wire::kMaxFrame || input.size() - 4 > length) return false;
    if (input.size() - 4 < length) return true;
    const std::string frame = std::exchange(input, {});
    return execute(id, connection, std::string_view(frame).substr(4));
  }

  bool execute(std::uint64_t id, StoreConnection& connection, std::string_view payload) {
    store_wire::Reader reader(payload);
    store_wire::Writer writer;
    const auto operation = static_cast<ServerOperation>(reader.u8());
    switch (operation) {
      case ServerOperation::set: {
        const std::string key = reader.key();
        std::string value = reader.value();
        if (!reader.finished()) return false;
        assign(key, std::move(value));
        return reply(id, connection, ok_frame());
      }
      case ServerOperation::try_get: {
        const std::string key = reader.key();
        if (!reader.finished()) return false;
        const auto found = table_.find(key);
        writer.u8(static_cast<std::uint8_t>(ServerStatus::ok));
        writer.u8(found != table_.end());
        if (found != table_.end()) writer.string(found->second);
        return reply(id, connection, writer.take());
      }
      case ServerOperation::add: {
        const std::string key = reader.key();
        const auto amount = static_cast<std::int64_t>(reader.u64());
        if (!reader.finished()) return false;
        const auto found = table_.find(key);
        try {
          const std::int64_t sum =
              store_detail::add_to_counter(key, found == table_.end() ? "0" : found->second, amount);
          assign(key, std::to_string(sum));
          writer.u8(static_cast<std::uint8_t>(ServerStatus::ok)).u64(static_cast<std::uint64_t>(sum));
        } catch (const CommError& error) {
          writer.u8(static_cast<std::uint8_t>(ServerStatus::error)).string(error.what());
        }
        return reply(id, connection, writer.take());
      }
      case ServerOperation::compare_and_set: {
        const std::string key = reader.key();
        const std::optional<std::string> expected = reader.optional();
        std::string desired = reader.value();
        if (!reader.finished()) return false;
        const auto found = table_.find(key);
        const bool absent = found == table_.end();
        const bool equal = absent ? !expected.has_value() : expected == found->second;
        std::optional<std::string> held;
        if (equal)
          held = desired;
        else if (!absent)
          held = found->second;
        if (equal) assign(key, std::move(desired));
        writer.u8(static_cast<std::uint8_t>(ServerStatus::ok)).optional(held);
        return reply(id, connection, writer.take());
      }
      case ServerOperation::erase: {
        const std::string key = reader.key();
        if (!reader.finished()) return false;
        const bool existed = table_.erase(key) > 0;
        writer.u8(static_cast<std::uint8_t>(ServerStatus::ok)).u8(existed);
        return reply(id, connection, writer.take());
      }
      case ServerOperation::set_when_lost: {
        const std::string key = reader.key();
        std::optional<std::string> value = reader.optional();
        if (!reader.finished()) return false;
        if (value)
          connection.when_lost[key] = std::move(*value);
        else
          connection.when_lost.erase(key);
        return reply(id, connection, ok_frame());
      }
      case ServerOperation::wait_values:
      case ServerOperation::wait_all:
      case ServerOperation::wait_any:
        return begin_wait(id, connection, operation, reader);
    }
    return false;
  }

  bool begin_wait(std::uint64_t id, StoreConnection& connection, ServerOperation operation,
                  store_wire::Reader& reader) {
    const std::uint64_t timeout_ms = reader.u64();
    const std::uint32_t count = reader.u32();
    // A key takes 5 bytes at least, so a count that the frame cannot hold allocates nothing.
    if (!reader.good() || timeout_ms > store_wire::kMaxTimeoutMs || count == 0 || count > Store::kMaxKeysPerCall ||
        count > reader.remaining() / 5)
      return false;
    connection.keys.resize(count);
    for (auto& key : connection.keys) key = reader.key();
    if (!reader.finished()) return false;
    connection.waiting = operation;
    set_deadline(id, connection, Clock::now() + std::chrono::milliseconds(timeout_ms));
    return progress_wait(id, connection);
  }

  // Answers if the wait is over; else adds the keys that are missing now to waiters_.
  bool progress_wait(std::uint64_t id, StoreConnection& connection) {
    std::vector<const std::string*> missing;
    const bool any = connection.waiting == ServerOperation::wait_any;
    for (const auto& key : connection.keys) {
      const bool exists = table_.contains(key);
      if (exists && any) return finish_wait(id, connection, {key});
      if (!exists) missing.push_back(&key);
    }
    if (missing.empty()) {
      if (connection.waiting == ServerOperation::wait_all) return finish_wait(id, connection, {});
      std::size_t bytes = 16;
      for (const auto& key : connection.keys) bytes += 4 + table_[key].size();
      if (bytes > store_wire::kMaxFrame) {
        store_wire::Writer writer;
        writer.u8(static_cast<std::uint8_t>(ServerStatus::error))
            .string(fmt::format("the values of {} keys have {} bytes together: ask for fewer at once",
                                connection.keys.size(), bytes));
        end_wait(id, connection);
        return reply(id, connection, writer.take());
      }
      std::vector<std::string> values;
      for (const auto& key : connection.keys) values.push_back(table_[key]);
      return finish_wait(id, connection, values);
    }
    connection.missing = 0;
    for (const std::string* key : missing) connection.missing += waiters_[*key].insert(id).second;
    return true;
  }

  bool finish_wait(std::uint64_t id, StoreConnection& connection, const std::vector<std::string>& strings,
                   ServerStatus status = ServerStatus::ok) {
    store_wire::Writer writer;
    writer.u8(static_cast<std::uint8_t>(status)).u32(static_cast<std::uint32_t>(strings.size()));
    for (const auto& string : strings) writer.string(string);
    end_wait(id, connection);
    return reply(id, connection, writer.take());
  }

  void end_wait(std::uint64_t id, StoreConnection& connection) {
    if (connection.missing > 0) {
      for (const auto& key : connection.keys) {
        const auto found = waiters_.find(key);
        if (found != waiters_.end() && found->second.erase(id) > 0 && found->second.empty()) waiters_.erase(found);
      }
    }
    connection.missing = 0;
    connection.keys.clear();
    connection.waiting = ServerOperation::set;
    clear_deadline(id, connection);
  }

  void assign(const std::string& key, std::string value) {
    table_[key] = std::move(value);
    // The waiters of this key leave the index before any of them continues: continuing may add one again.
    const auto woken = waiters_.extract(key);
    if (woken.empty()) return;
    for (const std::uint64_t id : woken.mapped()) {
      const auto found = connections_.find(id);
      if (found == connections_.end() || !found->second.is_waiting()) continue;
      auto& connection = found->second;
      if (connection.missing > 0) --connection.missing;
      if (connection.missing > 0 && connection.waiting != ServerOperation::wait_any) continue;
      if (!progress_wait(id, connection)) lost_.push_back(id);
    }
  }

  // A client may have disconnected since its request, so only send() shows whether the answer can be delivered.
  bool reply(std::uint64_t id, StoreConnection& connection, std::string bytes) {
    if (connection.output.empty())
      connection.output = std::move(bytes);
    else
      connection.output += bytes;  // a handshake that is still being sent
    return flush(id, connection);
  }

  bool flush(std::uint64_t id, StoreConnection& connection) {
    while (connection.sent < connection.output.size()) {
      const ssize_t sent = send(connection.fd.get(), connection.output.data() + connection.sent,
                                connection.output.size() - connection.sent, MSG_NOSIGNAL);
      if (sent > 0) {
        connection.sent += static_cast<std::size_t>(sent);
      } else if (errno == EAGAIN) {
        watch(connection.fd.get(), id, EPOLLIN | EPOLLRDHUP | EPOLLOUT, EPOLL_CTL_MOD);
        return true;
      } else if (errno != EINTR) {
        return false;
      }
    }
    if (connection.sent > 0) watch(connection.fd.get(), id, EPOLLIN | EPOLLRDHUP, EPOLL_CTL_MOD);
    connection.output.clear();
    connection.output.shrink_to_fit();
    connection.sent = 0;
    return true;
  }

  void expire() {
    const auto now = Clock::now();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      const std::uint64_t id = deadlines_.begin()->second;
      deadlines_.erase(deadlines_.begin());
      const auto found = connections_.find(id);
      if (found == connections_.end()) continue;
      auto& connection = found->second;
      if (!connection.is_waiting()) {
        log_refusal(connection.peer,
                    fmt::format("it has not greeted within {} s", options_.hello_timeout.count() / 1000.0));
        lost_.push_back(id);
        continue;
      }
      std::vector<std::string> missing;
      for (const auto& key : connection.keys)
        if (!table_.contains(key)) missing.push_back(key);
      if (!finish_wait(id, connection, missing, ServerStatus::timed_out)) lost_.push_back(id);
    }
  }

  // Removes lost connections and sets the keys they left behind. Setting one may lose further connections.
  void bury() {
    while (!lost_.empty()) {
      const std::uint64_t id = lost_.back();
      lost_.pop_back();
      const auto found = connections_.find(id);
      if (found == connections_.end()) continue;
      end_wait(id, found->second);
      handshake_.erase(id);
      const auto when_lost = std::move(found->second.when_lost);
      connections_.erase(found);
      for (const auto& [key, value] : when_lost) assign(key, value);
    }
  }

  TcpStoreServerOptions options_;
  UniqueFd listener_, epoll_, stop_, spare_;
  std::uint64_t next_id_ = kFirstConnectionId;
  Connections connections_;
  std::unordered_map<std::string, std::string> table_;
  std::unordered_map<std::string, std::set<std::uint64_t>> waiters_;  // key -> connections that wait for it
  std::set<std::pair<Clock::time_point, std::uint64_t>> deadlines_;
  std::vector<std::uint64_t> lost_;
  std::set<std::uint64_t> handshake_;  // connections that are not accepted yet, oldest first
  RefusalLog refusals_;
  std::thread thread_;
};

TcpStoreServer::TcpStoreServer(TcpStoreServerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
TcpStoreServer::~TcpStoreServer() {
  if (!owner_.is_this_process()) {
    [[maybe_unused]] Impl* const parents = impl_.release();
  }
}
HostPort TcpStoreServer::address() const { return impl_->address(); }

}  // namespace phalanx
