#include "phalanx/observe/flight_recorder.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

namespace phalanx::observe {
namespace {

std::int64_t microseconds_since_epoch() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

const char* name_of_state(FlightState state) {
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

nlohmann::ordered_json json_of_entry(const FlightEntry& entry) {
  nlohmann::ordered_json json = {{"seq", entry.seq}, {"verb", entry.verb}};
  if (!entry.dtype.empty()) json["dtype"] = entry.dtype;
  json["count"] = entry.count;
  if (!entry.op.empty()) json["op"] = entry.op;
  if (entry.root != FlightEntry::kNone) json["root"] = entry.root;
  if (entry.peer != FlightEntry::kNone) json["peer"] = entry.peer;
  if (entry.tag != FlightEntry::kNone) json["tag"] = entry.tag;
  json["state"] = name_of_state(entry.state);
  json["issued_us"] = entry.issued_us;
  if (entry.started_us != 0) json["started_us"] = entry.started_us;
  if (entry.ended_us != 0) json["ended_us"] = entry.ended_us;
  return json;
}

}  // namespace

FlightRecorder::FlightRecorder(FlightRecorderOptions options) : options_(std::move(options)) {
  ring_.resize(std::max<std::size_t>(1, options_.capacity));
}

void FlightRecorder::issued(FlightEntry entry) {
  entry.state = FlightState::issued;
  entry.issued_us = microseconds_since_epoch();
  entry.started_us = 0;
  entry.ended_us = 0;
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

void FlightRecorder::end(std::uint64_t seq, FlightState state) {
  const std::int64_t now = microseconds_since_epoch();
  const std::lock_guard lock(mutex_);
  FlightEntry* const entry = find(seq);
  if (entry == nullptr) return;
  entry->state = state;
  entry->ended_us = now;
}

/// Operations end soon after they are issued, so the search begins at the
/// newest.
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
  nlohmann::ordered_json json = {
      {"group", options_.group}, {"rank", options_.rank}, {"size", options_.size}, {"recorded", recorded()}};
  json["entries"] = nlohmann::ordered_json::array();
  for (const FlightEntry& entry : snapshot()) json["entries"].push_back(json_of_entry(entry));
  return json.dump(1) + "\n";
}

}  // namespace phalanx::observe
