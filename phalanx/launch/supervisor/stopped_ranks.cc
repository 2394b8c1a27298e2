#include "phalanx/launch/supervisor/stopped_ranks.h"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <sstream>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/signals.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

const std::string kStoppedRankKey = "stopped_rank";
const std::string kRendezvousPrefix = "init/";  // the prefix that the ranks use (rank_rendezvous.cc)
constexpr std::chrono::milliseconds kLookAtRanksEvery{500};

std::string name_of_host() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

}  // namespace

StoppedRanks::StoppedRanks(HostPort store, std::string secret, std::map<int, pid_t> processes)
    : address_(std::move(store)), secret_(std::move(secret)), host_(name_of_host()), processes_(std::move(processes)) {
  thread_ = start_thread("the watch for ranks that stand still", [this] { run(); });
}

StoppedRanks::~StoppedRanks() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (store_) store_->interrupt();  // a store that does not answer must not block us
  }
  changed_.notify_all();
  thread_.join();
}

void StoppedRanks::run() {
  pthread_setname_np(pthread_self(), "phalanx-stopped");
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLookAtRanksEvery, [this] { return stopping_; })) {
    lock.unlock();
    const std::string text = look(Clock::now());
    if (!text.empty() || !told_.empty()) publish(text);
    lock.lock();
  }
}

// Describes the rank that has been stopped longest: "rank pid milliseconds host". Empty if none is stopped.
std::string StoppedRanks::look(Clock::time_point now) {
  // If the launcher itself was suspended, the time of the ranks is unknown: the whole job may have been suspended.
  if (now - looked_at_ > 4 * kLookAtRanksEvery) since_.clear();
  looked_at_ = now;
  std::string text;
  Clock::time_point first = Clock::time_point::max();
  for (const auto& [rank, pid] : processes_) {
    if (!is_stopped(pid)) {
      since_.erase(rank);
      continue;
    }
    const auto since = since_.try_emplace(rank, now).first->second;
    if (since >= first) continue;
    first = since;
    const auto stopped_for = std::chrono::duration_cast<std::chrono::milliseconds>(now - since);
    text = fmt::format("{} {} {} {}", rank, pid, stopped_for.count(), host_);
  }
  return text;
}

void StoppedRanks::publish(const std::string& text) {
  constexpr std::chrono::seconds kPatience(1);
  try {
    std::shared_ptr<TcpStore> store = store_;
    if (!store) {
      store = std::make_shared<TcpStore>(
          address_, TcpStoreOptions{.timeout = kPatience, .connect_timeout = kPatience, .secret = secret_});
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      store_ = store;
    }
    store->set(kRendezvousPrefix + kStoppedRankKey, text);
    told_ = text;
  } catch (const Error&) {
    // The ranks that would read it get the same error.
  }
}

std::optional<StoppedRank> read_stopped_rank(Store& keys) {
  const auto text = keys.try_get(kStoppedRankKey);
  StoppedRank said;
  std::int64_t milliseconds = 0;
  std::istringstream words(text.value_or(""));
  if (!(words >> said.rank >> said.pid >> milliseconds >> said.host)) return std::nullopt;
  said.stopped_for = std::chrono::milliseconds(milliseconds);
  return said;
}

}  // namespace phalanx
