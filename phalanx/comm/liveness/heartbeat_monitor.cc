#include "phalanx/comm/liveness/heartbeat_monitor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/start_thread.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kListen{kFastestTick};  // between two looks at the others
constexpr milliseconds kListenPerRank{3};      // in large worlds, but not longer than a beat
constexpr milliseconds kQuickestBeat{20}, kSlowestBeat{1'000};
constexpr milliseconds kCall{1'000};         // the store has this long to answer
constexpr milliseconds kSilence{500};        // after this, send it nothing else
constexpr milliseconds kLongestLull{1'000};  // longest gap between two looks at the store that still counts as silence
constexpr milliseconds kRollCall{1'000};     // the other ranks have this long to answer
// The store has this long to record that this rank leaves. A slow store reads what it was sent a little later.
constexpr milliseconds kGoodbye{300};
constexpr milliseconds kRendezvousPollInterval{100};
constexpr std::size_t kMaxEndedGroups = 256;  // whose last collective is remembered

std::string heartbeat_key(int rank) { return fmt::format("pulse/{}", rank); }
std::string lost_key(int rank) { return fmt::format("lost/{}", rank); }
std::string event_key(std::uint64_t number) { return fmt::format("event/{}", number); }

milliseconds beat_of(milliseconds limit) {
  return limit.count() > 0 ? std::clamp(limit / 10, kQuickestBeat, kSlowestBeat) : kSlowestBeat;
}

double in_seconds(nanoseconds time) { return std::chrono::duration<double>(time).count(); }

/// The ranks of a group whose world rank satisfies the condition.
template <class Condition>
std::vector<int> ranks_where(const std::vector<int>& members, Condition is_so) {
  std::vector<int> ranks;
  for (std::size_t r = 0; r < members.size(); ++r)
    if (is_so(members[r])) ranks.push_back(static_cast<int>(r));
  return ranks;
}

std::string died_text(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += fmt::format("{}rank {} has died", text.empty() ? "" : ", ", rank);
  return text;
}

}  // namespace

// What the monitors of a world share: the thread, the client of the store, and all that they learn. Ranks are world
// ranks.
class HeartbeatMonitor::World {
 public:
  using Counter = std::atomic<std::uint64_t>;

  World(const std::shared_ptr<Store>& store, int rank, int size, Options options)
      : store_(store->clone()),
        rank_(rank),
        size_(size),
        options_(std::move(options)),
        beat_(beat_of(options_.heartbeat)),
        tick_(std::min(std::max(kListen, size * kListenPerRank), beat_)),
        silence_limit_(heartbeat_timeout(options_.heartbeat, tick_)),
        peers_(static_cast<std::size_t>(size)) {
    for (int other = 0; other < size_; ++other)
      if (other != rank_) watched_.push_back(other);
    store_->set(heartbeat_key(rank_), "0\n");
    store_->set_when_lost(lost_key(rank_), "died");
    if (size_ > 1) thread_ = start_thread("the watch over the ranks", [this] { run(); });
  }
  ~World() {
    stopping_.store(true);
    try {
      store_->interrupt(kGoodbye);
      if (!is_store_lost()) {
        // Sent before the connection closes, so its end means "left" even if the store does not answer in time.
        store_->set_when_lost(lost_key(rank_), "left");
        store_->set(lost_key(rank_), "left");
      }
    } catch (...) {
      // The store is silent, or has gone.
    }
    store_->interrupt();
    if (thread_.joinable()) thread_.join();
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  const Options& options() const { return options_; }

  void observe(const std::vector<std::string>& identities) {
    const std::lock_guard lock(mutex_);
    if (!processes_) processes_ = std::make_unique<ProcessProbe>(identities, options_.heartbeat);
  }

  std::shared_ptr<Counter> collectives_of(const std::string& group) {
    auto counter = std::make_shared<Counter>(0);
    const std::lock_guard lock(mutex_);
    if (collectives_.size() > kMaxEndedGroups)
      std::erase_if(collectives_, [](const auto& entry) { return entry.second.use_count() == 1; });
    collectives_[group] = counter;
    return counter;
  }

  void wait_in(const std::string& group, const std::string& for_what) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_new] = waits_.try_emplace(group, for_what);
    has_update_ |= is_new || place->second != for_what;
    place->second = for_what;
  }

  void leave(const std::string& group) {
    const std::lock_guard lock(mutex_);
    waits_.erase(group);
    // The next wait starts counting from zero.
    if (waits_.empty()) polled_at_ = {};
  }

  std::vector<std::string> states(const std::string& group) const {
    const std::string wanted = group + "\t";
    std::vector<std::string> result(peers_.size());
    const std::lock_guard lock(mutex_);
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      const std::string& text = peers_[r].text;
      for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = std::min(text.find('\n', begin), text.size());
        if (text.compare(begin, wanted.size(), wanted) == 0)
          result[r] = text.substr(begin + wanted.size(), end - begin - wanted.size());
        begin = end + 1;
      }
    }
    return result;
  }

  std::vector<int> behind(const std::string& group, const std::vector<int>& ranks, std::uint64_t sequence) {
    std::vector<int> result, gone;
    try {
      const std::string roll = fmt::format("roll/{}", store_->add("rolls", 1));
      post_event(fmt::format("roll\n{}\n{}", group, roll));
      std::map<int, std::string> keys;
      for (const int rank : ranks)
        if (rank != rank_) keys[rank] = fmt::format("{}/{}", roll, rank);
      try {
        std::vector<std::string> all;
        for (const auto& [rank, key] : keys) all.push_back(key);
        store_->wait(all, kRollCall);
      } catch (const Error&) {
        // A silent rank is behind.
      }
      for (const auto& [rank, key] : keys) {
        const auto answer = store_->try_get(key);
        if (!answer && has_left(rank))
          gone.push_back(rank);
        else if (!answer || std::strtoull(answer->c_str(), nullptr, 10) <= sequence)
          result.push_back(rank);
      }
    } catch (const Error&) {
      // Without the store there are no answers: no names are better than wrong ones.
    }
    // A rank that has left without an answer may have timed out in the same collective: another one kept all waiting.
    return result.empty() ? gone : result;
  }

  void announce_abort(const std::string& group, const std::string& reason) {
    // Otherwise the peers learn it from their connections to this rank.
    if (!is_store_lost() && store_silence().count() == 0) post_event(fmt::format("abort\n{}\n{}", group, reason));
  }

  std::string abort_reason(const std::string& group) const {
    const std::lock_guard lock(mutex_);
    const auto found = aborted_.find(group);
    return found == aborted_.end() ? "" : found->second;
  }

  std::string silence_reason(int rank) {
    if (rank == rank_ || !processes_ || options_.heartbeat.count() <= 0) return {};
    if (processes_->can_see(rank)) {
      if (processes_->is_dead(rank)) return {};
      // A living process is well, unless the network in between may be down.
      std::string stopped = processes_->failure_reason(rank);
      if (!stopped.empty() || processes_->shares_network(rank)) return stopped;
    }
    const bool hosts = rank == options_.store_rank;
    if (hosts || options_.store_rank < 0)
      if (const auto silence = certain_store_silence(); silence.count() > 0)
        return fmt::format("{} has not answered{} for {:.1f} s: {}, or {} network down",
                           hosts ? "hosts the store, which" : "cannot be heard of: the store",
                           hosts ? "" : " this rank", in_seconds(silence),
                           hosts ? "the process is stopped" : "the process that hosts it is stopped",
                           hosts ? "its node or" : "the");
    const std::lock_guard lock(mutex_);
    const nanoseconds silent = peers_[static_cast<std::size_t>(rank)].silent;
    if (silent < silence_limit_) return {};
    return fmt::format("has given no sign of life for {:.1f} s: its process is stopped, or its node or network down",
                       in_seconds(silent));
  }

  // The store lost the rank, at least `age` ago.
  bool has_died(int rank, milliseconds age = {}) const {
    const std::lock_guard lock(mutex_);
    const auto found = dead_.find(rank);
    return found != dead_.end() && found->second <= Clock::now() - age;
  }

  bool has_left(int rank) const {
    const std::lock_guard lock(mutex_);
    return left_.contains(rank);
  }

  bool is_process_dead(int rank) const { return processes_ && processes_->is_dead(rank); }

  // If the store died with one of the ranks, nothing reports the dead ranks.
  bool died_with_store(int rank) const {
    return is_store_lost() && rank != rank_ && !has_left(rank) &&
           (is_process_dead(rank) || rank == options_.store_rank);
  }

  bool is_store_lost() const { return is_store_lost_.load(std::memory_order_acquire); }

  // Zero below kSilence.
  nanoseconds store_silence() const {
    const auto since = unanswered_since_.load(std::memory_order_relaxed);
    if (since == 0) return {};
    const auto silence = Clock::now() - Clock::time_point(Clock::duration(since));
    return silence > kSilence ? silence : Clock::duration{};
  }

 private:
  struct Peer {
    std::string text;  // as read last
    nanoseconds silent{};
  };

  // Searches for the next free number. A counter would leave a gap if the rank that took a number were killed before it
  // wrote.
  void post_event(const std::string& text) {
    for (std::uint64_t number = next_event_.load();; ++number)
      if (store_->compare_and_set(event_key(number), std::nullopt, text) == text) return;
  }

  // How long the store has been silent while this rank looked. Zero until that exceeds the limit.
  nanoseconds certain_store_silence() {
    const bool silent = store_silence().count() > 0;
    const auto now = Clock::now();
    const std::lock_guard lock(mutex_);
    if (!silent) {
      silence_looked_at_ = {};
      return {};
    }
    if (now - silence_looked_at_ > kLongestLull) silent_since_ = now - kSilence;
    silence_looked_at_ = now;
    const auto silence = now - silent_since_;
    return silence < silence_limit_ ? Clock::duration{} : silence;
  }

  void run() {
    pthread_setname_np(pthread_self(), "phalanx-monitor");
    Clock::time_point next_poll{}, next_beat{};
    while (!stopping_.load() && !is_store_lost()) {
      bool polls = false, publishes = Clock::now() >= next_beat;
      {
        const std::lock_guard lock(mutex_);
        polls = processes_ && !waits_.empty() && Clock::now() >= next_poll;
        publishes |= std::exchange(has_update_, false);
      }
      if (polls) {
        next_poll = Clock::now() + tick_;
        poll_peers();
      }
      if (publishes) {
        next_beat = Clock::now() + beat_;
        publish();
      }
      await_news(std::clamp(std::chrono::ceil<milliseconds>(next_beat - Clock::now()), milliseconds(1), tick_));
    }
  }

  // Makes a request that the store answers at once, or within `wait`. False if there is no result: the keys do not
  // exist, the request is wrong, the store is silent, or its connection broke.
  bool ask(milliseconds wait, const std::function<void()>& request) {
    const auto begin = Clock::now();
    Clock::rep none = 0;
    unanswered_since_.compare_exchange_strong(none, (begin + wait).time_since_epoch().count());
    bool has_result = true;
    try {
      request();
    } catch (const StoreTimeout&) {
      has_result = false;
    } catch (const StoreRequestError& error) {
      if (!std::exchange(has_warned_, true)) log::warn(fmt::format("the watch over the ranks: {}", error.what()));
      std::this_thread::sleep_until(begin + wait);  // the thread asks again at once
      has_result = false;
    } catch (const StoreConnectionError&) {
      lose_store();
      return false;
    } catch (const Error&) {
      // Before the time for an answer is over, the store was not silent: it cannot be reached.
      if (Clock::now() - begin < (wait.count() > 0 ? wait : kCall)) lose_store();
      return false;
    }
    unanswered_since_.store(0, std::memory_order_relaxed);
    return has_result;
  }

  void lose_store() {
    if (!stopping_.load()) is_store_lost_.store(true, std::memory_order_release);
  }

  void poll_peers() {
    std::vector<std::string> keys, texts;
    for (int rank = 0; rank < size_; ++rank) keys.push_back(heartbeat_key(rank));
    if (!ask(tick_, [&] { texts = store_->get_all(keys, tick_); })) return;  // a rank without a key has not started yet
    const auto now = Clock::now();
    const std::lock_guard lock(mutex_);
    // An earlier read says nothing about a time in which this rank did not look.
    const auto passed = polled_at_ == Clock::time_point{} ? Clock::duration{} : now - polled_at_;
    const auto counted = std::min<Clock::duration>(passed, tick_ * 2);
    polled_at_ = now;
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      Peer& peer = peers_[r];
      peer.silent = peer.text == texts[r] ? peer.silent + counted : nanoseconds{};
      peer.text = std::move(texts[r]);
    }
  }

  void publish() {
    std::string text = fmt::format("{}\n", ++beats_);
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [group, state] : waits_) text += fmt::format("{}\t{}\n", group, state);
    }
    ask({}, [&] { store_->set(heartbeat_key(rank_), text); });
  }

  void await_news(milliseconds wait) {
    std::vector<std::string> keys{event_key(next_event_.load())};
    for (const int rank : watched_) keys.push_back(lost_key(rank));
    std::string key, value;
    if (!ask(wait, [&] { key = store_->wait_any(keys, wait); })) return;
    // A store that reports its own host has outlived it, so the host has left. The store may end before it says so.
    const bool is_host = options_.store_rank >= 0 && key == lost_key(options_.store_rank);
    if (is_host) {
      const std::lock_guard lock(mutex_);
      left_.insert(options_.store_rank);
    }
    if (!ask({}, [&] { value = store_->get(key, kCall); }) && !is_host) return;
    if (key == keys.front()) {
      next_event_.fetch_add(1);
      return handle_event(value);
    }
    const auto lost = std::ranges::find(watched_, key, lost_key);
    const std::lock_guard lock(mutex_);
    if (value == "died" && !is_host)
      dead_.emplace(*lost, Clock::now());
    else
      left_.insert(*lost);
    watched_.erase(lost);
  }

  void handle_event(const std::string& event) {
    const std::size_t first = event.find('\n'), second = event.find('\n', first + 1);
    const std::string group = event.substr(first + 1, second - first - 1), rest = event.substr(second + 1);
    std::shared_ptr<Counter> begun;
    {
      const std::lock_guard lock(mutex_);
      if (event.starts_with("abort")) {
        aborted_.emplace(group, rest);
        return;
      }
      if (const auto found = collectives_.find(group); found != collectives_.end()) begun = found->second;
    }
    ask({}, [&] { store_->set(fmt::format("{}/{}", rest, rank_), std::to_string(begun ? begun->load() : 0)); });
  }

  const std::shared_ptr<Store> store_;  // a client of its own
  const int rank_, size_;
  const Options options_;
  const milliseconds beat_, tick_, silence_limit_;
  std::atomic<bool> stopping_{false}, is_store_lost_{false};
  std::atomic<Clock::rep> unanswered_since_{0};  // when the store should have answered; 0: it has
  std::atomic<std::uint64_t> next_event_{0};

  mutable std::mutex mutex_;                  // for what follows
  std::unique_ptr<ProcessProbe> processes_;   // set once, before other threads ask
  std::map<std::string, std::string> waits_;  // group -> what for
  bool has_update_ = false;                   // waits_ must be published at once
  std::vector<Peer> peers_;
  Clock::time_point polled_at_{};                           // zero: not since this rank waits
  Clock::time_point silent_since_{}, silence_looked_at_{};  // of the store
  std::map<int, Clock::time_point> dead_;
  std::set<int> left_;
  std::map<std::string, std::string> aborted_;                   // group -> the first reason
  std::map<std::string, std::shared_ptr<Counter>> collectives_;  // also of groups that have ended here

  // Used by the thread alone.
  std::vector<int> watched_;  // the other ranks that have neither died nor left
  std::uint64_t beats_ = 0;
  bool has_warned_ = false;  // of a wrong request
  std::thread thread_;
};

