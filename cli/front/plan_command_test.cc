// `phalanx plan` as a user runs it: its output, its recommendation, and that `phalanx train` accepts the
// recommendation.
#include "cli/front/plan_command.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/testing/command_fixture.h"
#include "cli/testing/program_fixture.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/xml.h"
#include "phalanx/config/run_plan.h"

namespace phalanx::cli {
namespace {

class PlanCommandTest : public CommandTest {
 protected:
  PlanCommandTest() : CommandTest({"plan", "", kPlanHelp, plan_command}) {}
  std::string refusal(const Arguments& arguments, int expected_status = 2) {
    EXPECT_EQ(run(arguments), expected_status);
    return error_;
  }
  /// The exit status of the program itself.
  int phalanx(const std::string& arguments) { return program_testing::run_line(folder(), arguments).status; }

  XmlElement parsed_;
};

TEST_F(PlanCommandTest, SaysTheScenarioWithBytes) {
  ASSERT_EQ(run({"--model", "llama3_1b", "--devices", "4xA100", "--dtype", "bfloat16"}), 0) << error_;
  EXPECT_THAT(out_,
              AllOf(HasSubstr("devices  4 x A100-80G (80.0 GiB), 5 % of each left free\n"),
                    HasSubstr("scenario 1: data parallelism, ZeRO\n  the whole model needs "),
                    HasSubstr("\n  largest layer "), HasSubstr("51 of 51 layouts fit; the first 12 (all: --top 51):"),
                    HasSubstr("\nrecommended: dp_"), HasSubstr("  activations: ")));
  ASSERT_EQ(run({"--model=llama3_1b", "--devices=2x16GiB,2x80GiB", "--dtype=bfloat16", "--seq=512"}), 0) << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("scenario 2: "), HasSubstr("only the largest devices have that much")));
  ASSERT_EQ(run({"--model", "llama3_8b", "--devices", "RTX4090", "--nodes", "2", "--per-node", "8", "--seq", "98304",
                 "--dtype", "bfloat16", "--batch", "16", "--local-batch", "1"}),
            0)
      << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("16 x RTX4090-24G (24.0 GiB) on 2 nodes of 8"), HasSubstr("scenario 3: tensor"),
                          HasSubstr("tensor_parallel_degree = 8\n")));
}

TEST_F(PlanCommandTest, TrainTakesWhatIsRecommended) {
  ASSERT_EQ(run({"--model", "llama3_8b", "--devices", "8xH100", "--dtype", "bfloat16", "--batch", "64", "--seq", "8192",
                 "--toml", path("layout.toml"), "--json", path("plan.json")}),
            0)
      << error_;
  EXPECT_THAT(out_, EndsWith(read_file(path("layout.toml"))));
  const auto config = config::read_config(path("layout.toml"), {});
  EXPECT_EQ(config.model.flavor, "llama3_8b");
  const config::RunPlan plan = config::plan_run(config, 8);
  EXPECT_EQ(plan.global_batch_size, 64);
  EXPECT_EQ(phalanx("train " + path("layout.toml") + " --print-config"), 0) << read_file(path("err"));
  EXPECT_THAT(read_file(path("out")), HasSubstr("flavor = \"llama3_8b\""));

  ASSERT_EQ(run({"--model", "8B", "--devices", "8xH100", "--batch", "64", "--toml", path("alias.toml")}), 0) << error_;
  EXPECT_EQ(config::read_config(path("alias.toml"), {}).model.flavor, "llama3_8b");

  const auto json = nlohmann::json::parse(read_file(path("plan.json")));
  EXPECT_EQ(json["scenario"], 2);
  EXPECT_GT(json["largest_layer"]["activations"], 0);
  EXPECT_GT(json["whole_model"]["activations"], json["whole_model_recomputing"]["activations"]);
  bool found = false;
  for (const auto& layout : json["layouts"]) {
    if (layout["layout"] != json["recommended"]) continue;
    found = true;
    EXPECT_TRUE(layout["fits"]);
    EXPECT_EQ(layout["dp_shard"], plan.parallel.dp_shard);
    EXPECT_LE(layout["memory"]["total"], layout["available"]);
  }
  EXPECT_TRUE(found);
}

