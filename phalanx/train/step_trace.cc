#include "phalanx/train/step_trace.h"

#include <fmt/format.h>

#include <filesystem>

#include "phalanx/base/file.h"
#include "phalanx/base/log.h"
#include "phalanx/observe/flight_recorder.h"

namespace phalanx::train {
namespace {

using TraceClock = observe::TraceRecorder::Clock;

}  // namespace

StepTrace::StepTrace(const TrainConfig& config, std::shared_ptr<Communicator> world)
    : enabled_(config.profiling.enable_profiling),
      every_(config.profiling.profile_freq),
      active_(config.profiling.profiler_active),
      folder_(in_dump_folder(config, config.profiling.save_traces_folder)),
      world_(std::move(world)) {}

StepTrace::~StepTrace() { close(); }

void StepTrace::begin(std::int64_t step) {
  if (!enabled_) return;
  const std::int64_t until = (step + every_ - 1) / every_ * every_;  // the next step that writes a file
  if (step <= until - active_) return;
  step_ = step;
  step_begin_ = TraceClock::now();
  step_is_under_way_ = true;
  if (recorder_) return;
  recorder_ = std::make_unique<observe::TraceRecorder>(observe::TraceOptions{.rank = world_->rank()});
  recorder_->name_thread("training");
  const auto before = world_->recent_operations();
  next_operation_ = before.empty() ? 0 : before.back().seq + 1;
}

std::string StepTrace::end(std::int64_t step) {
  if (!recorder_) return "";
  step_is_under_way_ = false;
  recorder_->span(fmt::format("step {}", step), "step", step_begin_, TraceClock::now());
  take_operations(/*of_buckets=*/false);
  return step % every_ == 0 ? write() : "";
}

void StepTrace::backward_done(double exposed_seconds) {
  if (!recorder_) return;
  const auto now = TraceClock::now();
  if (world_->size() > 1) {
    const auto exposed =
        std::chrono::duration_cast<TraceClock::duration>(std::chrono::duration<double>(exposed_seconds));
    recorder_->span("wait for gradients", "comm", now - exposed, now);
  }
  take_operations(/*of_buckets=*/true);
}

void StepTrace::take_operations(bool of_buckets) {
  const auto operations = world_->recent_operations();
  std::uint64_t expected = next_operation_;
  int bucket = 0;
  for (const observe::FlightEntry& one : operations) {
    if (one.seq < next_operation_) continue;
    if (one.seq > expected) {
      recorder_->instant(fmt::format("{} operations not shown: [comm] trace_buf_size is too small", one.seq - expected),
                         "comm");
    }
    expected = one.seq + 1;
    const bool is_bucket = of_buckets && one.verb == "all_reduce";
    recorder_->operation("communication",
                         {.name = is_bucket ? fmt::format("bucket {}", bucket++) : std::string(one.verb),
                          .category = "comm",
                          .issued_us = one.issued_us,
                          .started_us = one.started_us,
                          .ended_us = one.ended_us,
                          .details = {{"call", observe::describe(one)},
                                      {"state", std::string(observe::name_of(one.state))},
                                      {"seq", std::to_string(one.seq)}}});
  }
  next_operation_ = expected;
}

std::string StepTrace::write() {
  const auto recorder = std::move(recorder_);
  const std::filesystem::path folder = std::filesystem::path(folder_) / fmt::format("iteration_{}", step_);
  const std::filesystem::path path = folder / fmt::format("rank{}_trace.json", world_->rank());
  try {
    posix_file_system().make_directory(folder);
    replace_file(path, recorder->to_json());
    return path.string();
  } catch (const std::exception& error) {
    log::warn(fmt::format("the trace of step {} could not be written: {}", step_, error.what()));
    return "";
  }
}

void StepTrace::close() noexcept {
  if (!recorder_) return;
  try {
    if (step_is_under_way_) {
      recorder_->span(fmt::format("step {}, not finished", step_), "step", step_begin_, TraceClock::now());
    }
    take_operations(/*of_buckets=*/false);
    write();
  } catch (...) {  // a trace is not worth a run
  }
  recorder_.reset();
}

}  // namespace phalanx::train