HeartbeatMonitor::HeartbeatMonitor(std::shared_ptr<World> world, std::shared_ptr<Store> store, std::string id,
                                   std::vector<int> members, int rank)
    : world_(std::move(world)),
      store_(std::move(store)),
      id_(std::move(id)),
      members_(std::move(members)),
      rank_(rank),
      collectives_(world_->collectives_of(id_)) {}

HeartbeatMonitor::HeartbeatMonitor(const std::shared_ptr<Store>& store, int rank, int size, const Options& options)
    : HeartbeatMonitor(std::make_shared<World>(store, rank, size, options), store, options.group,
                       std::vector<int>(static_cast<std::size_t>(size)), rank) {
  std::iota(members_.begin(), members_.end(), 0);
}

HeartbeatMonitor HeartbeatMonitor::split(std::uint64_t serial, const std::vector<int>& members, int rank) const {
  std::vector<int> of_world;
  for (const int member : members) of_world.push_back(members_[static_cast<std::size_t>(member)]);
  return {world_, store_, fmt::format("{}.{}.{}", id_, serial, members.front()), std::move(of_world), rank};
}

milliseconds HeartbeatMonitor::connect_timeout() const { return world_->options().connect_timeout; }

std::vector<std::string> HeartbeatMonitor::rendezvous(const std::string& name, const std::string& value) {
  PrefixStore store(store_, id_);
  store.set(fmt::format("{}/{}", name, rank()), value);
  std::vector<std::string> keys;
  for (int r = 0; r < size(); ++r) keys.push_back(fmt::format("{}/{}", name, r));
  const auto deadline = Clock::now() + connect_timeout();
  const milliseconds longest = std::max(kRendezvousPollInterval, size() * kListenPerRank);
  for (;;) {
    const auto begin = Clock::now();
    const auto left = std::chrono::ceil<milliseconds>(deadline - begin);
    const auto slice = std::clamp(left, milliseconds(0), longest);
    try {
      return store.get_all(keys, slice);
    } catch (const CommError&) {
      if (Clock::now() - begin < slice) throw;  // not a timeout
    }
    throw_if_peer_failed();
    if (left > slice) continue;
    std::vector<int> missing;
    for (int r = 0; r < size(); ++r)
      if (!store.try_get(keys[static_cast<std::size_t>(r)])) missing.push_back(r);
    if (missing.empty()) continue;
    throw CommError(fmt::format("{}: {}: of the {} ranks of group '{}' these have not come within {} s: {}",
                                world_->options().backend, store.describe(), size(), id_, in_seconds(connect_timeout()),
                                fmt::join(missing, ", ")));
  }
}

