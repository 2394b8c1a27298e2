#include "phalanx/observe/trace.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/observe/trace_file.h"

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

TEST(TraceFiles, WhatWasWrittenIsReadByRank) {
  const TempDirectory folder("traces");
  const auto begin = TraceRecorder::Clock::now();
  const auto after = [&](int milliseconds) { return begin + std::chrono::milliseconds(milliseconds); };
  for (const int rank : {1, 0}) {
    TraceRecorder trace({.rank = rank});
    trace.name_thread("training");
    trace.span("0F1", "pass", after(10 + rank), after(30));
    trace.span("step 1", "step", after(5), after(50));
    trace.counter("memory_gib", 1.0);
    write_file(folder.path() / ("rank" + std::to_string(rank) + "_trace.json"), trace.to_json());
  }
  const auto files = read_trace_files(folder.path());
  ASSERT_EQ(files.size(), 2U);
  EXPECT_EQ(files[1].rank, 1);
  ASSERT_EQ(files[1].spans.size(), 2U);
  EXPECT_EQ(files[1].spans[0].name, "0F1");
  EXPECT_EQ(files[1].spans[0].category, "pass");
  EXPECT_NEAR(files[1].spans[0].begin_seconds, 0.006, 1e-6);
  EXPECT_NEAR(files[1].spans[0].end_seconds, 0.025, 1e-6);
  EXPECT_NEAR(files[0].epoch_seconds, files[1].epoch_seconds, 0.005);
}

TEST(TraceFiles, WhatIsNoTraceIsNamed) {
  const TempDirectory folder("traces");
  const auto refusal = [&](const std::filesystem::path& path) {
    try {
      read_trace_files(path);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refusal(folder.path() / "none"), HasSubstr("none does not exist"));
  EXPECT_THAT(refusal(folder.path()), EndsWith("holds no trace (*_trace.json)"));
  const auto below = folder.path() / "profile_traces" / "iteration_10";
  std::filesystem::create_directories(below);
  TraceRecorder trace;
  trace.instant("saved", "checkpoint");
  write_file(below / "rank0_trace.json", trace.to_json());
  EXPECT_THAT(refusal(folder.path()), EndsWith("; did you mean " + below.string() + "?"));
  EXPECT_THAT(refusal(below / "rank0_trace.json"), HasSubstr("is no folder"));
  write_file(below / "rank1_trace.json", trace.to_json());
  EXPECT_THAT(refusal(below), HasSubstr("rank1_trace.json is the second trace of rank 0"));
  write_file(below / "rank1_trace.json", "{\"traceEvents\": 3}");
  EXPECT_THAT(refusal(below), HasSubstr("rank1_trace.json is no trace: it: \"traceEvents\" is 3: expected a list"));
  write_file(below / "rank1_trace.json", "{\"traceEvents\": [{\"pid\": 1}]}");
  EXPECT_THAT(refusal(below), HasSubstr("rank1_trace.json is no trace: event 0 has no \"ph\""));
}

}  // namespace
}  // namespace phalanx::observe
