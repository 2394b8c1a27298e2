// Trace spans: what each thread of a rank did when, as a file for chrome://tracing or ui.perfetto.dev.
//
//   observe::TraceRecorder trace({.rank = rank});
//   {
//     observe::TraceSpan span(&trace, "forward", "compute");
//     ...
//   }                                               // recorded here
//   trace.counter("memory_gib", 1.21);
//   trace.operation("communication", {.name = "bucket 0", .category = "comm", .issued_us = ..., ...});
//   write_file("trace-rank0.json", trace.to_json());
//
// A null recorder makes a span free, so code is written once for traced and untraced runs. Recording is thread-safe and
// costs less than a microsecond; beyond `max_events` spans are counted but not kept. The rank is the process id of the
// trace and times start from the wall clock, so the files of ranks of one machine can be joined by concatenating their
// traceEvents.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace phalanx::observe {

struct TraceOptions {
  int rank = 0;
  std::size_t max_events = 1'000'000;  // about 100 MB
};

/// Something that went on beside the threads; times in microseconds since the epoch.
struct TraceOperation {
  std::string name;
  const char* category;
  std::int64_t issued_us = 0;
  std::int64_t started_us = 0;  // 0: not yet
  std::int64_t ended_us = 0;    // 0: not yet, shown as lasting until now
  std::vector<std::pair<std::string, std::string>> details = {};
};

class TraceRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  explicit TraceRecorder(TraceOptions options = {});

  /// A finished span of the calling thread. `category` points to text of static
  /// duration.
  void span(std::string_view name, const char* category, Clock::time_point begin, Clock::time_point end);
  /// From issue to end on a row called `track`, or on a further one ("track 2") while that is taken; inside it a span
  /// "queued" lasts until it started.
  void operation(const std::string& track, TraceOperation operation);
  void counter(std::string_view name, double value);
  void instant(std::string_view name,
               const char* category);  // a moment: "checkpoint saved"
  void name_thread(std::string name);  // the calling thread's row, e.g. "progress"

  std::size_t size() const;
  std::size_t dropped() const;  // events beyond max_events
  /// {"traceEvents": [...], "displayTimeUnit": "ms"}
  std::string to_json() const;

 private:
  struct Event {
    char phase;  // X span, C counter, i instant, as in the file
    int thread;
    const char* category;
    std::int64_t begin_ns;
    std::int64_t duration_ns;
    double value;
    std::string name;
    std::string details = {};  // the members of a JSON object
  };
  struct Row {
    int index;
    std::int64_t free_from_ns;
  };

  void record(Event event);
  void keep(Event event);  // under the lock, as the next two
  int index_of_this_thread();
  int free_row(const std::string& track, std::int64_t begin_ns, std::int64_t end_ns);
  std::int64_t since_start(Clock::time_point when) const;

  const TraceOptions options_;
  const Clock::time_point started_ = Clock::now();
  const std::int64_t started_epoch_us_;
  mutable std::mutex mutex_;
  std::vector<Event> events_;
  int rows_ = 0;  // of threads and tracks
  std::unordered_map<std::thread::id, int> thread_indices_;
  std::unordered_map<std::string, std::vector<Row>> tracks_;
  std::vector<std::pair<int, std::string>> thread_names_;
  std::size_t dropped_ = 0;
};

/// Records the time from its construction to its end. Strings must outlive it.
class TraceSpan {
 public:
  TraceSpan(TraceRecorder* recorder, std::string_view name, const char* category = "phalanx")
      : recorder_(recorder), name_(name), category_(category) {
    if (recorder_ != nullptr) begin_ = TraceRecorder::Clock::now();
  }
  ~TraceSpan() {
    if (recorder_ != nullptr) recorder_->span(name_, category_, begin_, TraceRecorder::Clock::now());
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  TraceRecorder* recorder_;
  std::string_view name_;
  const char* category_;
  TraceRecorder::Clock::time_point begin_;
};

}  // namespace phalanx::observe