std::vector<std::string> HeartbeatMonitor::join(const std::string& identity) {
  std::vector<std::string> identities = rendezvous("rank", identity);
  observe(identities);
  return identities;
}

void HeartbeatMonitor::observe(const std::vector<std::string>& identities) { world_->observe(identities); }

void HeartbeatMonitor::throw_if_peer_failed() {
  wait_in("making");
  if (const std::string why = failure_reason(); !why.empty())
    throw CommError(fmt::format("group '{}' of {} could not be made: {}", id_, world_->options().backend, why));
}

std::string HeartbeatMonitor::announced_failure(milliseconds age) const {
  std::string text = died_text(ranks_where(members_, [&](int rank) { return world_->has_died(rank, age); }));
  if (text.empty()) text = announced_abort();
  if (!text.empty()) return text;
  text = died_text(ranks_where(members_, [&](int rank) { return world_->died_with_store(rank); }));
  return text.empty() ? text : text + ", and with it the store";
}

std::string HeartbeatMonitor::failure_reason(milliseconds age) const {
  std::string text = announced_failure(age);
  for (int r = 0; r < size() && text.empty(); ++r)
    if (const std::string why = silence_reason(r); !why.empty()) text = fmt::format("rank {} {}", r, why);
  return text;
}

std::string HeartbeatMonitor::announced_abort() const { return world_->abort_reason(id_); }

