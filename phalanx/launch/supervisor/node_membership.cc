#include "phalanx/launch/supervisor/node_membership.h"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/launch/rendezvous/own_address.h"
#include "phalanx/launch/supervisor/coordinator_service.h"
#include "phalanx/launch/supervisor/event_fd.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;
using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses addresses_of(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int status = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (status != 0) throw CommError(fmt::format("the host name '{}' does not resolve: {}", host, gai_strerror(status)));
  return {list, &freeaddrinfo};
}

std::string text_of_address(const addrinfo& entry) {
  char text[NI_MAXHOST];
  const int status = getnameinfo(entry.ai_addr, entry.ai_addrlen, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return status == 0 ? text : "";
}

std::string resolved_address(const std::string& host) { return text_of_address(*addresses_of(host)); }

}  // namespace

bool is_own_address(const std::string& host) {
  const auto list = addresses_of(host);
  if (is_loopback(host)) return true;
  const auto interfaces = network_interfaces();
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next)
    for (const Interface& own : interfaces)
      if (own.address == text_of_address(*entry)) return true;
  return false;
}

class NodeMembership::Impl {
 public:
  Impl(const NodesOptions& options, NodeJoin join, std::string secret)
      : options_(options), join_(std::move(join)), secret_(std::move(secret)), wake_(new_event_fd()) {
    listener_ = start_thread("the rendezvous", [this] { listen(); });
  }

  ~Impl() {
    {
      std::lock_guard lock(mutex_);
      leaving_ = true;
      changed_.notify_all();
    }
    listener_.join();
    if (service_) service_->wait_for_departures(options_.close_timeout);
    service_.reset();  // before the members that its callback uses are destroyed
  }

  int fd() const { return wake_.get(); }
  int number() const { return number_; }
  bool is_host() const { return is_host_; }
  std::string own_address() const {
    std::lock_guard lock(mutex_);
    return join_.address;
  }

