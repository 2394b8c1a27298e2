#include "phalanx/launch/start_watch.h"

#include <fmt/format.h>
#include <pthread.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/launch/supervisor/stopped_ranks.h"
#include "phalanx/launch/supervisor/worker_report.h"

namespace phalanx {
namespace {

constexpr std::chrono::milliseconds kLookEvery{100};

std::string started_key(int rank) { return fmt::format("started/{}", rank); }

}  // namespace

StartWatch::StartWatch(const std::shared_ptr<Store>& keys, Options options)
    : options_(std::move(options)), keys_(keys->clone()) {
  keys_->set_when_lost(kGone, fmt::format("rank {} has died, or ended, before all ranks had started", options_.rank));
  const std::string here = "here/" + options_.place;
  const std::int64_t number = keys_->add(here + "/came", 1);
  keys_->set(fmt::format("{}/{}", here, number), fmt::format("{} {}", options_.rank, PeerProcesses::identity()));
}

StartWatch::~StartWatch() {
  if (has_started_) return;
  keys_->interrupt(std::chrono::seconds(1));  // a silent store holds up nobody
  stop_thread();
  if (trouble_.empty()) return;
  try {
    keys_->cancel_when_lost(kGone);  // another one is to blame
  } catch (const Error&) {
    // Then the store tells of this one too.
  }
}

void StartWatch::stop_thread() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  pulse_.reset();
}

void StartWatch::hear_of_neighbours() {
  const auto add = [this](int rank, const std::string& identity) {
    if (rank == options_.rank || identity.empty() || neighbours_.contains(rank)) return;
    neighbours_[rank] = std::make_unique<PeerProcesses>(std::vector{identity}, options_.heartbeat);
  };
  const std::string here = "here/" + options_.place;
  const std::int64_t came = std::stoll(keys_->try_get(here + "/came").value_or("0"));
  for (; heard_ < came; ++heard_) {
    const auto text = keys_->try_get(fmt::format("{}/{}", here, heard_ + 1));
    if (!text) break;  // it is just saying so
    const std::size_t space = text->find(' ');
    add(std::stoi(*text), text->substr(space + 1));
  }
  for (const auto& [rank, pid] : read_started_processes()) add(rank, PeerProcesses::identity_of(pid));
}

std::string StartWatch::trouble_in_meeting() {
  hear_of_neighbours();
  for (const auto& [rank, process] : neighbours_)
    if (const std::string why = process->trouble(0); !why.empty()) return fmt::format("rank {} {}", rank, why);
  // Those of other nodes, by the word of their launchers.
  const auto stopped = read_stopped_rank(*keys_);
  if (!stopped || options_.heartbeat.count() <= 0 || stopped->stopped_for < heartbeat_patience(options_.heartbeat))
    return {};
  return fmt::format(
      "rank {} is stopped (SIGSTOP): process {} of host {} has stood still for {:.1f} s; `kill -CONT {}` there lets it "
      "go on",
      stopped->rank, stopped->pid, stopped->host, std::chrono::duration<double>(stopped->stopped_for).count(),
      stopped->pid);
}

void StartWatch::all_came(std::shared_ptr<Store> store, const std::vector<std::string>& identities) {
  if (options_.world_size == 1) return;
  store_ = std::move(store);
  pulse_ = std::make_unique<PeerPulse>(
      std::make_shared<PrefixStore>(keys_, "start"), options_.rank, identities,
      PeerPulse::Options{.heartbeat = options_.heartbeat, .store_rank = options_.store_rank});
  pulse_->wait_in("start", "");
  thread_ = start_thread("the start of the ranks", [this] { run(); });
}

void StartWatch::run() {
  pthread_setname_np(pthread_self(), "phalanx-start");
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLookEvery, [this] { return stopping_; })) {
    lock.unlock();
    std::string why = look();
    lock.lock();
    if (why.empty() || stopping_) continue;
    trouble_ = std::move(why);
    store_->interrupt();
    return;
  }
}

std::string StartWatch::look() {
  std::map<int, std::string> troubles;
  for (int rank = 0; rank < options_.world_size; ++rank)
    if (std::string why = pulse_->trouble(rank); !why.empty()) troubles[rank] = std::move(why);
  try {
    for (const auto& [rank, why] : troubles)
      // One that has started has nothing more to say here.
      if (pulse_->is_store_silent() || !keys_->try_get(started_key(rank))) return fmt::format("rank {} {}", rank, why);
    if (!pulse_->is_store_silent()) return keys_->try_get(kGone).value_or("");
  } catch (const Error&) {
    // Who makes the world meets the same.
  }
  return {};
}

std::string StartWatch::trouble() const {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

void StartWatch::started() {
  keys_->set(started_key(options_.rank), "");
  stop_thread();
  has_started_ = true;
  keys_->cancel_when_lost(kGone);
}

}  // namespace phalanx