bool HeartbeatMonitor::has_lost_rank() const {
  return std::ranges::any_of(members_, [this](int rank) { return world_->has_died(rank); });
}

std::string HeartbeatMonitor::silence_reason(int rank) const {
  return world_->silence_reason(members_[static_cast<std::size_t>(rank)]);
}

bool HeartbeatMonitor::is_unresponsive(int rank) const {
  const int member = members_[static_cast<std::size_t>(rank)];
  return world_->has_died(member) || world_->is_process_dead(member) || !world_->silence_reason(member).empty();
}

std::string HeartbeatMonitor::who_left() const {
  const std::vector<int> left = ranks_where(members_, [this](int rank) { return world_->has_left(rank); });
  if (left.empty()) return {};
  return fmt::format("rank{} {} ha{} ended, or closed the communicator", left.size() == 1 ? "" : "s",
                     fmt::join(left, ", "), left.size() == 1 ? "s" : "ve");
}

std::string HeartbeatMonitor::disconnect_reason() const {
  if (world_->is_store_lost())
    return fmt::format(
        "this rank has lost its connection to the {}, so the others take it for dead: the process that hosts the store "
        "has ended, or the network between is down",
        store_->describe());
  const nanoseconds silence = world_->store_silence();
  if (silence.count() == 0) return {};
  return fmt::format(
      "the {} has not answered this rank for {:.1f} s, so the others take it for dead: the process that hosts "
      "the store is stopped, or the network between is down",
      store_->describe(), in_seconds(silence));
}

