// `phalanx verify` as a user runs it: its output, its exit status, and what it refuses before a rank starts.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/front/verify_command.h"
#include "cli/testing/program_fixture.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

class VerifyCommandTest : public FolderTest {
 protected:
  VerifyCommandTest() {
    program_testing::write_periodic_tokens(path("tokens.bin"));
    std::ofstream(path("run.toml")) << "[model]\nflavor = \"debug\"\n[training]\ndataset_path = \""
                                    << path("tokens.bin")
                                    << "\"\nseq_len = 32\nlocal_batch_size = 1\nsteps = 5\n"
                                       "[lr_scheduler]\nwarmup_steps = 1\n";
  }

  /// Returns the exit status of `phalanx verify ARGUMENTS run.toml`. Its output is in out_ and error_.
  int run(const std::string& arguments) {
    const auto outcome = program_testing::run_line(folder(), "verify " + path("run.toml") + " " + arguments);
    out_ = outcome.out;
    error_ = outcome.err;
    return outcome.status;
  }

  std::string out_, error_;
};

TEST_F(VerifyCommandTest, EveryLayoutOfTwoRanksIsRight) {
  ASSERT_EQ(run("-n 2 --all --steps 2 --training.seq_len 16 --json " + path("figures.json")), 0) << error_;
  for (const char* layout :
       {"one rank", "dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=3", "tp=2", "pp=2", "ac=full",
        "precision=bfloat16,ac=full", "precision=float16,ac=op", "dp_replicate=2,precision=float16,ac=op",
        "dp_shard=2,zero=3,precision=bfloat16,ac=full", "tp=2,precision=bfloat16,ac=full"}) {
    EXPECT_THAT(out_, ContainsRegex(std::string("ok +") + layout + " +loss [0-9]"));
  }
  EXPECT_THAT(out_, HasSubstr("42 of 42 layouts right over 2 steps"));
  EXPECT_THAT(out_, HasSubstr("expected: loss within 2e-05 of its value, gradients within 1e-05 of their norm, from"));
  const auto figures = nlohmann::json::parse(read_file(path("figures.json")));
  ASSERT_EQ(figures.size(), 42U);
  EXPECT_EQ(figures[0]["steps"].size(), 2U);
  EXPECT_EQ(figures[0]["steps"][0]["gradients"].size(), 21U);
}

TEST_F(VerifyCommandTest, LayoutsThatAreLeftOutAreListedWithTheReason) {
  ASSERT_EQ(
      run("-n 2 --all --steps 1 --training.seq_len 16 --training.local_batch_size 1 --training.global_batch_size 1 "
          "--json " +
          path("figures.json")),
      0)
      << error_;
  EXPECT_THAT(out_, AllOf(ContainsRegex("left out, because .*: 15 layouts"), HasSubstr("\n  dp_replicate=2; "),
                          HasSubstr("; dp_shard=2,zero=1; "), HasSubstr("global_batch_size 1 is not a multiple of")));
  EXPECT_THAT(out_, ContainsRegex("ok +tp=2 "));
  std::vector<std::string> left_out;
  bool has_checked = false;
  for (const auto& layout : nlohmann::json::parse(read_file(path("figures.json")))) {
    if (!layout.contains("left_out")) {
      has_checked |= layout.at("right").get<bool>();
      continue;
    }
    EXPECT_FALSE(layout.contains("right"));
    const auto name = layout.at("layout").get<std::string>();
    EXPECT_THAT(layout["left_out"].get<std::string>(),
                HasSubstr(name.starts_with("pp=") ? "micro-batches >= stages does not hold: 1 < 2"
                                                  : "global_batch_size 1 is not a multiple of"));
    left_out.push_back(name);
  }
  EXPECT_TRUE(has_checked);
  EXPECT_EQ(left_out.size(), 15U);
  EXPECT_THAT(left_out, AllOf(Contains("dp_replicate=2"), Contains("dp_shard=2,zero=1")));
}

TEST_F(VerifyCommandTest, LayoutsAreRightOverSocketsToo) {
  ASSERT_EQ(run("-n 4 --steps 1 --comm.backend gloo --layout pp=2,tp=2 --layout pp=2,dp_shard=2"), 0) << error_;
  EXPECT_THAT(error_, HasSubstr("backend: gloo"));
  EXPECT_THAT(out_, HasSubstr("2 of 2 layouts right over 1 step"));
}

