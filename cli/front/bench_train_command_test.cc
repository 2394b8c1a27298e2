// `phalanx bench train` as a user runs it, with real ranks.
#include "cli/front/bench_train_command.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

class BenchTrainTest : public FolderTest {
 protected:
  BenchTrainTest() {
    program_testing::write_periodic_tokens(path("tokens.bin"));
    std::ofstream(path("run.toml")) << "[model]\nflavor = \"debug\"\n[training]\ndataset_path = \""
                                    << path("tokens.bin") << "\"\nseq_len = 32\nlocal_batch_size = 2\n";
    std::filesystem::create_directory(path("tmp"));
  }

  /// Returns the exit status of `phalanx bench train run.toml ARGUMENTS`. Its output is in out_ and error_.
  int run(const std::string& arguments, const std::string& variables = "") {
    const auto outcome = program_testing::run_line(folder(), "bench train " + path("run.toml") + " " + arguments,
                                                   variables + " TMPDIR=" + path("tmp"));
    out_ = outcome.out;
    error_ = outcome.err;
    return outcome.status;
  }
  bool left_nothing() const { return std::filesystem::is_empty(path("tmp")); }

  std::string out_, error_;
};

TEST_F(BenchTrainTest, LayoutsBesideOneRank) {
  ASSERT_EQ(run("--layouts 'dp_replicate=2 tp=2' --steps 2 --warm-up 1 --json " + path("table.json")), 0) << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("4 sequences of 32 tokens a step, 2 measured steps a run, 2 ranks of"),
                          ContainsRegex("\\| one rank, the same step +\\| +[0-9,]+ \\| +- \\| +- \\|"),
                          ContainsRegex("\\| tp=2 +\\| +[0-9,]+ \\| +[0-9]\\.[0-9]+ \\| +[0-9]\\.[0-9]+ \\|")));
  EXPECT_THAT(error_, AllOf(HasSubstr("[1/4] one rank, the same step\n"), HasSubstr("[4/4] tp=2\n")));
  EXPECT_TRUE(left_nothing());
  const auto table = nlohmann::json::parse(read_file(path("table.json")));
  ASSERT_EQ(table["layouts"].size(), 4U);
  const auto& one = table["layouts"][0];
  const auto& two = table["layouts"][2];
  EXPECT_EQ(two["layout"], "dp_replicate=2");
  EXPECT_GT(two["counted_bytes"], 0);
  EXPECT_GT(two["predicted_bytes"], 0);
  EXPECT_NEAR(two["strong_scaling"].get<double>(),
              two["tokens_per_second"].get<double>() / (2 * one["tokens_per_second"].get<double>()), 1e-9);
  EXPECT_TRUE(two.contains("weak_scaling"));
  EXPECT_FALSE(one.contains("strong_scaling"));
}

TEST_F(BenchTrainTest, AFailingLayoutIsARow) {
  EXPECT_EQ(run("--layouts dp_replicate=2 --steps 1 --warm-up 0 --training.dataset_path=" + path("none.bin")), 1);
  EXPECT_THAT(out_,
              AllOf(ContainsRegex("\\| dp_replicate=2 +\\| failed: .*none.bin"), HasSubstr("expected a token file")));
  EXPECT_TRUE(left_nothing());
}

TEST_F(BenchTrainTest, WhatDoesNotFitIsLeftOut) {
  ASSERT_EQ(run("--devices 1MiB --steps 1 --warm-up 0"), 0) << error_;
  EXPECT_THAT(out_,
              AllOf(HasSubstr("does not fit: one rank, the same step needs "), HasSubstr("does not fit: tp=2 needs "),
                    HasSubstr(" a rank of 1.00 MiB\n"), Not(HasSubstr("| tp=2"))));
}

TEST_F(BenchTrainTest, WhatIsWrongIsRefused) {
  EXPECT_EQ(run("--steps 0"), 2);
  EXPECT_THAT(error_, HasSubstr("--steps is 0: expected 1 or more"));
  EXPECT_EQ(run("--layouts tp=3"), 2);
  EXPECT_THAT(error_, HasSubstr("takes 3 ranks, but there are 2"));
  EXPECT_EQ(run("--devices H10"), 2);
  EXPECT_THAT(error_, HasSubstr("no device 'H10' is known"));
  EXPECT_EQ(run("--training.seq 3"), 2);
  EXPECT_EQ(run("--help"), 0);
  EXPECT_THAT(out_, HasSubstr("usage: phalanx bench train"));
  EXPECT_EQ(run("", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"), 2);
  EXPECT_THAT(error_, HasSubstr("is itself a rank of a launcher"));
}

}  // namespace
}  // namespace phalanx::cli
