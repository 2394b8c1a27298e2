#include "phalanx/observe/metrics.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::observe {
namespace {

using nlohmann::ordered_json;

TEST(Metrics, LinesAreOnTheDiskAtOnceAndInTheGivenOrder) {
  const TempDirectory scratch;
  const std::filesystem::path path = scratch.path() / "run/metrics.jsonl";
  MetricsWriter metrics(path);
  metrics.write({{"step", 1}, {"loss", 4.5}});
  EXPECT_EQ(read_file(path), "{\"step\":1,\"loss\":4.5}\n");
  metrics.write({{"step", 2}, {"loss", std::numeric_limits<double>::quiet_NaN()}});
  EXPECT_EQ(read_file(path), "{\"step\":1,\"loss\":4.5}\n{\"step\":2,\"loss\":null}\n");
}

TEST(Metrics, ANewRunStartsAnEmptyFile) {
  const TempDirectory scratch;
  write_file(scratch.path() / "m", "{\"step\":7}\n");
  const MetricsWriter metrics(scratch.path() / "m");
  EXPECT_EQ(read_file(scratch.path() / "m"), "");
}

TEST(Metrics, AResumedRunDropsLaterStepsAndATornLine) {
  const TempDirectory scratch;
  const std::filesystem::path path = scratch.path() / "m";
  write_file(path,
             "{\"step\":1}\n{\"step\":2}\n{\"step\":2,\"validation_"
             "loss\":3}\n{\"step\":3}\n{\"step\":4,\"lo");
  {
    MetricsWriter metrics(path, {.resumed_step = 2});
    metrics.write({{"step", 3}, {"loss", 1}});
  }
  const std::string expected =
      "{\"step\":1}\n{\"step\":2}\n{\"step\":2,\"validation_loss\":3}\n{"
      "\"step\":3,\"loss\":1}\n";
  EXPECT_EQ(read_file(path), expected);
  { const MetricsWriter again(path, {.resumed_step = 3}); }
  EXPECT_EQ(read_file(path), expected);
  { const MetricsWriter missing(scratch.path() / "new", {.resumed_step = 3}); }
  EXPECT_EQ(read_file(scratch.path() / "new"), "");
}

TEST(Metrics, ALineWithoutAStepIsRefusedAndAFullDiskReported) {
  const TempDirectory scratch;
  MetricsWriter metrics(scratch.path() / "m");
  EXPECT_THAT(
      [&] {
        metrics.write(ordered_json{{"loss", 1}});
      },
      ::testing::ThrowsMessage<Error>(HasSubstr("integer \"step\"")));
  EXPECT_THROW(metrics.write(ordered_json{{"step", 1.5}}), Error);
  FaultyFileSystem full(posix_file_system(), {.fail_at = 2, .kind = Fault::full});
  MetricsWriter unlucky(scratch.path() / "n", {.file_system = &full});
  EXPECT_THAT(
      [&] {
        unlucky.write({{"step", 1}});
      },
      ::testing::Throws<FileError>(::testing::Property(&FileError::code, ENOSPC)));
}

}  // namespace
}  // namespace phalanx::observe
