// TraceRecorder and TraceSpan: a timeline of each thread of a rank, as a file for chrome://tracing or ui.perfetto.dev.
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
// With a null recorder a span costs nothing, so the same code serves traced and untraced runs. Recording is thread-safe
// and costs less than a microsecond. Spans beyond `max_events` are counted but not stored. The rank is the process id
// in the trace, and times start from the wall clock. So the files of the ranks of one machine can be joined by
// concatenating their traceEvents.
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

/// An operation that ran beside the threads. Times are in microseconds since the epoch.
struct TraceOperation {
  std::string name;
  const char* category;
  std::int64_t issued_us = 0;
  std::int64_t started_us = 0;  // 0: not yet
  std::int64_t ended_us = 0;    // 0: not yet; shown as lasting until now
  std::vector<std::pair<std::string, std::string>> details = {};
};

class TraceRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  explicit TraceRecorder(TraceOptions options = {});

  /// Records a finished span of the calling thread.
  /// REQUIRES: `category` points to text of static duration.
  void span(std::string_view name, const char* category, Clock::time_point begin, Clock::time_point end);
  /// Records the operation, from issue to end, on a row named `track`. If that row is in use at that time, it goes to
  /// another one ("track 2"). Inside it a span "queued" lasts until the operation started.
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

/// Records the time from its construction to its destruction.
/// REQUIRES: the strings outlive the span.
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
