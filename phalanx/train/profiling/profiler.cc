#include "phalanx/train/profiling/profiler.h"

#include <fmt/format.h>

#include <filesystem>

#include "phalanx/base/file.h"
#include "phalanx/base/log.h"
#include "phalanx/observe/flight_recorder.h"

namespace phalanx::train {
namespace {

using TraceClock = observe::TraceRecorder::Clock;

}  // namespace

Profiler::Profiler(const config::TrainConfig& config, std::shared_ptr<Communicator> world, at::Device device)
    : enabled_(config.profiling.enable_profiling),
      every_(config.profiling.profile_freq),
      active_(config.profiling.profiler_active),
      folder_(config::in_dump_folder(config, config.profiling.save_traces_folder)),
      world_(std::move(world)),
      device_(device),
      records_kernels_(config.profiling.record_kernels),
      communicators_{world_} {}

Profiler::~Profiler() { close(); }

void Profiler::begin(std::int64_t step) {
  if (!enabled_) return;
  const std::int64_t until = (step + every_ - 1) / every_ * every_;  // the next step that writes a file
  if (step <= until - active_) return;
  step_ = step;
  step_begin_ = TraceClock::now();
  step_is_under_way_ = true;
  if (recorder_) return;
  recorder_ = std::make_unique<observe::TraceRecorder>(observe::TraceOptions{.rank = world_->rank()});
  recorder_->name_thread("training");
  next_operations_.clear();
  for (const auto& one : communicators_) {
    const auto before = one->recent_operations();
    next_operations_.push_back(before.empty() ? 0 : before.back().seq + 1);
  }
  if (!records_kernels_) return;
  try {
    kernels_ = KernelProfile::start(device_);
  } catch (const std::exception& error) {
    log::warn(fmt::format("the kernels of step {} and later are not recorded: {}", step, error.what()));
    records_kernels_ = false;
  }
}

std::string Profiler::end(std::int64_t step) {
  if (!recorder_) return "";
  step_is_under_way_ = false;
  recorder_->span(fmt::format("step {}", step), "step", step_begin_, TraceClock::now());
  take_operations(/*of_buckets=*/false);
  return step % every_ == 0 ? write() : "";
}

void Profiler::watch(std::vector<std::shared_ptr<Communicator>> communicators) {
  communicators_ = std::move(communicators);
}

void Profiler::backward_done() {
  if (recorder_) take_operations(/*of_buckets=*/true);
}

void Profiler::take_operations(bool of_buckets) {
  for (std::size_t c = 0; c < communicators_.size(); ++c) {
    const std::string row = communicators_.size() == 1 ? "communication" : "communication " + communicators_[c]->name();
    std::uint64_t& expected = next_operations_[c];
    const std::uint64_t first = expected;
    int bucket = 0;
    for (const observe::FlightEntry& one : communicators_[c]->recent_operations()) {
      if (one.seq < first) continue;
      if (one.seq > expected) {
        recorder_->instant(
            fmt::format("{} operations not shown: [comm] trace_buf_size is too small", one.seq - expected), "comm");
      }
      expected = one.seq + 1;
      const bool is_bucket = of_buckets && one.verb == "all_reduce";
      show(one, is_bucket ? fmt::format("bucket {}", bucket++) : std::string(one.verb), row);
    }
  }
}

void Profiler::show(const observe::FlightEntry& one, const std::string& name, const std::string& row) {
  recorder_->operation(row, {.name = name,
                             .category = "comm",
                             .issued_us = one.issued_us,
                             .started_us = one.started_us,
                             .ended_us = one.ended_us,
                             .details = {{"call", observe::describe(one)},
                                         {"state", std::string(observe::name_of(one.state))},
                                         {"seq", std::to_string(one.seq)}}});
  if (one.wait_until_us == 0) return;
  if (!device_.is_cpu()) {  // the host's thread is elsewhere then
    return recorder_->operation("device", {.name = "wait for " + name,
                                           .category = "wait",
                                           .issued_us = one.wait_from_us,
                                           .started_us = one.wait_from_us,
                                           .ended_us = one.wait_until_us});
  }
  // The recorder uses the wall clock, the thread's row the steady clock.
  const auto steady = TraceClock::now();
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  const auto at = [&](std::int64_t us) {
    return steady - std::chrono::duration_cast<TraceClock::duration>(wall - std::chrono::microseconds(us));
  };
  recorder_->span("wait for " + name, "wait", at(one.wait_from_us), at(one.wait_until_us));
}

std::string Profiler::write() {
  const auto recorder = std::move(recorder_);
  const auto kernels = std::move(kernels_);
  const std::filesystem::path folder = std::filesystem::path(folder_) / fmt::format("iteration_{}", step_);
  const std::filesystem::path path = folder / fmt::format("rank{}_trace.json", world_->rank());
  try {
    posix_file_system().make_directory(folder);
    if (kernels) kernels->write((folder / fmt::format("rank{}_kernels", world_->rank())).string());
    replace_file(path, recorder->to_json());
    return path.string();
  } catch (const std::exception& error) {
    log::warn(fmt::format("the trace of step {} could not be written: {}", step_, error.what()));
    return "";
  }
}

void Profiler::close() noexcept {
  if (!recorder_) return;
  try {
    if (step_is_under_way_) {
      kernels_.reset();  // to write them would wait for the device, which may wait for a rank that is gone
      recorder_->span(fmt::format("step {}, not finished", step_), "step", step_begin_, TraceClock::now());
    }
    take_operations(/*of_buckets=*/false);
    write();
  } catch (...) {  // a failed trace must not end the run
  }
  recorder_.reset();
}

}  // namespace phalanx::train
