#include "phalanx/observe/tensorboard.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "event.pb.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/observe/tfrecord.h"

namespace phalanx::observe {
namespace {

// A CRC-32C that shares no code with the one under test: bit by bit, from the definition.
std::uint32_t slow_crc32c(std::string_view data) {
  std::uint32_t crc = ~0U;
  for (const char c : data) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82F63B78U : crc >> 1;
  }
  return ~crc;
}

template <typename T>
T take(std::string_view& data) {
  T value;
  if (data.size() < sizeof value) throw std::runtime_error("record cut short");
  std::memcpy(&value, data.data(), sizeof value);
  data.remove_prefix(sizeof value);
  return value;
}

std::uint32_t unmasked(std::uint32_t stored) {
  const std::uint32_t rotated = stored - 0xA282EAD8U;
  return (rotated >> 17) | (rotated << 15);
}

std::vector<proto::Event> read_events(const std::filesystem::path& path) {
  const std::string contents = read_file(path);
  std::string_view rest = contents;
  std::vector<proto::Event> events;
  while (!rest.empty()) {
    const std::string_view length_bytes = rest.substr(0, 8);
    const auto length = take<std::uint64_t>(rest);
    EXPECT_EQ(unmasked(take<std::uint32_t>(rest)), slow_crc32c(length_bytes));
    const std::string_view data = rest.substr(0, length);
    rest.remove_prefix(length);
    EXPECT_EQ(unmasked(take<std::uint32_t>(rest)), slow_crc32c(data));
    events.emplace_back();
    EXPECT_TRUE(events.back().ParseFromArray(data.data(), static_cast<int>(data.size())));
    EXPECT_EQ(events.back().GetReflection()->GetUnknownFields(events.back()).field_count(), 0);
  }
  return events;
}

TEST(TfRecord, KnownChecksumAndFrame) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);
  EXPECT_EQ(crc32c(""), 0U);
  std::string record;
  append_tfrecord(record, "abc");
  EXPECT_EQ(record.size(), 8u + 4 + 3 + 4);
  EXPECT_EQ(record.substr(0, 8), std::string("\3\0\0\0\0\0\0\0", 8));
}

TEST(TensorBoard, ScalarsAndTextComeBack) {
  const TempDirectory scratch;
  TensorBoardWriter board(scratch.path() / "tb");
  EXPECT_THAT(board.path().filename().string(), StartsWith("events.out.tfevents."));
  board.add_scalar("loss", 4.125, 1);
  board.add_scalar("lr", 3e-4, std::int64_t{1} << 40);
  board.add_text("config", std::string(300, 'x'), 0);
  board.flush();
  const std::vector<proto::Event> events = read_events(board.path());
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].file_version(), "brain.Event:2");
  EXPECT_EQ(events[1].step(), 1);
  EXPECT_EQ(events[1].summary().value(0).tag(), "loss");
  EXPECT_EQ(events[1].summary().value(0).simple_value(), 4.125F);
  EXPECT_EQ(events[2].step(), std::int64_t{1} << 40);
  EXPECT_EQ(events[2].summary().value(0).simple_value(), 3e-4F);
  const proto::Summary::Value& text = events[3].summary().value(0);
  EXPECT_EQ(text.tag(), "config");
  EXPECT_EQ(text.tensor().dtype(), 7);
  EXPECT_EQ(text.tensor().tensor_shape().dim(0).size(), 1);
  EXPECT_EQ(text.tensor().string_val(0), std::string(300, 'x'));
  EXPECT_EQ(text.metadata().plugin_data().plugin_name(), "text");
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  EXPECT_NEAR(events[1].wall_time(), now, 3600);
}

TEST(TensorBoard, AResumedRunPurgesLaterSteps) {
  const TempDirectory scratch;
  const TensorBoardWriter first(scratch.path());
  const TensorBoardWriter resumed(scratch.path(), {.resumed_step = 40});
  EXPECT_NE(first.path(), resumed.path());
  const std::vector<proto::Event> events = read_events(resumed.path());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].step(), 41);
  EXPECT_EQ(events[1].session_log().status(), 1);
}

TEST(TensorBoard, ANewRunPurgesWhatAnEarlierOneLeftAndItsFileIsReadLast) {
  const TempDirectory scratch;
  write_file(scratch.path() / "events.out.tfevents.9999999998.host.1.0", "");
  const TensorBoardWriter fresh(scratch.path());
  EXPECT_THAT(fresh.path().filename().string(), StartsWith("events.out.tfevents.9999999999."));
  const std::vector<proto::Event> events = read_events(fresh.path());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].step(), 0);
  EXPECT_EQ(events[1].session_log().status(), 1);
}

TEST(TensorBoard, LongRunsReachTheDiskWithoutFlushAndThreadsDoNotMix) {
  const TempDirectory scratch;
  TensorBoardWriter board(scratch.path());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&board] {
      for (int i = 0; i < 1000; ++i) board.add_scalar("x", i, i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(std::filesystem::file_size(board.path()), std::uintmax_t{64 * 1024});
  board.flush();
  EXPECT_EQ(read_events(board.path()).size(), 4001u);
}

TEST(TensorBoard, AFullDiskIsReportedByFlushAndSurvivedByTheDestructor) {
  const TempDirectory scratch;
  FaultyFileSystem full(posix_file_system(), {.fail_at = 3, .kind = Fault::full});
  TensorBoardWriter board(scratch.path() / "tb", {.file_system = &full});
  board.add_scalar("x", 1, 1);
  EXPECT_THROW(board.flush(), FileError);
}

}  // namespace
}  // namespace phalanx::observe
