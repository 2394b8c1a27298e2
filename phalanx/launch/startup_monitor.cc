#include "phalanx/launch/startup_monitor.h"

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

StartupMonitor::StartupMonitor(const std::shared_ptr<Store>& keys, Options options)
    : options_(std::move(options)), keys_(keys->clone()) {
  keys_->set_when_lost(kGone, fmt::format("rank {} has died, or ended, before all ranks had started", options_.rank));
  const std::string here = "here/" + options_.host_id;
  const std::int64_t number = keys_->add(here + "/came", 1);
  keys_->set(fmt::format("{}/{}", here, number), fmt::format("{} {}", options_.rank, ProcessProbe::identity()));
}

StartupMonitor::~StartupMonitor() {
  if (has_started_) return;
  keys_->interrupt(std::chrono::seconds(1));  // a store that does not answer must not block us
  stop_thread();
  if (failure_reason_.empty()) return;
  try {
    keys_->cancel_when_lost(kGone);  // another rank is the cause
  } catch (const Error&) {
    // Then the store reports this rank too.
  }
}

void StartupMonitor::stop_thread() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  heartbeat_monitor_.reset();
}

void StartupMonitor::find_local_processes() {
  const auto add = [this](int rank, const std::string& identity) {
    if (rank == options_.rank || identity.empty() || local_processes_.contains(rank)) return;
    local_processes_[rank] = std::make_unique<ProcessProbe>(std::vector{identity}, options_.heartbeat);
  };
  const std::string here = "here/" + options_.host_id;
  const std::int64_t came = std::stoll(keys_->try_get(here + "/came").value_or("0"));
  for (; heard_ < came; ++heard_) {
    const auto text = keys_->try_get(fmt::format("{}/{}", here, heard_ + 1));
    if (!text) break;  // the rank is about to write it
    const std::size_t space = text->find(' ');
    add(std::stoi(*text), text->substr(space + 1));
  }
  for (const auto& [rank, pid] : read_started_processes()) add(rank, ProcessProbe::identity_of(pid));
}

std::string StartupMonitor::failure_in_rendezvous() {
  find_local_processes();
  for (const auto& [rank, process] : local_processes_)
    if (const std::string why = process->failure_reason(0); !why.empty()) return fmt::format("rank {} {}", rank, why);
  // Stopped ranks of other nodes, as reported by their launchers.
  const auto stopped = read_stopped_rank(*keys_);
  if (!stopped || options_.heartbeat.count() <= 0 || stopped->stopped_for < heartbeat_timeout(options_.heartbeat))
    return {};
  return fmt::format(
      "rank {} is stopped (SIGSTOP): process {} of host {} has stood still for {:.1f} s; `kill -CONT {}` there lets it "
      "go on",
      stopped->rank, stopped->pid, stopped->host, std::chrono::duration<double>(stopped->stopped_for).count(),
      stopped->pid);
}

void StartupMonitor::all_came(std::shared_ptr<Store> store, const std::vector<std::string>& identities) {
  if (options_.world_size == 1) return;
  store_ = std::move(store);
  heartbeat_monitor_ = std::make_unique<HeartbeatMonitor>(
      std::make_shared<PrefixStore>(keys_, "start"), options_.rank, options_.world_size,
      HeartbeatMonitor::Options{.group = "start", .heartbeat = options_.heartbeat, .store_rank = options_.store_rank});
  heartbeat_monitor_->observe(identities);
  heartbeat_monitor_->wait_in("");
  thread_ = start_thread("the start of the ranks", [this] { run(); });
}

void StartupMonitor::run() {
  pthread_setname_np(pthread_self(), "phalanx-start");
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLookEvery, [this] { return stopping_; })) {
    lock.unlock();
    std::string why = look();
    lock.lock();
    if (why.empty() || stopping_) continue;
    failure_reason_ = std::move(why);
    store_->interrupt();
    return;
  }
}

std::string StartupMonitor::look() {
  std::map<int, std::string> failure_reasons;
  for (int rank = 0; rank < options_.world_size; ++rank)
    if (std::string why = heartbeat_monitor_->silence_reason(rank); !why.empty())
      failure_reasons[rank] = std::move(why);
  try {
    for (const auto& [rank, why] : failure_reasons)
      // A rank that has already started is no longer monitored here.
      if (heartbeat_monitor_->is_store_silent() || !keys_->try_get(started_key(rank)))
        return fmt::format("rank {} {}", rank, why);
    if (!heartbeat_monitor_->is_store_silent()) return keys_->try_get(kGone).value_or("");
  } catch (const Error&) {
    // The thread that creates the world gets the same error.
  }
  return {};
}

std::string StartupMonitor::failure_reason() const {
  const std::lock_guard lock(mutex_);
  return failure_reason_;
}

void StartupMonitor::started() {
  keys_->set(started_key(options_.rank), "");
  stop_thread();
  has_started_ = true;
  keys_->cancel_when_lost(kGone);
}

}  // namespace phalanx
