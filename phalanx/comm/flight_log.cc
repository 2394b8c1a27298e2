#include "phalanx/comm/flight_log.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "phalanx/base/env.h"
#include "phalanx/base/file.h"
#include "phalanx/base/log.h"
#include "phalanx/comm/flight_signal.h"
#include "phalanx/comm/signature.h"

namespace phalanx {
namespace {

constexpr std::size_t kGroupsKept = 8;

std::int64_t microseconds_since_epoch() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Files keep the name that earlier versions wrote.
std::string_view name_in_files(Verb verb) {
  return verb == Verb::batch_isend_irecv ? "batch_peer_to_peer" : name_of(verb);
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "";
}

}  // namespace

FlightLog::FlightLog(std::shared_ptr<FlightLogs> logs, FlightGroup group)
    : logs_(std::move(logs)),
      recorder_({.group = std::move(group.name),
                 .id = std::move(group.id),
                 .rank = group.rank,
                 .size = static_cast<int>(group.members.size()),
                 .members = group.members,
                 .capacity = logs_->files_.capacity}) {}

FlightLog::~FlightLog() {
  if (!has_failed_.load()) return;
  try {
    const std::lock_guard lock(logs_->mutex_);
    auto& gone = logs_->gone_;
    if (gone.size() == kGroupsKept) gone.erase(gone.begin());
    gone.push_back(recorder_.to_json());
  } catch (...) {  // no memory for the text
  }
}

std::uint64_t FlightLog::issued(const OperationDescription& description) {
  const std::uint64_t number = issued_.fetch_add(1, std::memory_order_relaxed);
  observe::FlightEntry entry;
  entry.seq = number;
  entry.verb = name_in_files(description.verb);
  if (!description.transfers.empty()) {
    const Transfer& first = description.transfers.front();
    entry.dtype = name_of(first.dtype);
    for (const Transfer& transfer : description.transfers) entry.count += transfer.count;
    if (description.verb != Verb::batch_isend_irecv) {
      entry.peer = first.peer;
      entry.tag = first.tag;
    }
  } else {
    entry.collective = static_cast<std::int64_t>(description.sequence);
    if (description.verb != Verb::barrier) {
      const Signature signature = signature_of(description);
      entry.dtype = name_of(description.dtype);
      entry.count = signature.verb == Verb::all_to_all ? description.input_count : signature.count;
      entry.uneven = signature.uneven != 0;
      if (reduces(signature.verb)) entry.op = name_of(description.op);
      if (is_rooted(signature.verb)) entry.root = description.root;
    }
  }
  recorder_.issued(entry);
  return number;
}

void FlightLog::failed(std::uint64_t number, const std::string& reason) noexcept {
  recorder_.failed(number);
  if (has_failed_.exchange(true)) return;
  logs_->note_failure(reason);
  logs_->dump(reason);
}

std::shared_ptr<FlightLogs> FlightLogs::make(int rank, int size, FlightOptions files) {
  std::shared_ptr<FlightLogs> logs(new FlightLogs(rank, size, std::move(files)));
  if (!logs->files_.folder.empty() || !logs->files_.writes) dump_on_flight_signal(logs);
  return logs;
}

FlightLogs::FlightLogs(int rank, int size, FlightOptions files) : rank_(rank), size_(size), files_(std::move(files)) {
  if (!files_.writes) return;
  if (files_.folder.empty()) files_.folder = env_string("PHALANX_COMM_TRACE_DIR").value_or("");
  if (files_.folder.empty()) return;
  std::error_code none_there;
  std::filesystem::rename(path(), path() + ".previous", none_there);
}

std::string FlightLogs::path() const {
  return (std::filesystem::path(files_.folder) / fmt::format("{}{}.json", files_.prefix, rank_)).string();
}

void FlightLogs::add(const std::shared_ptr<FlightLog>& log) {
  const std::lock_guard lock(mutex_);
  std::erase_if(logs_, [](const auto& one) { return one.expired(); });
  logs_.push_back(log);
}

void FlightLogs::note_failure(const std::string& reason) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = reason;
  } catch (...) {
  }
}

std::string FlightLogs::to_json(const std::string& reason) const {
  std::vector<std::shared_ptr<FlightLog>> logs;
  std::vector<std::string> groups;
  std::string failure;
  {
    const std::lock_guard lock(mutex_);
    failure = failure_;
    groups = gone_;
    logs.reserve(logs_.size());  // an owner that is dropped here by an error would lock the mutex again
    for (const auto& one : logs_)
      if (auto log = one.lock()) logs.push_back(std::move(log));
  }
  std::string text = fmt::format(
      "{{\n\"rank\": {},\n\"size\": {},\n\"host\": {},\n\"pid\": {},\n\"written_us\": {},\n\"reason\": "
      "{},\n\"groups\": [\n",
      rank_, size_, quoted(host_name()), getpid(), microseconds_since_epoch(),
      quoted(failure.empty() ? reason : failure));
  for (const auto& log : logs) groups.push_back(log->recorder_.to_json());
  return text + fmt::format("{}]\n}}\n", fmt::join(groups, ",\n"));
}

void FlightLogs::dump(const std::string& reason) noexcept {
  if (files_.folder.empty() && files_.writes) return;
  try {
    const std::lock_guard lock(dump_mutex_);
    if (!files_.writes) {
      log::warn("communication: the last operations are not written, as [comm] trace_buf_size is 0");
      return;
    }
    posix_file_system().make_directory(files_.folder);
    replace_file(path(), to_json(reason));
    log::warn(fmt::format(
        "communication: the last operations are in {}; `phalanx trace analyze {}` lays the ranks' files side by side",
        path(), files_.folder));
  } catch (const std::exception& e) {
    try {
      log::warn(fmt::format("communication: the last operations could not be written: {}", e.what()));
    } catch (...) {
    }
  } catch (...) {
  }
}

}  // namespace phalanx
