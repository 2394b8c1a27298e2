#include "phalanx/comm/peer_pulse.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr std::chrono::milliseconds kListen{100};       // between two readings while this rank waits
constexpr std::chrono::milliseconds kListenPerRank{3};  // at least, so that large worlds do not drown the store
constexpr std::chrono::milliseconds kSlowestBeat{1'000};
constexpr std::chrono::milliseconds kCall{1'000};         // that the store is given for an answer
constexpr std::chrono::milliseconds kSilence{500};        // after which it is not worth asking anything else
constexpr std::chrono::milliseconds kLongestLull{1'000};  // between two looks, for the time between them to count

std::string pulse_key(int rank) { return fmt::format("pulse/{}", rank); }

}  // namespace

PeerPulse::PeerPulse(std::shared_ptr<Store> store, int rank, const std::vector<std::string>& identities,
                     Options options)
    : store_(std::move(store)),
      rank_(rank),
      size_(static_cast<int>(identities.size())),
      options_(options),
      processes_(identities, options.heartbeat),
      peers_(identities.size()) {
  store_->set(pulse_key(rank_), "0\n");
  if (size_ > 1) thread_ = std::thread([this] { run(); });
}

PeerPulse::~PeerPulse() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void PeerPulse::wait_in(const std::string& group, const std::string& state) {
  {
    const std::lock_guard lock(mutex_);
    auto [place, is_new] = waits_.try_emplace(group, state);
    if (!is_new && place->second == state) return;
    place->second = state;
    is_news_ = true;
  }
  changed_.notify_all();
}

void PeerPulse::leave(const std::string& group) {
  const std::lock_guard lock(mutex_);
  waits_.erase(group);
  // Whoever waits next begins to count anew.
  if (waits_.empty()) listened_at_ = {};
}

std::vector<std::string> PeerPulse::states(const std::string& group) const {
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

bool PeerPulse::is_store_silent() const {
  const auto began = call_began_.load(std::memory_order_relaxed);
  return began != 0 && Clock::now() - Clock::time_point(Clock::duration(began)) > kSilence;
}

std::string PeerPulse::trouble(int rank) {
  if (rank == rank_ || options_.heartbeat.count() <= 0) return {};
  if (processes_.can_see(rank)) return processes_.is_dead(rank) ? std::string() : processes_.trouble(rank);
  if (rank == options_.store_rank)
    if (const std::string why = why_store_is_silent(); !why.empty()) return why;
  std::chrono::nanoseconds silent{};
  {
    const std::lock_guard lock(mutex_);
    silent = peers_[static_cast<std::size_t>(rank)].silent;
  }
  if (silent < heartbeat_patience(options_.heartbeat)) return {};
  return fmt::format("has given no sign of life for {:.1f} s: its process is stopped, or its machine or network down",
                     std::chrono::duration<double>(silent).count());
}

std::string PeerPulse::why_store_is_silent() {
  const bool silent = is_store_silent();
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (!silent) {
    silence_looked_at_ = {};
    return {};
  }
  if (now - silence_looked_at_ > kLongestLull) silent_since_ = now - kSilence;
  silence_looked_at_ = now;
  if (now - silent_since_ < heartbeat_patience(options_.heartbeat)) return {};
  return fmt::format(
      "hosts the store, which has not answered for {:.1f} s: the process is stopped, or its machine or "
      "network down",
      std::chrono::duration<double>(now - silent_since_).count());
}

void PeerPulse::run() {
  pthread_setname_np(pthread_self(), "phalanx-pulse");
  const auto listen_every = std::max(kListen, size_ * kListenPerRank);
  const auto beat_every =
      options_.heartbeat.count() > 0
          ? std::clamp<std::chrono::milliseconds>(options_.heartbeat / 10, std::chrono::milliseconds(20), kSlowestBeat)
          : kSlowestBeat;
  Clock::time_point told{};
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const bool waits = !waits_.empty();
    const bool tells = is_news_ || Clock::now() - told >= beat_every;
    is_news_ = false;
    lock.unlock();
    // The question goes first: it is given up when the store does not answer, what is told is not.
    bool answered = true;
    if (waits) listen();
    if (tells) answered = tell();
    if (tells && answered) told = Clock::now();
    lock.lock();
    const auto pause = waits_.empty() ? beat_every : std::min<std::chrono::milliseconds>(listen_every, beat_every);
    changed_.wait_for(lock, pause, [this] { return stopping_ || is_news_; });
  }
}

// Own beat and waits. False if the store does not answer.
bool PeerPulse::tell() {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    text = fmt::format("{}\n", ++beats_);
    for (const auto& [group, state] : waits_) text += fmt::format("{}\t{}\n", group, state);
  }
  bool answered = true;
  call_began_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  try {
    store_->get(pulse_key(rank_), kCall);
    store_->set(pulse_key(rank_), text);
  } catch (const Error&) {
    answered = false;
  }
  call_began_.store(0, std::memory_order_relaxed);
  return answered;
}

void PeerPulse::listen() {
  std::vector<std::string> keys, texts;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(pulse_key(rank));
  call_began_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  try {
    texts = store_->get_all(keys, kCall);
  } catch (const Error&) {
    texts.clear();
  }
  call_began_.store(0, std::memory_order_relaxed);
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (texts.empty()) return;
  // What was read earlier says nothing about a time in which nobody looked.
  const auto passed = listened_at_ == Clock::time_point{} ? Clock::duration{} : now - listened_at_;
  const auto counted = std::min<Clock::duration>(passed, std::max(kListen, size_ * kListenPerRank) * 2);
  listened_at_ = now;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    Peer& peer = peers_[r];
    peer.silent = peer.text == texts[r] ? peer.silent + counted : std::chrono::nanoseconds{};
    peer.text = texts[r];
  }
}

}  // namespace phalanx
