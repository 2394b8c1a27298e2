// The schedules equal torch's, action for action. testdata/schedule_golden.txt names the source
// (make_schedule_golden.py).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/transfers.h"

namespace phalanx::schedule {
namespace {

struct Golden {
  ScheduleOptions options;
  std::string passes, transfers, all;  // hashes
  std::string what() const {
    return fmt::format("{}, {} ranks x {} stages, {} micro-batches", options.name, options.ranks,
                       options.stages_per_rank, options.micro_batches);
  }
};

struct GoldenFile {
  std::vector<Golden> sizes;
  std::vector<std::pair<ScheduleOptions, std::string>> full;  // CSV
};

const GoldenFile& golden_file() {
  static const GoldenFile file = [] {
    GoldenFile read;
    std::ifstream in(PHALANX_SCHEDULE_TESTDATA "/schedule_golden.txt");
    for (std::string line; std::getline(in, line);) {
      std::istringstream words(line);
      if (line.starts_with("#")) continue;
      if (line.starts_with("full ")) {
        ScheduleOptions options;
        words.ignore(5);
        words >> options.name >> options.ranks >> options.stages_per_rank >> options.micro_batches;
        std::string csv;
        for (int rank = 0; rank < options.ranks && std::getline(in, line); ++rank) csv += line + "\n";
        read.full.emplace_back(options, csv);
        continue;
      }
      Golden golden;
      words >> golden.options.name >> golden.options.ranks >> golden.options.stages_per_rank >>
          golden.options.micro_batches >> golden.passes >> golden.transfers >> golden.all;
      read.sizes.push_back(golden);
    }
    return read;
  }();
  return file;
}

std::string fnv(std::string_view text) {
  std::uint64_t value = 0xCBF29CE484222325ULL;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  return fmt::format("{:016x}", value);
}

TEST(ScheduleGolden, PassesAreTorchsActionForAction) {
  ASSERT_GT(golden_file().sizes.size(), 400U);
  std::map<std::string, int> equal, refused;
  for (const Golden& golden : golden_file().sizes) {
    if (golden.passes == "refused") {
      EXPECT_THROW(make_schedule(golden.options), ConfigError) << golden.what();
      ++refused[golden.options.name];
      continue;
    }
    const Schedule schedule = make_schedule(golden.options);
    EXPECT_EQ(fnv(to_csv(schedule)), golden.passes) << golden.what() << "\n" << to_table(schedule);
    ++equal[golden.options.name];
  }
  EXPECT_EQ(equal.size(), 7U);
  EXPECT_GT(refused["Interleaved1F1B"], 0);
  EXPECT_GT(refused["1F1B"], 0);
  EXPECT_GT(refused["DualPipeV"], 0);
}

TEST(ScheduleGolden, OneOfEachInFull) {
  EXPECT_EQ(golden_file().full.size(), 7U);
  for (const auto& [options, csv] : golden_file().full) {
    const Schedule schedule = make_schedule(options);
    EXPECT_EQ(to_csv(schedule), csv) << options.name;
    // The file tells stages and micro-batches, too.
    EXPECT_EQ(parse_csv(csv, {.name = options.name}), schedule);
  }
}

TEST(ScheduleGolden, TransfersAreWhereTorchPlacesThem) {
  int compared = 0, with_sharding = 0;
  for (const Golden& golden : golden_file().sizes) {
    if (golden.passes == "refused") continue;
    const Schedule schedule = make_schedule(golden.options);
    EXPECT_EQ(fnv(to_csv(add_transfers(schedule))), golden.transfers) << golden.what();
    ++compared;
    if (golden.all == "-") continue;
    const Schedule all = add_transfers(schedule, {.unshard_stages = 3, .reduce_gradients = true});
    EXPECT_EQ(fnv(to_csv(all)), golden.all) << golden.what() << "\n" << to_csv(all);
    ++with_sharding;
  }
  EXPECT_GT(compared, 380);
  EXPECT_GT(with_sharding, 200);
}

}  // namespace
}  // namespace phalanx::schedule