TEST_F(VerifyCommandTest, SaysWhatIsExpectedIn16Bits) {
  ASSERT_EQ(run("-n 2 --steps 2 --layout ac=full --layout dp_replicate=2 --layout dp_shard=2 --layout tp=2 "
                "--training.mixed_precision_param bfloat16"),
            0)
      << error_ << out_;
  EXPECT_THAT(out_, HasSubstr("expected of one rank: the same bits\n"));
  EXPECT_THAT(
      out_, HasSubstr("expected in bfloat16, of replicas, shards and stages: loss within 0.001 of its value, "
                      "gradients within 0.005 of their norm, from equal weights; updates within 1e-05 of theirs, from "
                      "equal gradients; that much because"));
  EXPECT_THAT(out_, HasSubstr("expected in bfloat16, of tensor and context parallelism: loss within 0.01 of its value, "
                              "gradients within 0.02 of their norm, from equal weights; updates within 1e-05 of "
                              "theirs, from equal gradients; or, where that is more, "
                              "within four times what rounding to 16 bits changes on one rank"));
  EXPECT_THAT(out_, HasSubstr("4 of 4 layouts right over 2 steps"));
}

TEST_F(VerifyCommandTest, AStepThatFloat16SkipsIsNoReference) {
  EXPECT_EQ(run("-n 2 --layout dp_replicate=2,precision=float16 --training.initial_loss_scale 1e30"), 1);
  EXPECT_THAT(error_, HasSubstr("is not finite in float16, so the step is skipped and there is nothing to compare a "
                                "layout with: try a lower [training] initial_loss_scale"));
}

TEST_F(VerifyCommandTest, OneLayoutIsShownParameterByParameter) {
  ASSERT_EQ(run("-n 2 --steps 1 --parallelism.tensor_parallel_degree 2"), 0) << error_;
  EXPECT_THAT(
      out_,
      AllOf(HasSubstr("2 ranks, tensor parallel over 2 (tokens too) beside one rank"),
            ContainsRegex("step 1: loss [0-9.]+, on one rank [0-9.]+: "),
            ContainsRegex("layers.1.feed_forward.w2.weight +[0-9.e-]+  rank [01] \\[[0-9]+, [0-9]+\\] [0-9,]+ ulp")));
}

// This tolerance is smaller than any rounding error.
TEST_F(VerifyCommandTest, WhatIsWrongIsNamedAndEndsWithStatus1) {
  EXPECT_EQ(run("-n 2 --layout tp=2 --tolerance 1e-12"), 1);
  EXPECT_THAT(out_, AllOf(HasSubstr("WRONG tp=2"), HasSubstr("0 of 1 layout right")));
  EXPECT_THAT(error_, AllOf(ContainsRegex("layout tp=2, step 1: the (gradient|input|output) of '"),
                            HasSubstr("likely cause:")));
}

TEST_F(VerifyCommandTest, ARunThatDivergesOnOneRankIsNoReference) {
  EXPECT_EQ(run("-n 2 --steps 4 --optimizer.lr 1e38 --training.max_norm 1e30"), 1);
  EXPECT_THAT(error_, HasSubstr("there is nothing to compare a layout with; try a lower [optimizer] lr"));
}

TEST_F(VerifyCommandTest, WhatCannotBeIsRefusedBeforeARankStarts) {
  EXPECT_EQ(run("-n 2 --layout tp=4"), 2);
  EXPECT_THAT(error_, HasSubstr("layout 'tp=4' takes 4 ranks, but there are 2: give more, or smaller degrees"));
  EXPECT_EQ(run("-n 2 --layout dp=2"), 2);
  EXPECT_THAT(error_, HasSubstr("'dp=2' is not known"));
  EXPECT_EQ(run("-n 2 --all --layout tp=2"), 2);
  EXPECT_THAT(error_, HasSubstr("--all checks every layout"));
  EXPECT_EQ(run("--steps none"), 2);
  EXPECT_THAT(error_, HasSubstr("--steps is 'none': expected a whole number"));
  EXPECT_EQ(run("--steps 0"), 2);
  EXPECT_THAT(error_, HasSubstr("--steps is 0: expected 1 or more"));
  EXPECT_EQ(run("--steps 1 --steps 2"), 2);
  EXPECT_THAT(error_, HasSubstr("--steps is given twice: expected it once"));
  EXPECT_EQ(run("--tabel"), 2);
  EXPECT_THAT(error_, HasSubstr("unknown option '--tabel' (did you mean '--table'?)"));
  EXPECT_EQ(run("--layout"), 2);
  EXPECT_THAT(error_, HasSubstr("--layout needs a value"));
  EXPECT_EQ(run("--tolerance inf"), 2);
  EXPECT_THAT(error_, HasSubstr("--tolerance is 'inf': expected a number above 0"));
  EXPECT_EQ(run("--tolerance 0"), 2);
  EXPECT_THAT(error_, HasSubstr("--tolerance is '0': expected a number above 0, such as 1e-5"));
  EXPECT_EQ(run("-n 3 --parallelism.tensor_parallel_degree 3"), 2);
  EXPECT_THAT(error_, HasSubstr("tensor_parallel_degree = 3 does not fit the model: n_heads"));
}

}  // namespace
}  // namespace phalanx::cli
