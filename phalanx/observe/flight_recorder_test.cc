#include "phalanx/observe/flight_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

namespace phalanx::observe {
namespace {

TEST(FlightRecorder, KeepsTheNewestInOrder) {
  FlightRecorder recorder({.group = "world", .capacity = 4});
  for (std::uint64_t seq = 1; seq <= 6; ++seq) recorder.issued({.seq = seq, .verb = "barrier"});
  const std::vector<FlightEntry> entries = recorder.snapshot();
  ASSERT_EQ(entries.size(), 4u);
  EXPECT_EQ(entries.front().seq, 3u);
  EXPECT_EQ(entries.back().seq, 6u);
  EXPECT_EQ(recorder.recorded(), 6u);
  recorder.finished(1);  // has left the ring
  recorder.finished(99);
  EXPECT_EQ(recorder.unfinished().size(), 4u);
}

TEST(FlightRecorder, StatesAndTimesFollowTheOperation) {
  FlightRecorder recorder({.group = "dp", .rank = 1, .size = 2});
  recorder.issued({.seq = 1, .verb = "all_reduce", .dtype = "float32", .count = 8, .op = "sum"});
  recorder.issued({.seq = 2, .verb = "send", .dtype = "int64", .count = 1, .peer = 0, .tag = 7});
  recorder.issued({.seq = 3, .verb = "broadcast", .dtype = "uint8", .count = 5, .root = 0});
  recorder.started(1);
  recorder.finished(1);
  recorder.started(2);
  recorder.failed(2);
  ASSERT_EQ(recorder.unfinished().size(), 1u);
  EXPECT_EQ(recorder.unfinished()[0].seq, 3u);

  const nlohmann::json json = nlohmann::json::parse(recorder.to_json());
  EXPECT_EQ(json["group"], "dp");
  EXPECT_EQ(json["rank"], 1);
  EXPECT_EQ(json["size"], 2);
  EXPECT_EQ(json["recorded"], 3);
  const nlohmann::json& reduce = json["entries"][0];
  EXPECT_EQ(reduce["verb"], "all_reduce");
  EXPECT_EQ(reduce["dtype"], "float32");
  EXPECT_EQ(reduce["count"], 8);
  EXPECT_EQ(reduce["op"], "sum");
  EXPECT_EQ(reduce["state"], "finished");
  EXPECT_LE(reduce["issued_us"], reduce["started_us"]);
  EXPECT_LE(reduce["started_us"], reduce["ended_us"]);
  EXPECT_FALSE(reduce.contains("root"));
  EXPECT_EQ(json["entries"][1]["state"], "failed");
  EXPECT_EQ(json["entries"][1]["peer"], 0);
  EXPECT_EQ(json["entries"][1]["tag"], 7);
  EXPECT_EQ(json["entries"][2]["root"], 0);
  EXPECT_EQ(json["entries"][2]["state"], "issued");
  EXPECT_FALSE(json["entries"][2].contains("ended_us"));
}

TEST(FlightRecorder, ADevicesTimesReplaceThoseOfTheHost) {
  FlightRecorder recorder({.group = "dp"});
  for (const std::uint64_t seq : {1, 2, 3, 4}) {
    recorder.issued({.seq = seq, .verb = "all_reduce"});
    recorder.started(seq);
  }
  const std::int64_t by_the_host = recorder.snapshot()[2].started_us;
  const std::int64_t at = by_the_host + 1000;
  recorder.finished(1, {.started_us = at + 100, .ended_us = at + 350, .wait_from_us = at + 200});
  recorder.finished(2, {.started_us = at + 350, .ended_us = at + 400});
  recorder.finished(3, {.ended_us = at + 500});
  recorder.finished(4, {.started_us = 10, .ended_us = 20, .wait_from_us = 15});  // by a clock that is far behind
  const std::vector<FlightEntry> entries = recorder.snapshot();
  EXPECT_EQ(entries[0].started_us, at + 100);
  EXPECT_EQ(entries[0].ended_us, at + 350);
  EXPECT_EQ(entries[0].wait_from_us, at + 200);
  EXPECT_EQ(entries[0].wait_until_us, at + 350);
  EXPECT_EQ(entries[1].wait_until_us, 0);
  EXPECT_EQ(entries[2].started_us, by_the_host);
  EXPECT_EQ(entries[2].ended_us, at + 500);
  EXPECT_EQ(entries[3].started_us, entries[3].issued_us);
  EXPECT_EQ(entries[3].ended_us, entries[3].issued_us);
  EXPECT_EQ(entries[3].wait_from_us, entries[3].wait_until_us);
  EXPECT_TRUE(recorder.unfinished().empty());
}

TEST(FlightRecorder, OneThreadIssuesAnotherFinishesAThirdLooks) {
  FlightRecorder recorder({.group = "world"});
  constexpr std::uint64_t kOps = 20'000;
  std::thread looker([&] {
    while (recorder.recorded() < kOps) {
      const std::vector<FlightEntry> entries = recorder.snapshot();
      for (std::size_t i = 1; i < entries.size(); ++i) ASSERT_EQ(entries[i].seq, entries[i - 1].seq + 1);
    }
  });
  std::thread finisher([&] {
    for (std::uint64_t seq = 1; seq <= kOps; ++seq) {
      while (recorder.recorded() < seq) std::this_thread::yield();
      recorder.finished(seq);
    }
  });
  for (std::uint64_t seq = 1; seq <= kOps; ++seq) recorder.issued({.seq = seq, .verb = "barrier"});
  finisher.join();
  looker.join();
  EXPECT_TRUE(recorder.unfinished().empty());
  EXPECT_EQ(recorder.snapshot().size(), 2048u);
}

}  // namespace
}  // namespace phalanx::observe