TEST_F(PlanCommandTest, GivenLayoutsAreCompared) {
  const Arguments compared = {"--model",       "llama3_1b",
                              "--devices",     "4xRTX4090",
                              "--seq",         "4096",
                              "--layout",      "dp_replicate=4",
                              "--layout",      "dp_shard=4",
                              "--layout",      "tp=4",
                              "--layout",      "pp=4,batch=1",
                              "--json",        path("plan.json"),
                              "--svg",         path("a.svg"),
                              "--batch",       "8",
                              "--local-batch", "2"};
  ASSERT_EQ(run(compared), 0) << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("\n2 of 4 layouts fit:\n"), HasSubstr("     missing\n  dp_replicate=4,batch=2 "),
                          HasSubstr("\nrecommended: tp=4,batch=2, "),
                          HasSubstr("    data parallelism: dp_replicate=4,batch=2 needs ")));
  const auto json = nlohmann::json::parse(read_file(path("plan.json")));
  ASSERT_EQ(json["layouts"].size(), 4U);  // in the given order, also in the picture
  EXPECT_FALSE(json["layouts"][0]["fits"]);
  EXPECT_EQ(json["layouts"][3]["layout"], "pp=4,batch=1");
  EXPECT_EQ(json["layouts"][3]["passes"], 8);
  const XmlElement svg = parse_xml(read_file(path("a.svg")));
  std::vector<std::string> kinds;
  double widest = 0;
  for (const XmlElement* part : elements_of(svg, "tspan")) {
    if (part->text.size() > 1 && !part->attributes.contains("dx")) kinds.push_back(part->text);
  }
  EXPECT_THAT(kinds, ElementsAre("data parallelism", "ZeRO-3", "tensor parallelism", "pipeline"));
  // In the first and longest bar, all parts together are as long as the total on the scale.
  for (const XmlElement* box : elements_of(svg, "rect")) {
    if (!box->attributes.contains("x") || box->number("y") > 120) continue;
    widest += box->number("width");
  }
  EXPECT_NEAR(widest, 870, 0.01);
  EXPECT_EQ(elements_of(svg, "title")[0]->text, "Peak memory of a rank: llama3_1b on 4 x RTX4090-24G (24.0 GiB)");
}

TEST_F(PlanCommandTest, ThePictureHasTheRowsOfTheTable) {
  const auto bars = [&] {
    int found = 0;
    for (const XmlElement* part : elements_of(parsed_, "tspan")) found += part->attributes.contains("dx") ? 1 : 0;
    return found;
  };
  ASSERT_EQ(run({"--model", "5M", "--devices", "4x2GiB", "--top", "5", "--svg", path("a.svg")}), 0) << error_;
  parsed_ = parse_xml(read_file(path("a.svg")));
  EXPECT_EQ(bars(), 5);
  // If no layout fits, it shows the nearest ones.
  EXPECT_EQ(run({"--model", "llama3_70b", "--devices", "2xRTX4090", "--top", "3", "--svg", path("b.svg")}), 1);
  parsed_ = parse_xml(read_file(path("b.svg")));
  EXPECT_EQ(bars(), 3);
  const std::string nearest = error_.substr(error_.find("no layout fits: ") + 16);
  EXPECT_THAT(read_file(path("b.svg")), HasSubstr(">" + nearest.substr(0, nearest.find(' ')) + "</tspan>"));
}

TEST_F(PlanCommandTest, AConfigurationIsAddedTo) {
  std::ofstream(path("run.toml")) << "[model]\nflavor = \"debug\"\n[training]\nseq_len = 32\nlocal_batch_size = 2\n"
                                     "[parallelism]\ntensor_parallel_degree = 2\n[optimizer]\nlr = 0.01\n";
  ASSERT_EQ(run({path("run.toml"), "--devices", "2x2GiB", "--training.seq_len", "64", "--toml", path("layout.toml")}),
            0)
      << error_;
  // The settings that differ from the file, and the layout.
  EXPECT_EQ(read_file(path("layout.toml")),
            "[training]\nlocal_batch_size = 2\nglobal_batch_size = 4\nseq_len = 64\n\n"
            "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 1\n"
            "tensor_parallel_degree = 1\npipeline_parallel_degree = 1\n\n[activation_checkpoint]\nmode = \"none\"\n");
}

TEST_F(PlanCommandTest, ADirectoryOfHuggingFaceIsAModel) {
  std::ofstream(path("config.json"))
      << R"({"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 4096})";
  ASSERT_EQ(run({"--model", folder(), "--devices", "2x2GiB"}), 0) << error_;
  EXPECT_THAT(out_, AllOf(HasSubstr("3 blocks of width 64"), HasSubstr("flavor = \"hf\"\nhf_assets_path = \"")));
}

// On this machine, with its free memory, the recommended layout runs.
TEST_F(PlanCommandTest, ThisMachineTrainsWhatIsRecommended) {
  std::ofstream tokens(path("tokens.bin"), std::ios::binary);
  for (int i = 0; i < 4000; ++i) {
    const auto id = static_cast<std::uint16_t>((i * 7 + i / 50) % 512);
    tokens.write(reinterpret_cast<const char*>(&id), sizeof id);
  }
  tokens.close();
  ASSERT_EQ(run({"--model", "debug", "--devices", "2xthis", "--seq", "32", "--local-batch", "2", "--toml",
                 path("layout.toml"), "--training.dataset_path", path("tokens.bin"), "--training.steps", "3",
                 "--lr_scheduler.warmup_steps", "1", "--job.dump_folder", path("run"), "--checkpoint.no-enable"}),
            0)
      << error_;
  EXPECT_THAT(out_, HasSubstr("2 x this node ("));
  ASSERT_EQ(phalanx("train -n 2 " + path("layout.toml")), 0) << read_file(path("err"));
  const auto record = nlohmann::json::parse(read_file(path("run/run.json")));
  EXPECT_EQ(record["memory"]["measured"].size(), 2U);
}