bool HeartbeatMonitor::is_store_silent() const { return world_->store_silence().count() > 0; }

void HeartbeatMonitor::wait_in(const std::string& for_what) { world_->wait_in(id_, for_what); }

void HeartbeatMonitor::check_wait(const std::string& for_what, milliseconds age) {
  wait_in(for_what);
  if (const std::string why = failure_reason(age); !why.empty()) throw CommError(why);
}

void HeartbeatMonitor::end_wait() { world_->leave(id_); }

std::vector<std::string> HeartbeatMonitor::states() const {
  const std::vector<std::string> of_world = world_->states(id_);
  std::vector<std::string> result;
  for (const int member : members_) result.push_back(of_world[static_cast<std::size_t>(member)]);
  return result;
}

std::vector<int> HeartbeatMonitor::behind(std::uint64_t collective) const {
  if (is_store_silent()) return {};
  const std::vector<int> late = world_->behind(id_, members_, collective);
  return ranks_where(members_, [&](int rank) { return std::ranges::find(late, rank) != late.end(); });
}

void HeartbeatMonitor::announce_abort(const std::string& reason) noexcept {
  try {
    world_->announce_abort(id_, fmt::format("rank {} gave up: {}", rank_, reason));
  } catch (...) {  // the store has failed, or no memory for the text
  }
}

}  // namespace phalanx
