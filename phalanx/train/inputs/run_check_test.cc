#include "phalanx/train/inputs/run_check.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::train {
namespace {

class RunCheck : public ::testing::Test {
 protected:
  std::string refusal(const std::string& text, const RunChecks& checks = {}) {
    const std::string file = (folder_.path() / "run.toml").string();
    write_file(file, text);
    try {
      read_run_config(file, {}, checks);
    } catch (const Error& error) {
      kind_ = error.kind();
      return error.what();
    }
    return "accepted";
  }

  TempDirectory folder_{"run-check"};
  std::string kind_;
};

TEST_F(RunCheck, AllThatIsWrongIsOneReport) {
  const std::string text = refusal(
      "[job]\ndump_folder = \"\"\n[model]\nflavor = \"debug\"\nn_heads = 3\nn_kv_heads = 2\nhf_assets_path = "
      "\"/no/such\"\n"
      "[training]\ndataset_path = \"/no/such.bin\"\nglobal_batch_size = 3\nlocal_batch_size = 2\nstep = 3\n"
      "[optimizer]\nbeta1 = 1\n[validation]\nenable = true\ndataset_path = \"/no/held.bin\"\n"
      "[parallelism]\ntensor_parallel_degree = 7\npipeline_parallel_schedule = \"1f2b\"\n");
  for (const char* problem :
       {"run.toml: 10 problems", "dump_folder is empty", "n_heads = 3", "hf_assets_path '/no/such' does not exist",
        "/no/such.bin", "global_batch_size 3 is not a multiple of local_batch_size 2", "unknown key [training] step ",
        "[optimizer] beta1 is 1: expected 0 <= beta1 < 1", "/no/held.bin", "tensor_parallel_degree 7 does not divide",
        "[parallelism] pipeline_parallel_schedule: unknown pipeline schedule '1f2b'"}) {
    EXPECT_THAT(text, HasSubstr(problem));
  }
  EXPECT_EQ(kind_, "ConfigError");
  // Ranks do not look at files, which may be elsewhere on another node.
  EXPECT_THAT(refusal("[training]\ndataset_path = \"/no/such.bin\"\n[model]\nflavor = \"debug\"\nn_heads = 3\n",
                      {.look_at_files = false}),
              AllOf(HasSubstr("n_heads = 3"), Not(HasSubstr("such.bin"))));
}

TEST_F(RunCheck, WhatTokenFilesAndInitialWeightsHoldIsInTheReport) {
  const auto path = [&](const char* name) { return (folder_.path() / name).string(); };
  write_file(path("ids.bin"), std::string(4096, '\1'));  // 0x0101 = 257
  write_file(path("short.bin"), std::string(20, '\0'));
  const std::string run = "[job]\ndump_folder = \"" + path("out") + "\"\n";
  const std::string model = run + "[model]\nflavor = \"debug\"\nvocab_size = 256\n";
  const std::string data = "[training]\ndataset_dtype = \"uint16\"\nseq_len = 16\ndataset_path = \"";
  const std::string weights = "[checkpoint]\ninitial_load_path = \"" + path("none") + "\"\n";
  EXPECT_THAT(refusal(model + data + path("ids.bin") + "\"\n" + weights),
              AllOf(HasSubstr("2 problems"), HasSubstr("257"), HasSubstr("initial_load_path '" + path("none") + "'")));
  EXPECT_THAT(refusal(run + data + path("short.bin") + "\"\n[validation]\nenable = true\ndataset_path = \"" +
                      path("ids.bin") + "\"\n"),
              HasSubstr("short.bin"));
  EXPECT_EQ(kind_, "DataError");
  EXPECT_EQ(refusal(run + data + path("ids.bin") + "\"\n"), "accepted");
  std::filesystem::create_directories(path("out/checkpoint"));
  write_file(path("out/checkpoint/branch.json"), "junk");
  EXPECT_THAT(
      refusal(run + data + path("none.bin") + "\"\n" + weights),
      AllOf(HasSubstr("2 problems"), HasSubstr("none.bin: no such file"), HasSubstr("branch.json: not valid JSON")));
  std::filesystem::remove(path("out/checkpoint/branch.json"));
  // Without a model there is no vocabulary to compare the ids with.
  EXPECT_THAT(refusal(model + "n_heads = 3\n" + data + path("ids.bin") + "\"\n"),
              AllOf(HasSubstr("n_heads = 3"), Not(HasSubstr("257"))));
}

TEST_F(RunCheck, WhatIsRefusedByAnotherNameIsStillMissing) {
  EXPECT_THAT(
      refusal("[model]\nflavor = \"debug\"\n[training]\ndataset = \"c4\"\n"),
      AllOf(HasSubstr("2 problems"), HasSubstr("[training] dataset = \"c4\""), HasSubstr("dataset_path is not set")));
}

TEST_F(RunCheck, NoProblemIsCausedByAnother) {
  const std::string data = "[training]\ndataset_path = \"/no/such.bin\"\n";
  EXPECT_THAT(refusal(data), HasSubstr("/no/such.bin"));
  EXPECT_EQ(kind_, "DataError");  // a single error keeps its type
  const std::string heads =
      refusal(data + "[model]\nn_heads = \"many\"\n[parallelism]\ntensor_parallel_degree = 8\n", {.ranks = 8});
  EXPECT_THAT(heads, AllOf(HasSubstr("2 problems"), HasSubstr("n_heads is \"many\""), Not(HasSubstr("does not fit"))));
  const std::string degree =
      refusal(data + "[parallelism]\ndata_parallel_shard_degree = 0\ntensor_parallel_degree = \"x\"\n", {.ranks = 2});
  EXPECT_THAT(degree, AllOf(HasSubstr("3 problems"), Not(HasSubstr("do not make"))));
  const std::string batch = refusal(data + "local_batch_size = 0\nglobal_batch_size = 3\n");
  EXPECT_THAT(batch, AllOf(HasSubstr("2 problems"), Not(HasSubstr("is not a multiple"))));
  // The files are not opened with settings that do not go together.
  const std::string file = (folder_.path() / "ids.bin").string();
  write_file(file, std::string(100'000, '\0'));
  const std::string packing = refusal("[training]\ndataset_path = \"" + file +
                                      "\"\ndataset_dtype = \"uint16\"\npacking = \"best_fit\"\nseq_len = 32\n"
                                      "[model]\nflavor = \"debug\"\n");
  EXPECT_THAT(packing, AllOf(HasSubstr("set attn_mask_type"), Not(HasSubstr("problems"))));
}

}  // namespace
}  // namespace phalanx::train
