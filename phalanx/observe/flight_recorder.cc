#include "phalanx/observe/flight_recorder.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

namespace phalanx::observe {
namespace {

using SystemClock = std::chrono::system_clock;

std::int64_t microseconds_since_epoch(SystemClock::time_point when = SystemClock::now()) {
  return std::chrono::duration_cast<std::chrono::microseconds>(when.time_since_epoch()).count();
}

nlohmann::ordered_json json_of_entry(const FlightEntry& entry) {
  nlohmann::ordered_json json = {{"seq", entry.seq}};
  if (entry.collective != FlightEntry::kNone) json["collective"] = entry.collective;
  json["verb"] = entry.verb;
  if (!entry.dtype.empty()) json["dtype"] = entry.dtype;
  json["count"] = entry.count;
  if (!entry.op.empty()) json["op"] = entry.op;
  if (entry.root != FlightEntry::kNone) json["root"] = entry.root;
  if (entry.peer != FlightEntry::kNone) json["peer"] = entry.peer;
  if (entry.tag != FlightEntry::kNone) json["tag"] = entry.tag;
  if (entry.uneven) json["uneven"] = true;
  json["state"] = name_of(entry.state);
  json["issued_us"] = entry.issued_us;
  if (entry.started_us != 0) json["started_us"] = entry.started_us;
  if (entry.ended_us != 0) json["ended_us"] = entry.ended_us;
  return json;
}

}  // namespace

std::string_view name_of(FlightState state) {
  switch (state) {
    case FlightState::issued:
      return "issued";
    case FlightState::started:
      return "started";
    case FlightState::finished:
      return "finished";
    case FlightState::failed:
      return "failed";
  }
  return "unknown";
}

std::string describe(const FlightEntry& entry, std::span<const int> members) {
  const auto in_job = [&](int rank) {
    return rank >= 0 && static_cast<std::size_t>(rank) < members.size() ? members[static_cast<std::size_t>(rank)]
                                                                        : rank;
  };
  if (entry.dtype.empty()) return fmt::format("{}()", entry.verb);
  const bool counts_differ = entry.uneven && entry.verb == "all_to_all";
  std::string text = fmt::format("{}({}[{}]", entry.verb, entry.dtype,
                                 counts_differ ? std::string("uneven") : std::to_string(entry.count));
  if (entry.uneven && !counts_differ) text += ", uneven";
  if (!entry.op.empty()) text += fmt::format(", {}", entry.op);
  if (entry.root != FlightEntry::kNone) text += fmt::format(", root {}", in_job(entry.root));
  if (entry.peer != FlightEntry::kNone) {
    text += fmt::format(" {} rank {}, tag {}", entry.verb == "send" ? "to" : "from", in_job(entry.peer), entry.tag);
  }
  return text + ")";
}

FlightRecorder::FlightRecorder(FlightRecorderOptions options) : options_(std::move(options)) {
  ring_.resize(std::max<std::size_t>(1, options_.capacity));
}

void FlightRecorder::issued(FlightEntry entry) {
  entry.state = FlightState::issued;
  entry.issued_us = microseconds_since_epoch();
  entry.started_us = 0;
  entry.ended_us = 0;
  entry.wait_from_us = 0;
  entry.wait_until_us = 0;
  const std::lock_guard lock(mutex_);
  ring_[recorded_++ % ring_.size()] = entry;
}

void FlightRecorder::started(std::uint64_t seq) {
  const std::int64_t now = microseconds_since_epoch();
  const std::lock_guard lock(mutex_);
  FlightEntry* const entry = find(seq);
  if (entry == nullptr) return;
  entry->state = FlightState::started;
  entry->started_us = now;
}

void FlightRecorder::finished(std::uint64_t seq) { end(seq, FlightState::finished); }
void FlightRecorder::failed(std::uint64_t seq) { end(seq, FlightState::failed); }

void FlightRecorder::finished(std::uint64_t seq, const DeviceTimes& times) {
  const std::lock_guard lock(mutex_);
  FlightEntry* const entry = find(seq);
  if (entry == nullptr) return;
  entry->state = FlightState::finished;
  // The clocks may be a little apart.
  if (times.started_us != 0) entry->started_us = std::max(times.started_us, entry->issued_us);
  entry->ended_us = std::max(times.ended_us, entry->started_us);
  if (times.wait_from_us == 0) return;
  entry->wait_from_us = std::max(times.wait_from_us, entry->issued_us);
  entry->wait_until_us = std::max(entry->ended_us, entry->wait_from_us);
}

void FlightRecorder::end(std::uint64_t seq, FlightState state) {
  const std::int64_t now = microseconds_since_epoch();
  const std::lock_guard lock(mutex_);
  FlightEntry* const entry = find(seq);
  if (entry == nullptr) return;
  entry->state = state;
  entry->ended_us = now;
}

void FlightRecorder::waited(std::uint64_t seq, SystemClock::time_point from) {
  const std::int64_t until = microseconds_since_epoch();
  const std::lock_guard lock(mutex_);
  FlightEntry* const entry = find(seq);
  if (entry == nullptr) return;
  if (entry->wait_from_us == 0) entry->wait_from_us = microseconds_since_epoch(from);
  entry->wait_until_us = until;
}

/// Operations usually end soon after they are issued, so the search begins at the newest.
FlightEntry* FlightRecorder::find(std::uint64_t seq) {
  const std::uint64_t held = std::min<std::uint64_t>(recorded_, ring_.size());
  for (std::uint64_t back = 1; back <= held; ++back) {
    FlightEntry& entry = ring_[(recorded_ - back) % ring_.size()];
    if (entry.seq == seq) return &entry;
    if (entry.seq < seq) return nullptr;
  }
  return nullptr;
}

std::vector<FlightEntry> FlightRecorder::snapshot() const {
  const std::lock_guard lock(mutex_);
  const std::uint64_t held = std::min<std::uint64_t>(recorded_, ring_.size());
  std::vector<FlightEntry> entries;
  entries.reserve(held);
  for (std::uint64_t back = held; back >= 1; --back) entries.push_back(ring_[(recorded_ - back) % ring_.size()]);
  return entries;
}

std::vector<FlightEntry> FlightRecorder::unfinished() const {
  std::vector<FlightEntry> entries = snapshot();
  std::erase_if(entries, [](const FlightEntry& entry) {
    return entry.state == FlightState::finished || entry.state == FlightState::failed;
  });
  return entries;
}

std::uint64_t FlightRecorder::recorded() const {
  const std::lock_guard lock(mutex_);
  return recorded_;
}

std::string FlightRecorder::to_json() const {
  nlohmann::ordered_json json = {{"group", options_.group}, {"id", options_.id},           {"rank", options_.rank},
                                 {"size", options_.size},   {"members", options_.members}, {"recorded", recorded()}};
  json["entries"] = nlohmann::ordered_json::array();
  for (const FlightEntry& entry : snapshot()) json["entries"].push_back(json_of_entry(entry));
  return json.dump(1) + "\n";
}

}  // namespace phalanx::observe
