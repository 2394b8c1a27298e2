#include "phalanx/observe/communication_time.h"

#include <gtest/gtest.h>

namespace phalanx::observe {
namespace {

constexpr std::int64_t kSecond = 1'000'000;

struct Times {
  std::int64_t started, ended, wait_from = 0, wait_until = 0;  // seconds
};

FlightEntry entry(std::uint64_t seq, const Times& times) {
  FlightEntry result;
  result.seq = seq;
  result.issued_us = result.started_us = times.started * kSecond;
  result.ended_us = times.ended * kSecond;
  result.wait_from_us = times.wait_from * kSecond;
  result.wait_until_us = times.wait_until * kSecond;
  return result;
}

TEST(CommunicationTime, GroupsThatWorkAtTheSameTimeCountOnce) {
  std::vector<std::vector<FlightEntry>> groups = {{entry(0, {1, 900})}, {}};
  CommunicationTimer timer([&] { return groups; });
  EXPECT_EQ(timer.take().operations, 0);  // earlier operations do not count
  groups[0].push_back(entry(1, {1000, 1010, 1008, 1010}));
  groups[0].push_back(entry(2, {1020, 1030, 1018, 1021}));  // the wait began before the start
  groups[1].push_back(entry(0, {1005, 1015, 1011, 1015}));
  const CommunicationTime time = timer.take();
  EXPECT_DOUBLE_EQ(time.busy_seconds, 15 + 12);
  EXPECT_DOUBLE_EQ(time.waited_seconds, 2 + 4 + 3);
  EXPECT_EQ(time.operations, 3);
  EXPECT_EQ(timer.take().operations, 0);  // no operation counts twice
}

TEST(CommunicationTime, WhatHasNotEndedIsCountedLater) {
  std::vector<std::vector<FlightEntry>> groups = {{}};
  CommunicationTimer timer([&] { return groups; });
  groups[0] = {entry(0, {1, 2}), entry(1, {3, 0}), entry(2, {4, 6})};
  EXPECT_DOUBLE_EQ(timer.take().busy_seconds, 1);
  groups[0][1].ended_us = 5 * kSecond;
  CommunicationTime both = timer.take();
  EXPECT_DOUBLE_EQ(both.busy_seconds, 3);  // from 3 to 6
  both += both;
  EXPECT_DOUBLE_EQ(both.busy_seconds, 6);
  EXPECT_EQ(both.operations, 4);
}

TEST(CommunicationTime, WhatTheRecorderHasForgottenIsCountedAsLost) {
  FlightRecorder recorder({.group = "world", .capacity = 2});
  CommunicationTimer timer([&] { return std::vector<std::vector<FlightEntry>>{recorder.snapshot()}; });
  for (std::uint64_t seq = 0; seq < 5; ++seq) {
    recorder.issued({.seq = seq, .verb = "barrier"});
    recorder.started(seq);
    recorder.finished(seq);
    recorder.waited(seq, std::chrono::system_clock::now());
  }
  const CommunicationTime time = timer.take();
  EXPECT_EQ(time.operations, 2);
  EXPECT_EQ(time.lost, 3);
  EXPECT_GE(time.waited_seconds, 0);
}

}  // namespace
}  // namespace phalanx::observe
