#include "phalanx/observe/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

namespace phalanx::observe {
namespace {

/// Quotes and escapes the text. Bytes that are not UTF-8 become U+FFFD, since a trace with an odd name is better than
/// none.
std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

TraceRecorder::TraceRecorder(TraceOptions options)
    : options_(options),
      started_epoch_us_(
          std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
              .count()) {}

void TraceRecorder::span(std::string_view name, const char* category, Clock::time_point begin, Clock::time_point end) {
  record({'X', 0, category, since_start(begin), (end - begin) / std::chrono::nanoseconds(1), 0.0, std::string(name)});
}

void TraceRecorder::operation(const std::string& track, TraceOperation operation) {
  const auto since_start_ns = [this](std::int64_t epoch_us) { return (epoch_us - started_epoch_us_) * 1000; };
  const std::int64_t begin = since_start_ns(operation.issued_us);
  const std::int64_t end =
      operation.ended_us != 0 ? since_start_ns(operation.ended_us) : std::max(begin, since_start(Clock::now()));
  std::string details;
  for (const auto& [key, value] : operation.details) {
    details += fmt::format("{}{}:{}", details.empty() ? "" : ",", json_string(key), json_string(value));
  }
  const std::lock_guard lock(mutex_);
  const int row = free_row(track, begin, end);
  keep({'X', row, operation.category, begin, end - begin, 0.0, std::move(operation.name), std::move(details)});
  const std::int64_t started = operation.started_us != 0 ? since_start_ns(operation.started_us) : end;
  if (started > begin) keep({'X', row, operation.category, begin, started - begin, 0.0, "queued"});
}

// Spans in one row must nest or follow each other; a viewer cannot draw others.
int TraceRecorder::free_row(const std::string& track, std::int64_t begin_ns, std::int64_t end_ns) {
  std::vector<Row>& rows = tracks_[track];
  auto row = std::find_if(rows.begin(), rows.end(), [&](const Row& one) { return one.free_from_ns <= begin_ns; });
  if (row == rows.end()) {
    row = rows.insert(rows.end(), Row{rows_++, 0});
    thread_names_.emplace_back(row->index, rows.size() == 1 ? track : fmt::format("{} {}", track, rows.size()));
  }
  row->free_from_ns = end_ns;
  return row->index;
}

void TraceRecorder::counter(std::string_view name, double value) {
  record({'C', 0, "counter", since_start(Clock::now()), 0, value, std::string(name)});
}

void TraceRecorder::instant(std::string_view name, const char* category) {
  record({'i', 0, category, since_start(Clock::now()), 0, 0.0, std::string(name)});
}

void TraceRecorder::name_thread(std::string name) {
  const std::lock_guard lock(mutex_);
  thread_names_.emplace_back(index_of_this_thread(), std::move(name));
}

void TraceRecorder::record(Event event) {
  const std::lock_guard lock(mutex_);
  event.thread = index_of_this_thread();
  keep(std::move(event));
}

void TraceRecorder::keep(Event event) {
  if (events_.size() >= options_.max_events) {
    ++dropped_;
    return;
  }
  events_.push_back(std::move(event));
}

int TraceRecorder::index_of_this_thread() {
  const auto [found, is_new] = thread_indices_.emplace(std::this_thread::get_id(), rows_);
  if (is_new) ++rows_;
  return found->second;
}

std::int64_t TraceRecorder::since_start(Clock::time_point when) const {
  return (when - started_) / std::chrono::nanoseconds(1);
}

std::size_t TraceRecorder::size() const {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

std::size_t TraceRecorder::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

std::string TraceRecorder::to_json() const {
  const std::lock_guard lock(mutex_);
  std::string json = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  const auto out = std::back_inserter(json);
  fmt::format_to(out, R"({{"ph":"M","name":"process_name","pid":{0},"args":{{"name":"rank {0}"}}}})", options_.rank);
  for (const auto& [thread, name] : thread_names_) {
    fmt::format_to(out,
                   ",\n"
                   R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":{}}}}})",
                   options_.rank, thread, json_string(name));
  }
  for (const Event& event : events_) {
    const std::int64_t epoch_ns = started_epoch_us_ * 1000 + event.begin_ns;  // a double would lose the nanoseconds
    fmt::format_to(out,
                   ",\n"
                   R"({{"ph":"{}","name":{},"cat":{},"pid":{},"tid":{},"ts":{}.{:03d})",
                   event.phase, json_string(event.name), json_string(event.category), options_.rank, event.thread,
                   epoch_ns / 1000, epoch_ns % 1000);
    if (event.phase == 'X') fmt::format_to(out, R"(,"dur":{:.3f})", static_cast<double>(event.duration_ns) / 1000.0);
    if (!event.details.empty()) fmt::format_to(out, R"(,"args":{{{}}})", event.details);
    if (event.phase == 'C') fmt::format_to(out, R"(,"args":{{"value":{}}})", event.value);
    if (event.phase == 'i') json += R"(,"s":"p")";
    json += '}';
  }
  json += "\n]}\n";
  return json;
}

}  // namespace phalanx::observe
