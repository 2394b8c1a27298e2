#include "phalanx/launch/supervisor/coordinator_service.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/start_thread.h"

namespace phalanx {

namespace rendezvous_keys {
std::string message(int member, int index) { return fmt::format("rendezvous/message/{}/{}", member, index); }
std::string order(int index) { return fmt::format("rendezvous/order/{}", index); }
std::string beat(int member) { return fmt::format("rendezvous/beat/{}", member); }
std::string lost(int member) { return fmt::format("rendezvous/lost/{}", member); }
std::string leave(int member) { return fmt::format("rendezvous/leave/{}", member); }
const char* const kMembers = "rendezvous/members";
}  // namespace rendezvous_keys

namespace {

constexpr const char* kQuitKey = "rendezvous/quit";

double wall_now_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

std::optional<std::string> wait_for_any(Store& store, const std::vector<std::string>& keys,
                                        std::chrono::milliseconds timeout) {
  try {
    return store.wait_any(keys, timeout);
  } catch (const CommError&) {
    // This is a timeout or a broken connection. After a timeout the store still answers.
    if (store.try_get(keys.front())) return keys.front();
    return std::nullopt;
  }
}

class CoordinatorService::Impl {
 public:
  using Clock = Coordinator::Clock;

  Impl(std::shared_ptr<Store> store, CoordinatorOptions options, KeepAlive keep_alive, Broken broken)
      : store_(std::move(store)),
        keep_alive_(keep_alive),
        broken_(std::move(broken)),
        address_(options.address),
        coordinator_(std::move(options), Clock::now()) {
    thread_ = start_thread("the rendezvous", [this] { run(); });
  }

  ~Impl() {
    try {
      store_->set(kQuitKey, "");
    } catch (const CommError&) {  // then the thread has got the same error
    }
    thread_.join();
  }

  void wait_for_departures(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    if (has_ended_) changed_.wait_for(lock, limit, [&] { return all_gone_; });
  }

 private:
  struct Member {
    int next_message = 1;
    std::optional<std::string> beat;
    Clock::time_point seen;
    int missed = 0;  // checks since `seen`; a pause of this host does not count as silence of the members
  };

  void run() {
    try {
      while (serve_once()) {
      }
    } catch (const std::exception& error) {
      break_down(fmt::format("the rendezvous at {} has broken down: {}", address_, error.what()));
    }
    std::lock_guard lock(mutex_);
    all_gone_ = true;
    changed_.notify_all();
  }

  // Agents only wait for orders, so one more order must tell them. Then wait for their goodbyes.
  void break_down(const std::string& reason) {
    try {
      coordinator_.give_up(reason);
      publish();
      while (serve_once()) {
      }
    } catch (const std::exception&) {
      broken_(reason);
    }
  }

  bool serve_once() {
    const auto now = Clock::now();
    const auto due = std::min(coordinator_.next_deadline(), next_check_);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - now);
    std::vector<std::string> keys{kQuitKey};
    std::vector<int> who{-1};
    // A member's messages are handled before its loss.
    for (const auto& [number, member] : members_) {
      keys.push_back(rendezvous_keys::message(number, member.next_message));
      who.push_back(number);
    }
    keys.push_back(rendezvous_keys::message(next_member_, 0));
    who.push_back(next_member_);
    const std::size_t first_lost = keys.size();
    for (const auto& [number, member] : members_) {
      keys.push_back(rendezvous_keys::lost(number));
      who.push_back(number);
    }
    const auto found =
        wait_for_any(*store_, keys, std::clamp(left, std::chrono::milliseconds(0), keep_alive_.interval));
    if (found == kQuitKey) return false;
    if (found) {
      const auto index = static_cast<std::size_t>(std::find(keys.begin(), keys.end(), *found) - keys.begin());
      if (index < first_lost) {
        take_message(who[index], *found);
      } else {
        coordinator_.lost(who[index], "its launcher has ended or cannot be reached any more", {}, Clock::now());
        members_.erase(who[index]);
      }
    }
    if (Clock::now() >= next_check_) check_beats();
    coordinator_.tick(Clock::now());
    publish();
    return true;
  }

  void take_message(int number, const std::string& key) {
    const std::string text = store_->get(key);
    const bool is_first = number == next_member_;
    // Count the message before parsing it, so that the next check looks for the next message.
    if (is_first) {
      members_[number].seen = Clock::now();
      store_->set(rendezvous_keys::kMembers, std::to_string(++next_member_));
    } else {
      ++members_[number].next_message;
      store_->delete_key(key);  // a first message stays: it is the claim to the member number
    }
    NodeMessage message;
    try {
      message = parse_node_message(text);
    } catch (const CommError& error) {
      if (!is_first) throw;
      Order order{.kind = Order::Kind::refuse, .member = number};
      order.text = fmt::format("the host of {} does not understand this node: {}", address_, error.what());
      write(order);
      return;
    }
    // Convert times to this node's clock, so that the failures of all nodes can be compared.
    const double shift = wall_now_s() - message.sent_at_s;
    for (WorkerFailure& failure : message.failures) failure.time_s += shift;
    coordinator_.handle(number, message, Clock::now());
    if (message.kind == NodeMessage::Kind::bye) members_.erase(number);
  }

  void check_beats() {
    const auto now = Clock::now();
    next_check_ = now + keep_alive_.interval;
    std::vector<int> silent;
    for (auto& [number, member] : members_) {
      auto beat = store_->try_get(rendezvous_keys::beat(number));
      if (beat != member.beat) {
        member.beat = std::move(beat);
        member.seen = now;
        member.missed = 0;
      } else if (++member.missed >= keep_alive_.missed) {
        silent.push_back(number);
      }
    }
    for (const int number : silent) {
      const std::chrono::duration<double> since = now - members_[number].seen;
      coordinator_.lost(number, fmt::format("no sign of life for {:.1f} s", since.count()), since, now);
      members_.erase(number);
    }
  }

  void publish() {
    const auto orders = coordinator_.take_orders();
    {
      // Set this before the orders can be read: the host's agent may end as soon as it has read the last order.
      std::lock_guard lock(mutex_);
      has_ended_ = coordinator_.has_ended();
      all_gone_ = members_.empty();
      changed_.notify_all();
    }
    for (const Order& order : orders) write(order);
  }

  void write(const Order& order) { store_->set(rendezvous_keys::order(next_order_++), to_json(order)); }

  std::shared_ptr<Store> store_;
  const KeepAlive keep_alive_;
  const Broken broken_;
  const std::string address_;
  // Used by the thread only:
  Coordinator coordinator_;
  std::map<int, Member> members_;
  int next_member_ = 0;
  int next_order_ = 0;
  Clock::time_point next_check_ = Clock::now() + keep_alive_.interval;
  // Shared between threads:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_ended_ = false, all_gone_ = false;
  std::thread thread_;
};

CoordinatorService::CoordinatorService(std::shared_ptr<Store> store, CoordinatorOptions options, KeepAlive keep_alive,
                                       Broken broken)
    : impl_(std::make_unique<Impl>(std::move(store), std::move(options), keep_alive, std::move(broken))) {}
CoordinatorService::~CoordinatorService() = default;
void CoordinatorService::wait_for_departures(std::chrono::milliseconds limit) { impl_->wait_for_departures(limit); }

}  // namespace phalanx
