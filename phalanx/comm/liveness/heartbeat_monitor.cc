#include "phalanx/comm/liveness/heartbeat_monitor.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"

namespace phalanx {
namespace {

constexpr std::chrono::milliseconds kListen{100};       // between two reads while this rank waits
constexpr std::chrono::milliseconds kListenPerRank{3};  // at least, so that large worlds do not overload the store
constexpr std::chrono::milliseconds kSlowestBeat{1'000};
constexpr std::chrono::milliseconds kCall{1'000};         // the store has this long to answer
constexpr std::chrono::milliseconds kSilence{500};        // after this, send it nothing else
constexpr std::chrono::milliseconds kLongestLull{1'000};  // longest gap between two calls that still counts as silence

std::string heartbeat_key(int rank) { return fmt::format("pulse/{}", rank); }

}  // namespace

HeartbeatMonitor::HeartbeatMonitor(const std::shared_ptr<Store>& store, int rank,
                                   const std::vector<std::string>& identities, Options options)
    : store_(store->clone()),
      rank_(rank),
      size_(static_cast<int>(identities.size())),
      options_(options),
      processes_(identities, options.heartbeat),
      peers_(identities.size()) {
  store_->set(heartbeat_key(rank_), "0\n");
  if (size_ > 1) thread_ = start_thread("the signs of life", [this] { run(); });
}

HeartbeatMonitor::~HeartbeatMonitor() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  store_->interrupt();
  if (thread_.joinable()) thread_.join();
}

void HeartbeatMonitor::wait_in(const std::string& group, const std::string& state) {
  {
    const std::lock_guard lock(mutex_);
    auto [place, is_new] = waits_.try_emplace(group, state);
    if (!is_new && place->second == state) return;
    place->second = state;
    has_update_ = true;
  }
  changed_.notify_all();
}

void HeartbeatMonitor::leave(const std::string& group) {
  const std::lock_guard lock(mutex_);
  waits_.erase(group);
  // The next wait starts counting from zero.
  if (waits_.empty()) polled_at_ = {};
}

std::vector<std::string> HeartbeatMonitor::states(const std::string& group) const {
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

std::chrono::nanoseconds HeartbeatMonitor::store_silence() const {
  const auto since = unanswered_since_.load(std::memory_order_relaxed);
  if (since == 0) return {};
  const auto silence = Clock::now() - Clock::time_point(Clock::duration(since));
  return silence > kSilence ? silence : Clock::duration{};
}

bool HeartbeatMonitor::is_store_silent() const { return store_silence().count() > 0; }

void HeartbeatMonitor::begin_call() {
  Clock::rep none = 0;
  unanswered_since_.compare_exchange_strong(none, Clock::now().time_since_epoch().count());
}

std::string HeartbeatMonitor::failure_reason(int rank) {
  if (rank == rank_ || options_.heartbeat.count() <= 0) return {};
  if (processes_.can_see(rank)) {
    if (processes_.is_dead(rank)) return {};
    // A living process is well, unless the network in between may be down.
    const std::string stopped = processes_.failure_reason(rank);
    if (!stopped.empty() || processes_.shares_network(rank)) return stopped;
  }
  const bool hosts = rank == options_.store_rank;
  if (hosts || options_.store_rank < 0)
    if (const auto silence = certain_store_silence(); silence.count() > 0)
      return fmt::format("{} has not answered{} for {:.1f} s: {}, or {} network down",
                         hosts ? "hosts the store, which" : "cannot be heard of: the store", hosts ? "" : " this rank",
                         std::chrono::duration<double>(silence).count(),
                         hosts ? "the process is stopped" : "the process that hosts it is stopped",
                         hosts ? "its machine or" : "the");
  std::chrono::nanoseconds silent{};
  {
    const std::lock_guard lock(mutex_);
    silent = peers_[static_cast<std::size_t>(rank)].silent;
  }
  if (silent < heartbeat_timeout(options_.heartbeat)) return {};
  return fmt::format("has given no sign of life for {:.1f} s: its process is stopped, or its machine or network down",
                     std::chrono::duration<double>(silent).count());
}

// How long the store has been silent while this rank looked. Zero until that exceeds the limit.
std::chrono::nanoseconds HeartbeatMonitor::certain_store_silence() {
  const bool silent = is_store_silent();
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (!silent) {
    silence_looked_at_ = {};
    return {};
  }
  if (now - silence_looked_at_ > kLongestLull) silent_since_ = now - kSilence;
  silence_looked_at_ = now;
  const auto silence = now - silent_since_;
  return silence < heartbeat_timeout(options_.heartbeat) ? Clock::duration{} : silence;
}

void HeartbeatMonitor::run() {
  pthread_setname_np(pthread_self(), "phalanx-pulse");
  const auto listen_every = std::max(kListen, size_ * kListenPerRank);
  const auto beat_every =
      options_.heartbeat.count() > 0
          ? std::clamp<std::chrono::milliseconds>(options_.heartbeat / 10, std::chrono::milliseconds(20), kSlowestBeat)
          : kSlowestBeat;
  Clock::time_point published_at{};
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const bool waits = !waits_.empty();
    const bool publishes = has_update_ || Clock::now() - published_at >= beat_every;
    has_update_ = false;
    lock.unlock();
    // Read before writing: a read has a timeout if the store does not answer, a write has none.
    bool answered = true;
    if (waits) poll_peers();
    if (publishes) answered = publish();
    if (publishes && answered) published_at = Clock::now();
    lock.lock();
    const auto pause = waits_.empty() ? beat_every : std::min<std::chrono::milliseconds>(listen_every, beat_every);
    changed_.wait_for(lock, pause, [this] { return stopping_ || has_update_; });
  }
}

// Publishes this rank's counter and waits. False if the store does not answer.
bool HeartbeatMonitor::publish() {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    text = fmt::format("{}\n", ++beats_);
    for (const auto& [group, state] : waits_) text += fmt::format("{}\t{}\n", group, state);
  }
  begin_call();
  try {
    store_->get(heartbeat_key(rank_), kCall);
    store_->set(heartbeat_key(rank_), text);
    answered();
    return true;
  } catch (const Error&) {
    return false;
  }
}

void HeartbeatMonitor::poll_peers() {
  std::vector<std::string> keys, texts;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(heartbeat_key(rank));
  begin_call();
  try {
    texts = store_->get_all(keys, kCall);
    answered();
  } catch (const Error&) {
    texts.clear();  // no answer, or one rank's key is not there yet: the next publish() knows which
  }
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (texts.empty()) return;
  // An earlier read says nothing about a time in which this rank did not look.
  const auto passed = polled_at_ == Clock::time_point{} ? Clock::duration{} : now - polled_at_;
  const auto counted = std::min<Clock::duration>(passed, std::max(kListen, size_ * kListenPerRank) * 2);
  polled_at_ = now;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    Peer& peer = peers_[r];
    peer.silent = peer.text == texts[r] ? peer.silent + counted : std::chrono::nanoseconds{};
    peer.text = texts[r];
  }
}

}  // namespace phalanx
