// Muon, Lion, averages of weights and the z-loss in runs of every kind of layout.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <cstring>
#include <set>

#include "phalanx/base/file.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train::trainer_optimizers_test {
namespace {

using Flags = std::vector<std::string>;

Flags operator+(Flags a, const Flags& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const Flags kMuon = {"--optimizer.name=Muon", "--muon.lr=0.02"};
const Flags kAverage = {"--ema.decay=0.5", "--ema.start_step=1", "--ema.update_every=2"};

class TrainerOptimizersTest : public TrainerTest {
 protected:
  static std::vector<Layout> layouts() {
    return {{.name = "one"},
            {.name = "ddp", .ranks = 2},
            {.name = "zero1", .ranks = 2, .keys = sharded(1)},
            {.name = "zero3", .ranks = 2, .keys = sharded(3)},
            {.name = "zero3_tp", .ranks = 4, .tp = 2, .keys = sharded(3, 2)},
            {.name = "pp_tied", .ranks = 2, .pp = 2, .keys = {"--model.tie_embeddings"}},
            {.name = "pp_ddp", .ranks = 4, .pp = 2}};
  }

  std::map<std::string, std::string> files_of(const std::string& run, int step) const {
    std::map<std::string, std::string> files;
    for (const auto& entry :
         std::filesystem::directory_iterator(path(run) + "/checkpoint/step-" + std::to_string(step))) {
      files[entry.path().filename().string()] = read_file(entry.path());
    }
    return files;
  }
  /// Makes a run's folder that holds only what another one has saved after a step.
  void copy_step(const std::string& from, const std::string& run, int step) const {
    const std::string folder = "/checkpoint/step-" + std::to_string(step);
    std::filesystem::create_directories(path(run) + "/checkpoint");
    std::filesystem::copy(path(from) + folder, path(run) + folder);
  }
};

TEST_F(TrainerOptimizersTest, MuonAndAveragesResumeWithTheSameBitsAndIntoOtherLayouts) {
  const Flags keys =
      kMuon + kAverage +
      Flags{"--training.steps=6", "--checkpoint.interval=3", "--validation.freq=6", "--ema.use_in_validation"};
  std::vector<double> expected;
  double validated = 0;
  for (const Layout& layout : first_and_sampled(layouts(), 3)) {
    const Weights whole = train(config_of(layout, layout.name, keys), layout.ranks);
    if (layout.name == "one") {
      expected = losses("one");
      validated = *result_.validation_loss;
    }
    copy_step(layout.name, layout.name + "_again", 3);
    EXPECT_EQ(train(config_of(layout, layout.name + "_again", keys), layout.ranks), whole) << layout.name;
    EXPECT_EQ(files_of(layout.name, 6), files_of(layout.name + "_again", 6)) << layout.name;
    if (layout.name == "pp_tied") continue;  // another model
    // Rounding in bfloat16 decides more than in AdamW: gradients that differ in the last bit make other updates.
    const std::vector<double> found = losses(layout.name);
    for (std::size_t i = 0; i < found.size(); ++i)
      EXPECT_NEAR(found[i], expected[i], 2e-3 * expected[i]) << layout.name;
    EXPECT_NEAR(*result_.validation_loss, validated, 2e-3 * validated) << layout.name;
    copy_step("one", "one_as_" + layout.name, 3);
    train(config_of(layout, "one_as_" + layout.name, keys), layout.ranks);
    EXPECT_NEAR(losses("one_as_" + layout.name).back(), expected.back(), 2e-3 * expected.back()) << layout.name;
    EXPECT_NEAR(*result_.validation_loss, validated, 2e-3 * validated) << layout.name;
  }
  EXPECT_LT(expected.back(), expected.front() - 0.05);  // it learns
}

TEST_F(TrainerOptimizersTest, LionResumesWithTheSameBitsAndInOtherLayouts) {
  const Flags keys = {"--optimizer.name=Lion",  "--optimizer.lr=1e-3",          "--optimizer.weight_decay=0.5",
                      "--optimizer.beta2=0.99", "--training.steps=6",           "--checkpoint.interval=3",
                      "--validation.no-enable", "--lr_scheduler.warmup_steps=0"};
  std::vector<double> expected;
  for (const Layout& layout : first_and_sampled(layouts(), 3)) {
    SCOPED_TRACE(layout.name);
    const Weights whole = train(config_of(layout, layout.name, keys), layout.ranks);
    if (layout.name == "one") expected = losses("one");
    copy_step(layout.name, layout.name + "_again", 3);
    EXPECT_EQ(train(config_of(layout, layout.name + "_again", keys), layout.ranks), whole);
    if (layout.name == "pp_tied") continue;  // another model
    copy_step("one", "one_as_" + layout.name, 3);
    train(config_of(layout, "one_as_" + layout.name, keys), layout.ranks);
    // Rounding decides the sign of a mean near 0: a few elements move by twice the rate.
    const std::vector<double> found = losses(layout.name);
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 2e-4 * expected[i]);
    EXPECT_NEAR(losses("one_as_" + layout.name).back(), expected.back(), 2e-4 * expected.back());
  }
  EXPECT_LT(expected.back(), expected.front() - 0.05);  // it learns
}

TEST_F(TrainerOptimizersTest, MuonTakesMatricesOfBlocksAndAdamWTheOthers) {
  const Flags keys = {"--training.steps=1", "--checkpoint.interval=1", "--validation.no-enable"};
  const auto names = [&](const std::string& run, const Flags& more) {
    train(config(run, kMuon + keys + more), 1);
    std::map<std::string, std::set<std::string>> kinds;
    for (const NamedTensor& one : state_in(run, 1).tensors) {
      if (!one.name.starts_with("optimizer.")) continue;
      const auto dot = one.name.rfind('.');
      kinds[one.name.substr(10, dot - 10)].insert(one.name.substr(dot + 1));
    }
    return kinds;
  };
  const std::set<std::string> muon = {"momentum_buffer"}, adamw = {"exp_avg", "exp_avg_sq", "step"};
  auto found = names("run", {});
  EXPECT_EQ(found.size(), 21U);
  for (const auto& [name, kinds] : found) {
    const bool is_matrix = name.starts_with("layers.") && name.find("norm") == name.npos;
    EXPECT_EQ(kinds, is_matrix ? muon : adamw) << name;
  }
  found = names("more", {"--muon.adamw_params=*.wo.weight"});
  EXPECT_EQ(found.at("layers.0.attention.wo.weight"), adamw);
  EXPECT_EQ(found.at("layers.0.attention.wq.weight"), muon);
  found = names("adapters", {"--lora.rank=2"});
  EXPECT_EQ(found.size(), 28U);
  for (const auto& [name, kinds] : found) EXPECT_EQ(kinds, muon) << name;
}

TEST_F(TrainerOptimizersTest, EveryKeyOfMuonCounts) {
  int runs = 0;
  const auto weights = [&](const Flags& more) {
    return train(config("keys" + std::to_string(runs++),
                        Flags{"--training.steps=2", "--validation.no-enable", "--metrics.no-enable_report"} + more),
                 1);
  };
  const Weights muon = weights(kMuon);
  EXPECT_NE(muon, weights({}));
  EXPECT_EQ(muon, weights(kMuon + Flags{"--muon.weight_decay=0.1", "--muon.adjust_lr_fn=original"}));
  EXPECT_EQ(weights({"--optimizer.name=Muon", "--muon.lr=3e-3"}), weights({"--optimizer.name=Muon"}));
  for (const char* flag :
       {"--muon.lr=0.01", "--muon.weight_decay=0.9", "--muon.momentum=0.5", "--muon.no-nesterov", "--muon.ns_steps=3",
        "--muon.ns_coefficients=2, -1.5, 0.5", "--muon.eps=1e3", "--muon.adjust_lr_fn=match_rms_adamw",
        "--muon.adamw_params=*.wo.*", "--optimizer.beta1=0.5", "--optimizer.lr=1e-3",
        R"(--optimizer.groups=[{params = ["*.wo.*"], lr_factor = 0.5}])", "--optimizer.no_decay=*.wo.*"}) {
    EXPECT_NE(weights(kMuon + Flags{flag}), muon) << flag;
  }
}

TEST_F(TrainerOptimizersTest, WhatMuonCannotDoIsNamed) {
  const auto error = [&](const Flags& more) { return refusal<ConfigError>(config("run", kMuon + more)); };
  EXPECT_THAT(error({"--muon.adamw_params=*.bias"}),
              HasSubstr("[muon] adamw_params: pattern '*.bias' matches none of the 21 parameters; the nearest is"));
  EXPECT_THAT(error({"--training.frozen=layers.*"}),
              HasSubstr("[optimizer] name is \"Muon\", but no matrix of a block is trained by it"));
}

TEST_F(TrainerOptimizersTest, TheAverageIsKeptBesideTheWeightsAndWrittenWhereAsked) {
  const Flags keys = {"--training.steps=5", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0",
                      "--checkpoint.last_save_in_hf", "--validation.no-enable"};
  const Weights plain = train(config("plain", keys), 1);
  EXPECT_EQ(train(config("run", kAverage + keys + Flags{"--ema.use_in_export"}), 1), plain);  // it changes no weight
  std::map<std::string, at::Tensor> average;
  for (int step = 1; step <= 5; ++step) {
    std::map<std::string, at::Tensor> state;
    for (const NamedTensor& one : state_in("run", step).tensors) state[one.name] = one.tensor;
    for (const auto& [name, tensor] : state) {
      if (!name.starts_with("ema.")) continue;
      const at::Tensor& weight = state.at("model." + name.substr(4));
      if (step == 1) average[name] = weight;
      if (step == 3 || step == 5) average[name] = average[name] * 0.5 + weight * 0.5;
      EXPECT_TRUE(at::allclose(tensor, average[name], 1e-6, 1e-7)) << name << ", " << step;
    }
    EXPECT_EQ(average.size(), 21U);
  }
  for (const std::string run : {"run", "plain"}) {
    const safetensors::File file(path(run) + "/hf/model.safetensors");
    const auto* info = file.find("model.norm.weight");
    ASSERT_NE(info, nullptr);
    at::Tensor found = at::empty(info->shape);
    std::memcpy(found.mutable_data_ptr(), file.bytes(*info).data(), found.nbytes());
    EXPECT_EQ(at::allclose(found, average.at("ema.norm.weight"), 1e-6, 1e-7), run == "run");
  }
}

TEST_F(TrainerOptimizersTest, TheAverageIsValidatedInEveryLayout) {
  std::map<bool, double> expected;  // of the average, of the weights
  std::vector<Layout> untied = layouts();
  std::erase_if(untied, [](const Layout& layout) { return layout.name == "pp_tied"; });  // another model
  for (const Layout& layout : first_and_sampled(untied, 2)) {
    for (const bool use : {true, false}) {
      const std::string run = layout.name + (use ? "_average" : "_weights");
      train(config_of(layout, run,
                      kAverage + Flags{"--training.steps=4", use ? "--ema.use_in_validation" : "--ema.decay=0.5"}),
            layout.ranks);
      expected.emplace(use, *result_.validation_loss);  // of one rank
      EXPECT_NEAR(*result_.validation_loss, expected[use], 2 * kLossTolerance * expected[use]) << run;
    }
  }
  EXPECT_GT(std::abs(expected[true] - expected[false]), 1e-3);
}

TEST_F(TrainerOptimizersTest, AnAverageBeginsWithItsRunAndEndsWithIt) {
  const Flags two = {"--training.steps=2", "--validation.no-enable"},
              three = {"--training.steps=3", "--validation.no-enable"};
  train(config("with", kAverage + two), 1);
  train(config("without", two), 1);
  EXPECT_THAT(
      refusal<CheckpointError>(config("with", three)),
      HasSubstr("ema.state: saved \"kept\", now not set: an average of the weights begins with a run and is kept"));
  EXPECT_THAT(refusal<CheckpointError>(config("without", kAverage + three)),
              HasSubstr("ema.state: saved not set, now \"kept\""));
}

TEST_F(TrainerOptimizersTest, TheZLossIsTrainedAndNotValidated) {
  for (const Layout& layout : sampled(layouts(), 3)) {
    const Flags keys = {"--training.steps=1", "--optimizer.lr=0"};
    train(config_of(layout, layout.name + "_plain", keys), layout.ranks);
    const double validated = *result_.validation_loss;
    train(config_of(layout, layout.name + "_z", keys + Flags{"--training.z_loss_weight=0.1"}), layout.ranks);
    EXPECT_EQ(*result_.validation_loss, validated) << layout.name;
    // Logits of a new model are small: log(sum(exp)) is about log(512) in every position.
    const double z = losses(layout.name + "_z")[0] - losses(layout.name + "_plain")[0];
    EXPECT_NEAR(z, 0.1 * std::pow(std::log(512), 2), 0.1) << layout.name;
  }
}

}  // namespace
}  // namespace phalanx::train::trainer_optimizers_test