TEST_F(PlanCommandTest, WhatIsWrongIsRefused) {
  const Arguments model = {"--model", "5M"};
  const auto with = [&](Arguments more) {
    more.insert(more.begin(), model.begin(), model.end());
    return refusal(more);
  };
  EXPECT_THAT(with({}), HasSubstr("--devices is missing: expected such as 8xH100"));
  EXPECT_THAT(with({"--devices", "8xH1000"}), HasSubstr("no device 'H1000' is known (did you mean 'H100'?)"));
  EXPECT_THAT(with({"--devices", "8xH100", "--nodes", "3"}), HasSubstr("--nodes 3 does not divide"));
  EXPECT_THAT(with({"--devices", "8xH100", "--nodes", "none"}),
              HasSubstr("--nodes is 'none': expected a whole number"));
  EXPECT_THAT(with({"--devices", "8xH100", "--nodes", "0"}), HasSubstr("--nodes is 0: expected 1 or more"));
  EXPECT_THAT(with({"--devices", "H100", "--top", "2", "--top=3"}),
              HasSubstr("--top is given twice: expected it once"));
  EXPECT_THAT(with({"--devices"}), HasSubstr("--devices needs a value"));
  EXPECT_THAT(with({"--devices", "H100", "--localbatch", "2"}),
              HasSubstr("unknown option '--localbatch' (did you mean '--local-batch'?)"));
  EXPECT_THAT(with({"--devices", "H100", "--", "--top", "2"}), HasSubstr("unexpected argument '--'"));
  EXPECT_THAT(with({"--devices", "7xH100", "--batch", "16", "--schedule", "GPipe"}),
              HasSubstr("16 sequences a step cannot be shared out over 7 devices"));
  EXPECT_THAT(with({"--devices", "H100", "--batch", "0"}), HasSubstr("--batch is 0: expected 1 or more"));
  EXPECT_THAT(with({"--devices", "H100", "--headroom", "100"}), HasSubstr("from 0 to less than 100"));
  EXPECT_THAT(with({"--devices", "H100", "--dtype", "int8"}), HasSubstr("mixed_precision_param"));
  EXPECT_THAT(with({"--devices", "H100", "--training.seqlen", "8"}), HasSubstr("seq_len"));
  EXPECT_THAT(with({"--devices", "2xH100", "--layout", "dp_shard=4"}),
              HasSubstr("layout 'dp_shard=4' takes 4 ranks, but there are 2: give more, or smaller degrees"));
  EXPECT_THAT(with({"--devices", "2xH100", "--layout", "dp_shards=2"}),
              HasSubstr("'dp_shards=2' is not known (did you mean 'dp_shard'?)"));
  EXPECT_THAT(with({"--devices", "3xH100", "--layout", "tp=3"}), HasSubstr("tensor_parallel_degree"));
  EXPECT_THAT(with({"--devices", "2xH100", "--layout", "pp=2", "--schedule", "GPipe"}),
              HasSubstr("with --layout, name it there, as in pp=2,schedule=GPipe"));
  EXPECT_THAT(refusal({"--model", "5M", "--devices", "2xH100", "--svg", path("no/bars.svg")}, 1),
              HasSubstr("no/bars.svg"));
  EXPECT_THAT(refusal({"--model", "llama3_8", "--devices", "H100"}), HasSubstr("llama3_8b"));
  EXPECT_THAT(refusal({"--model", "meta-llama/Llama-3.1-8B", "--devices", "H100"}),
              AllOf(HasSubstr("Hugging Face hub, from which nothing is downloaded"), HasSubstr("llama3_8b")));
  for (const char* devices : {"8H100", "8*H100", "H100x8", "H100:8", "2x24GiB,8H100"}) {
    EXPECT_THAT(refusal({"--model", "5M", "--devices", devices}), HasSubstr("did you mean 8xH100?")) << devices;
  }
  EXPECT_THAT(refusal({"--model", path("nowhere/model"), "--devices", "H100"}),
              HasSubstr("is no directory: expected a Hug"));
  EXPECT_THAT(refusal({"--model", folder(), "--devices", "H100"}, 1), HasSubstr("config.json"));
  EXPECT_THAT(refusal({path("none.toml"), "--devices", "H100"}), HasSubstr("cannot read the configuration"));
  EXPECT_THAT(refusal({"--devices", "H100"}), HasSubstr("expected a configuration file"));
}

TEST_F(PlanCommandTest, WhereNothingFitsItSaysWhatComesNearest) {
  EXPECT_EQ(run({"--model", "llama3_70b", "--devices", "2xRTX4090"}), 1);
  EXPECT_THAT(out_, AllOf(HasSubstr("0 of "), Not(HasSubstr("recommended"))));
  EXPECT_THAT(error_, AllOf(HasSubstr("no layout fits: "), HasSubstr(" comes nearest and needs "),
                            HasSubstr("use more or larger devices")));
}

}  // namespace
}  // namespace phalanx::cli
