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

TEST(Trace, OperationsThatOverlapGetRowsOfTheirOwn) {
  TraceRecorder trace;
  const auto now =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  trace.operation("communication", {.name = "bucket 0",
                                    .category = "comm",
                                    .issued_us = now,
                                    .started_us = now,
                                    .ended_us = now + 300,
                                    .details = {{"call", "all_reduce(\"x\")"}}});
  trace.operation(
      "communication",
      {.name = "bucket 1", .category = "comm", .issued_us = now + 100, .started_us = now + 300, .ended_us = now + 500});
  trace.operation("communication",
                  {.name = "bucket 2", .category = "comm", .issued_us = now + 300, .started_us = now + 500});
  auto events = events_by_name(trace);
  EXPECT_EQ(events["bucket 0"]["tid"], events["bucket 2"]["tid"]);
  EXPECT_NE(events["bucket 0"]["tid"], events["bucket 1"]["tid"]);
  EXPECT_EQ(events["bucket 0"]["args"]["call"], "all_reduce(\"x\")");
  EXPECT_DOUBLE_EQ(events["bucket 1"]["ts"].get<double>() - events["bucket 0"]["ts"].get<double>(), 100);
  EXPECT_DOUBLE_EQ(events["bucket 1"]["dur"], 400);
  EXPECT_GE(events["bucket 2"]["dur"], 0);
  std::map<std::string, int> rows;
  int queued = 0;
  const nlohmann::json json = nlohmann::json::parse(trace.to_json());
  for (const nlohmann::json& event : json["traceEvents"]) {
    if (event["name"] == "thread_name") rows[event["args"]["name"]] = event["tid"].get<int>();
    if (event["name"] != "queued" || event["tid"] != events["bucket 1"]["tid"]) continue;
    ++queued;
    EXPECT_DOUBLE_EQ(event["dur"], 200);
    EXPECT_EQ(event["ts"], events["bucket 1"]["ts"]);
  }
  EXPECT_EQ(queued, 1);
  EXPECT_EQ(rows.at("communication"), events["bucket 0"]["tid"]);
  EXPECT_EQ(rows.at("communication 2"), events["bucket 1"]["tid"]);
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
