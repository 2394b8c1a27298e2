#include "phalanx/observe/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <vector>

namespace phalanx::observe {
namespace {

std::map<std::string, nlohmann::json> events_by_name(const TraceRecorder& trace) {
  const nlohmann::json json = nlohmann::json::parse(trace.to_json());
  std::map<std::string, nlohmann::json> events;
  for (const nlohmann::json& event : json["traceEvents"]) events[event["name"]] = event;
  return events;
}

TEST(Trace, SpansNestAndCarryTheRank) {
  TraceRecorder trace({.rank = 3});
  {
    const TraceSpan outer(&trace, "step", "train");
    const TraceSpan inner(&trace, "for\"ward\n");
  }
  trace.counter("memory_gib", 1.25);
  trace.instant("saved", "checkpoint");
  trace.name_thread("main");
  auto events = events_by_name(trace);
  EXPECT_EQ(events["process_name"]["args"]["name"], "rank 3");
  EXPECT_EQ(events["thread_name"]["args"]["name"], "main");
  const nlohmann::json& outer = events["step"];
  const nlohmann::json& inner = events["for\"ward\n"];
  EXPECT_EQ(outer["ph"], "X");
  EXPECT_EQ(outer["cat"], "train");
  EXPECT_EQ(outer["pid"], 3);
  EXPECT_EQ(outer["tid"], inner["tid"]);
  EXPECT_LE(outer["ts"], inner["ts"]);
  EXPECT_LE(inner["dur"], outer["dur"]);
  EXPECT_EQ(events["memory_gib"]["args"]["value"], 1.25);
  EXPECT_EQ(events["saved"]["ph"], "i");
}

TEST(Trace, TimesAreExact) {
  TraceRecorder trace;
  const auto now = TraceRecorder::Clock::now();
  trace.span("a", "c", now, now + std::chrono::nanoseconds(1'234'567));
  trace.span("b", "c", now + std::chrono::microseconds(250), now + std::chrono::microseconds(251));
  auto events = events_by_name(trace);
  EXPECT_DOUBLE_EQ(events["a"]["dur"], 1234.567);
  EXPECT_NEAR(events["b"]["ts"].get<double>() - events["a"]["ts"].get<double>(), 250.0, 0.5);
}

TEST(Trace, NoRecorderNoCostAndAFullOneCounts) {
  { const TraceSpan nothing(nullptr, "x"); }
  TraceRecorder trace({.max_events = 2});
  for (int i = 0; i < 5; ++i) const TraceSpan span(&trace, "x");
  EXPECT_EQ(trace.size(), 2u);
  EXPECT_EQ(trace.dropped(), 3u);
}

TEST(Trace, ThreadsGetRowsOfTheirOwn) {
  TraceRecorder trace;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&trace] {
      for (int i = 0; i < 1000; ++i) const TraceSpan span(&trace, "work");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(trace.size(), 4000u);
  const nlohmann::json json = nlohmann::json::parse(trace.to_json());
  std::set<int> rows;
  for (const nlohmann::json& event : json["traceEvents"]) {
    if (event["ph"] == "X") rows.insert(event["tid"].get<int>());
  }
  EXPECT_EQ(rows.size(), 4u);
}

}  // namespace
}  // namespace phalanx::observe
