// Profiler writes the traces of [profiling]: which steps are traced, what each trace holds, and its file.
//
// Every rank writes job.dump_folder/profiling.save_traces_folder/iteration_<N>/rank<R>_trace.json (torchtitan's layout)
// after each step N that is a multiple of profile_freq. The file holds the profiler_active steps up to N, with the
// validation and the save that follow them. A file appears whole or not at all. What was recorded of an unfinished step
// (an error, a stop) is written too. A file that cannot be written is only a warning.
//
// Spans nest on the row of the thread that made them. The operations of the communicators come from their flight
// recorders. They have separate rows, from issue to end, which shows their overlap with computation. A span
// "wait for ..." on the thread's row is time in which the thread only waited for an operation; on a device, on a row of
// its own, time in which a stream stood still for one. When profiling is off,
// or between traced steps, recorder() is null and everything costs one branch.
//
// With profiling.record_kernels a KernelProfile covers the same steps: rank<R>_kernels.json and rank<R>_kernels.txt.
//
//   Profiler profiler(config, world, device);
//   profiler.begin(step);
//   { const observe::TraceSpan span(profiler.recorder(), "forward", "train"); run_forward(); }
//   profiler.end(step);
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/config.h"
#include "phalanx/observe/trace.h"
#include "phalanx/train/profiling/kernel_profile.h"

namespace phalanx::train {

class Profiler {
 public:
  Profiler(const config::TrainConfig& config, std::shared_ptr<Communicator> world, at::Device device);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  bool enabled() const noexcept { return enabled_; }
  observe::TraceRecorder* recorder() noexcept { return recorder_.get(); }

  /// Whether end(step) will write a file.
  bool writes_after(std::int64_t step) const noexcept { return recorder_ != nullptr && step % every_ == 0; }
  /// Step numbers begin at 1. Validation and saving belong to the step they follow.
  void begin(std::int64_t step);
  /// Returns the path of the file, if one was written.
  std::string end(std::int64_t step);
  /// Ends the run: writes what has been recorded since the last file.
  void close() noexcept;

  /// Sets the communicators whose operations are shown; the default is the world alone. Call it before the first step.
  void watch(std::vector<std::shared_ptr<Communicator>> communicators);
  /// Marks the all-reduces since the last call as the buckets of one backward pass.
  void backward_done();

 private:
  void take_operations(bool of_buckets);
  void show(const observe::FlightEntry& operation, const std::string& name, const std::string& row);
  std::string write();

  const bool enabled_;
  const std::int64_t every_, active_;
  const std::string folder_;
  const std::shared_ptr<Communicator> world_;
  const at::Device device_;
  bool records_kernels_;
  std::unique_ptr<observe::TraceRecorder> recorder_;
  std::unique_ptr<KernelProfile> kernels_;  // with recorder_, where this rank records them
  std::int64_t step_ = 0;                   // in progress or just done
  bool step_is_under_way_ = false;
  std::vector<std::shared_ptr<Communicator>> communicators_;
  std::vector<std::uint64_t> next_operations_;  // by communicator: the first operation not yet read
  std::chrono::steady_clock::time_point step_begin_;
};

}  // namespace phalanx::train
