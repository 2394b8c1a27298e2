// The traces of [profiling]: which steps are traced, what is in them, and their files.
//
// Every rank writes job.dump_folder/profiling.save_traces_folder/iteration_<N>/rank<R>_trace.json (torchtitan's layout)
// after the steps that are multiples of profile_freq; it holds the profiler_active steps up to N, with the validation
// and the save that follow them. A file appears whole or not at all; what was recorded of a step that was not finished
// (an error, a stop) is written too. A file that cannot be written is a warning.
//
// Spans nest on the row of the thread that made them; the operations of the communicators are taken from their flight
// recorders and stand on rows of their own, from issue to end, so that their overlap with computing is seen; "wait for
// ..." on the thread's row is where it did nothing but wait for one of them. When off, or between traced steps,
// recorder() is null and all costs a branch.
//
//   Profiler trace(config, world);
//   trace.begin(step);
//   { const observe::TraceSpan span(trace.recorder(), "forward", "train"); ... }
//   trace.end(step);
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/config.h"
#include "phalanx/observe/trace.h"

namespace phalanx::train {

class Profiler {
 public:
  Profiler(const TrainConfig& config, std::shared_ptr<Communicator> world);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  bool enabled() const noexcept { return enabled_; }
  observe::TraceRecorder* recorder() noexcept { return recorder_.get(); }

  /// Step numbers begin at 1. Validation and saving belong to the step before them.
  void begin(std::int64_t step);
  /// The path of the file, if one was written.
  std::string end(std::int64_t step);
  /// The run is over; what has been recorded since the last file is written.
  void close() noexcept;

  /// Those whose operations are shown; the world alone if this is not called. Before the first step.
  void watch(std::vector<std::shared_ptr<Communicator>> communicators);
  /// The all-reduces since the last call were those of the buckets of one backward pass.
  void backward_done();

 private:
  void take_operations(bool of_buckets);
  void show(const observe::FlightEntry& operation, const std::string& name, const std::string& row);
  std::string write();

  const bool enabled_;
  const std::int64_t every_, active_;
  const std::string folder_;
  const std::shared_ptr<Communicator> world_;
  std::unique_ptr<observe::TraceRecorder> recorder_;
  std::int64_t step_ = 0;  // under way or just done
  bool step_is_under_way_ = false;
  std::vector<std::shared_ptr<Communicator>> communicators_;
  std::vector<std::uint64_t> next_operations_;  // by communicator: the first that has not been taken
  std::chrono::steady_clock::time_point step_begin_;
};

}  // namespace phalanx::train
