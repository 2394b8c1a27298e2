#include "phalanx/comm/flight_log.h"

#include <fmt/format.h>
#include <signal.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "phalanx/base/env.h"
#include "phalanx/base/file.h"
#include "phalanx/base/log.h"
#include "phalanx/comm/signature.h"

namespace phalanx {
namespace {

// A signal is for the whole process, so its count is too.
std::atomic<std::uint32_t> flight_requests{0};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

void count_flight_request(int) { flight_requests.fetch_add(1, std::memory_order_relaxed); }

void handle_flight_signal() {
  struct sigaction now {};
  if (sigaction(SIGUSR1, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return;
  struct sigaction ours {};
  ours.sa_handler = count_flight_request;
  ours.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &ours, nullptr);
}

}  // namespace

FlightLog::FlightLog(std::shared_ptr<FlightLogs> logs, const std::string& group, int rank, int size)
    : logs_(std::move(logs)), recorder_({.group = group, .rank = rank, .size = size}) {}

std::uint64_t FlightLog::issued(const OperationDescription& description) {
  const std::uint64_t number = issued_.fetch_add(1, std::memory_order_relaxed);
  observe::FlightEntry entry;
  entry.seq = number;
  entry.verb = name_of(description.verb);
  if (!description.transfers.empty()) {
    const Transfer& first = description.transfers.front();
    entry.dtype = name_of(first.dtype);
    for (const Transfer& transfer : description.transfers) entry.count += transfer.count;
    if (description.verb != Verb::batch_p2p) {
      entry.peer = first.peer;
      entry.tag = first.tag;
    }
  } else if (description.verb != Verb::barrier) {
    const Signature signature = signature_of(description);
    entry.dtype = name_of(description.dtype);
    entry.count = signature.verb == Verb::all_to_all ? description.input_count : signature.count;
    if (reduces(signature.verb)) entry.op = name_of(description.op);
    if (is_rooted(signature.verb)) entry.root = description.root;
  }
  recorder_.issued(entry);
  return number;
}

void FlightLog::failed(std::uint64_t number, const std::string& reason) noexcept {
  recorder_.failed(number);
  if (!has_failed_.exchange(true)) logs_->dump(reason);
}

void FlightLog::answer_requests() noexcept {
  if (logs_->folder_.empty()) return;
  const std::uint32_t asked = flight_requests.load(std::memory_order_relaxed);
  if (logs_->answered_.exchange(asked) != asked) logs_->dump("SIGUSR1");
}

FlightLogs::FlightLogs(int rank, std::string folder)
    : rank_(rank), folder_(std::move(folder)), answered_(flight_requests.load(std::memory_order_relaxed)) {
  if (folder_.empty()) folder_ = env_string("PHALANX_COMM_TRACE_DIR").value_or("");
  if (!folder_.empty()) handle_flight_signal();
}

void FlightLogs::add(const std::shared_ptr<FlightLog>& log) {
  const std::lock_guard lock(mutex_);
  std::erase_if(logs_, [](const auto& one) { return one.expired(); });
  logs_.push_back(log);
}

std::string FlightLogs::to_json(const std::string& reason) const {
  std::vector<std::shared_ptr<FlightLog>> logs;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& one : logs_)
      if (auto log = one.lock()) logs.push_back(std::move(log));
  }
  const auto quoted = nlohmann::json(reason).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::string text = fmt::format("{{\n\"rank\": {},\n\"reason\": {},\n\"groups\": [\n", rank_, quoted);
  for (std::size_t i = 0; i < logs.size(); ++i) {
    if (i > 0) text += ",\n";
    text += logs[i]->recorder_.to_json();
  }
  return text + "]\n}\n";
}

void FlightLogs::dump(const std::string& reason) noexcept {
  if (folder_.empty()) return;
  try {
    const std::lock_guard lock(dump_mutex_);
    const std::filesystem::path folder(folder_);
    posix_file_system().make_directory(folder);
    const std::filesystem::path path = folder / fmt::format("rank_{}.json", rank_);
    replace_file(path, to_json(reason));
    log::warn(fmt::format("communication: the last operations are in {}", path.string()));
  } catch (const std::exception& e) {
    try {
      log::warn(fmt::format("communication: the last operations could not be written: {}", e.what()));
    } catch (...) {
    }
  } catch (...) {
  }
}

}  // namespace phalanx