  std::optional<Membership::Event> next() {
    std::lock_guard lock(mutex_);
    if (events_.empty()) {
      eventfd_t ignored = 0;
      eventfd_read(wake_.get(), &ignored);
      return std::nullopt;
    }
    auto event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

  void send(NodeMessage message) {
    std::lock_guard lock(mutex_);
    outbox_.push_back(std::move(message));
    changed_.notify_all();
  }

 private:
  void post_event(Membership::Event event) {
    std::lock_guard lock(mutex_);
    if (broken_) return;
    broken_ = !event.broken.empty();
    events_.push_back(std::move(event));
    eventfd_write(wake_.get(), 1);
    changed_.notify_all();
  }

  bool wants_to_leave() const {
    std::lock_guard lock(mutex_);
    return leaving_;
  }
  bool is_broken() const {
    std::lock_guard lock(mutex_);
    return broken_;
  }

  // The listener thread: finds the store, joins, then receives orders.
  void listen() {
    try {
      if (!find_store() || wants_to_leave()) return;
      claim_number();
    } catch (const Error& error) {
      post_event({{}, error.what(), error.exit_status()});
      return;
    } catch (const std::exception& error) {
      post_event({{}, error.what()});
      return;
    }
    std::thread sender = start_thread("the rendezvous", [this] { speak(); });
    take_orders();
    sender.join();
  }

  void take_orders() {
    try {
      for (int next_order = 0;;) {
        const auto found = wait_for_any(*store_, {rendezvous_keys::order(next_order), rendezvous_keys::leave(number_)},
                                        options_.keep_alive);
        if (is_broken()) return;
        if (!found) continue;
        if (*found == rendezvous_keys::leave(number_)) return;
        Order order = parse_order(store_->get(*found));
        ++next_order;
        post_event({std::move(order), ""});
      }
    } catch (const std::exception& error) {
      post_event({{},
                  fmt::format("the node that hosts the rendezvous at {} cannot be reached any more: {}",
                              options_.endpoint.text(), error.what())});
    }
  }

  bool decide_host() const {
    if (options_.fixed_node_ranks) return options_.node_rank == 0;
    if (options_.is_host) return *options_.is_host;
    return is_own_address(options_.endpoint.host);
  }

  // Returns false if this node was asked to leave meanwhile.
  bool find_store() {
    const TcpStoreOptions client{
        .timeout = options_.read_timeout, .connect_timeout = std::chrono::seconds(10), .secret = secret_};
    HostPort address = options_.endpoint;
    addresses_of(address.host);  // an unknown name is an error at once
    if (decide_host()) host_store(address);
    if (!server_ && !reach(address)) return false;
    try {
      store_ = std::make_shared<TcpStore>(address, client);
    } catch (const CommError& error) {
      if (cannot_host_.empty()) throw;
      throw CommError(
          fmt::format("{}; and this node cannot host the rendezvous itself: {}", error.what(), cannot_host_));
    }
    {
      std::lock_guard lock(mutex_);
      join_.is_host = is_host_;
      join_.address = find_own_address();
    }
    if (is_host_) {
      service_ = std::make_unique<CoordinatorService>(
          std::make_shared<TcpStore>(address, client),
          CoordinatorOptions{.min_nodes = options_.min_nodes,
                             .max_nodes = options_.max_nodes,
                             .fixed_node_ranks = options_.fixed_node_ranks,
                             .max_restarts = join_.max_restarts,
                             .run_id = join_.run_id,
                             .join_timeout = options_.join_timeout,
                             .last_call = options_.last_call,
                             .address = options_.endpoint.text()},
          CoordinatorService::KeepAlive{options_.keep_alive, options_.missed_keep_alives},
          [this](const std::string& reason) {
            post_event({{}, reason});
          });
    }
    // From now on a missing answer means that the host is gone.
    store_->set_timeout(std::max(options_.keep_alive,
                                 options_.keep_alive * options_.missed_keep_alives - std::chrono::milliseconds(5'000)));
    return true;
  }

  void host_store(HostPort& address) {
    const std::string& bind = options_.bind_address.empty() ? address.host : options_.bind_address;
    if (bind != "*" && !is_own_address(bind))
      throw CommError(fmt::format(
          "'{}' is not an address of this node, which is to host the rendezvous there ({}): give another "
          "endpoint, or choose an interface with --rdzv-conf bind=ADDRESS (bind=*: all of them)",
          bind, options_.fixed_node_ranks ? "it has node rank 0; is --node-rank right?" : "is_host is set"));
    try {
      server_ = std::make_unique<TcpStoreServer>(
          TcpStoreServerOptions{.host = bind, .port = address.port, .secret = secret_});
    } catch (const CommError& error) {
      // The options do not make this node the host, and another process listens there: most likely another node on this
      // machine.
      if (options_.fixed_node_ranks || options_.is_host) throw;
      cannot_host_ = error.what();
      return;
    }
    is_host_ = true;
    address = server_->address();
    if (options_.bind_address.empty() && is_loopback(address.host) && address.host != "localhost" &&
        resolved_address(address.host) != address.host)
      log::warn(
          fmt::format("on this node the name '{}' stands for {}: other nodes cannot reach the "
                      "rendezvous there; give the node's address instead",
                      address.host, resolved_address(address.host)));
    const std::string nodes = options_.min_nodes == options_.max_nodes
                                  ? std::to_string(options_.max_nodes)
                                  : fmt::format("{} to {}", options_.min_nodes, options_.max_nodes);
    log::info(fmt::format("this node hosts the rendezvous of {} nodes at {}{}", nodes, options_.endpoint.text(),
                          bind == "*" ? ", listening on every interface" : ""));
    if (secret_.empty())
      log::warn(
          "no secret is set, so whoever reaches the rendezvous can join the job: set PHALANX_JOB_SECRET or "
          "PHALANX_JOB_SECRET_FILE alike on every node");
  }

  // Waits until a process listens at the endpoint.
  bool reach(const HostPort& address) {
    const auto deadline = Clock::now() + options_.join_timeout;
    const auto slice = std::chrono::milliseconds(500);
    std::string reason;
    for (bool told = false;; told = true) {
      if (wants_to_leave()) return false;
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      const auto begin = Clock::now();
      try {
        connect_to(address, std::clamp(left, std::chrono::milliseconds(1), slice), "the rendezvous");
        return true;
      } catch (const CommError& error) {
        std::string now = error.what();
        // Remove the duration of the attempt: it does not help the user.
        if (const std::size_t at = now.find(" ms: "); at != std::string::npos) now.erase(0, at + 5);
        // The last attempt may have been cut short. The error of the one before is more useful.
        if (reason.empty() || left.count() > 0) reason = std::move(now);
      }
      if (Clock::now() >= deadline)
        throw CommError(fmt::format("the node that hosts the rendezvous at {} has not come within {:g} s: {}",
                                    address.text(), std::chrono::duration<double>(options_.join_timeout).count(),
                                    reason));
      if (!told) log::info(fmt::format("waiting for the node that hosts the rendezvous at {}", address.text()));
      // A network that is not up yet refuses at once, so wait for the rest of the slice.
      std::unique_lock lock(mutex_);
      changed_.wait_until(lock, begin + slice, [&] { return leaving_; });
    }
  }

  std::string find_own_address() const {
    if (!options_.local_address.empty()) return resolved_address(options_.local_address);
    if (is_host_ && !options_.bind_address.empty() && options_.bind_address != "*")
      return resolved_address(options_.bind_address);
    return is_loopback(options_.endpoint.host) ? "127.0.0.1" : phalanx::own_address(options_.endpoint);
  }

  void claim_number() {
    NodeMessage message{.kind = NodeMessage::Kind::join, .join = join_};
    const std::string text = to_json(message);
    int number = 0;
    if (const auto hint = store_->try_get(rendezvous_keys::kMembers)) number = std::stoi(*hint);
    // The node that sets member m's first message becomes member m. The message contains the process id, since equal
    // messages could not be distinguished.
    while (store_->compare_and_set(rendezvous_keys::message(number, 0), std::nullopt, text) != text) ++number;
    number_ = number;
    store_->set(rendezvous_keys::beat(number), "0");
    store_->set_when_lost(rendezvous_keys::lost(number), "");
  }

  // The sender thread: sends messages when there are any, and heartbeats at intervals.
  void speak() {
    int next_message = 1;
    std::int64_t beats = 0;
    auto next_beat = Clock::now() + options_.keep_alive;
    try {
      for (;;) {
        std::deque<NodeMessage> messages;
        bool last = false;
        {
          std::unique_lock lock(mutex_);
          changed_.wait_until(lock, next_beat, [&] { return broken_ || leaving_ || !outbox_.empty(); });
          if (broken_) return;
          messages.swap(outbox_);
          last = leaving_;
        }
        for (const NodeMessage& message : messages)
          store_->set(rendezvous_keys::message(number_, next_message++), to_json(message));
        if (last) {
          store_->set(rendezvous_keys::leave(number_), "");
          store_->set(rendezvous_keys::message(number_, next_message++),
                      to_json(NodeMessage{.kind = NodeMessage::Kind::bye}));
          return;
        }
        if (Clock::now() < next_beat) continue;
        store_->set(rendezvous_keys::beat(number_), std::to_string(++beats));
        next_beat = Clock::now() + options_.keep_alive;
      }
    } catch (const std::exception& error) {
      post_event({{},
                  fmt::format("the node that hosts the rendezvous at {} cannot be reached any more: {}",
                              options_.endpoint.text(), error.what())});
    }
  }

  const NodesOptions options_;
  NodeJoin join_;
  const std::string secret_;
  UniqueFd wake_;
  std::unique_ptr<TcpStoreServer> server_;
  std::string cannot_host_;  // the error if this node tried to host and failed
  std::shared_ptr<TcpStore> store_;
  std::unique_ptr<CoordinatorService> service_;
  std::atomic<int> number_{-1};
  std::atomic<bool> is_host_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Membership::Event> events_;
  std::deque<NodeMessage> outbox_;
  bool leaving_ = false, broken_ = false;
  std::thread listener_;
};

NodeMembership::NodeMembership(const NodesOptions& options, NodeJoin join, std::string secret)
    : impl_(std::make_unique<Impl>(options, std::move(join), std::move(secret))) {}
NodeMembership::~NodeMembership() = default;
int NodeMembership::fd() const { return impl_->fd(); }
std::optional<Membership::Event> NodeMembership::next() { return impl_->next(); }
void NodeMembership::send(NodeMessage message) { impl_->send(std::move(message)); }
int NodeMembership::number() const { return impl_->number(); }
std::string NodeMembership::own_address() const { return impl_->own_address(); }
bool NodeMembership::is_host() const { return impl_->is_host(); }

}  // namespace phalanx
