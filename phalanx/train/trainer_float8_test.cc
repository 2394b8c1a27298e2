// Linear layers in float8: which they are, their losses beside bfloat16's, and that every layout has one rank's.
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <cmath>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/config/model_config.h"
#include "phalanx/train/model/float8_layers.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train::float8_test {
namespace {

class TrainerFloat8Test : public TrainerTest {
 protected:
  static std::vector<std::string> bfloat16(std::vector<std::string> more = {}) {
    more.insert(more.begin(), "--training.mixed_precision_param=bfloat16");
    return more;
  }
  static std::vector<std::string> float8(const std::string& recipe, std::vector<std::string> more = {}) {
    more.insert(more.begin(),
                {"--model.converters=quantize.linear.float8", "--quantize.linear.float8.recipe_name=" + recipe});
    return bfloat16(std::move(more));
  }
  static double mean_of_last(const std::vector<double>& values, std::size_t count) {
    double sum = 0;
    for (std::size_t i = values.size() - count; i < values.size(); ++i) sum += values[i];
    return sum / static_cast<double>(count);
  }
  void expect_close(const std::vector<double>& found, const std::vector<double>& expected, double tolerance) {
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << i;
  }
};

// `make float8` takes 200 steps.
TEST_F(TrainerFloat8Test, LossesAreNearThoseInBfloat16) {
  const bool is_long = takes_all_cases();
  const std::string steps = is_long ? "--training.steps=200" : "--training.steps=40";
  const std::size_t last = is_long ? 20 : 10;
  train(config("bf16", bfloat16({steps})), 1);
  const auto expected = losses("bf16");
  for (const std::string recipe : {"tensorwise", "rowwise"}) {
    train(config(recipe, float8(recipe, {steps})), 1);
    const auto found = losses(recipe);
    EXPECT_NE(found, expected);
    if (!is_long) expect_close(found, expected, 0.02);
    const double mean = mean_of_last(found, last), mean_expected = mean_of_last(expected, last);
    EXPECT_NEAR(mean, mean_expected, 0.005 * mean_expected) << recipe;
    fmt::print("{}: {:+.2f} % of bfloat16's loss\n", recipe, 100 * (mean / mean_expected - 1));
  }
  EXPECT_NE(losses("tensorwise"), losses("rowwise"));
}

TEST_F(TrainerFloat8Test, LayoutsHaveTheLossesOfOneRank) {
  const std::vector<Layout> layouts = {
      {"recomputed", 1, 1, 1, {"--activation_checkpoint.mode=full"}},
      {"op", 1, 1, 1, {"--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"}},
      {"ddp", 2},
      {"zero1", 2, 1, 1, sharded(1)},
      {"zero3", 2, 1, 1, sharded(3)},
      {"tp", 2, 2},
      {"tp_plain", 2, 2, 1, {"--parallelism.no-enable_sequence_parallel"}},
      {"tp_apart", 2, 2, 1, {"--parallelism.no-enable_async_tensor_parallel"}},
      {"zero3_tp", 4, 2, 1, sharded(3, 2)},
      {"pp", 2, 1, 2},
      {"pp_zero_bubble", 2, 1, 2, {"--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"}}};
  for (const std::string recipe : {"tensorwise", "rowwise"}) {
    const auto keys = float8(recipe, {"--model.ffn_hidden=192"});  // of which each of two ranks has a multiple of 16
    train(config_of({"one"}, "one_" + recipe, keys), 1);
    const auto expected = losses("one_" + recipe);
    // Scales of rows are cut over ranks in other ways than one for all.
    std::vector<Layout> those = layouts;
    std::erase_if(those, [&](const Layout& one) {
      return recipe == "rowwise" && !one.name.starts_with("tp") && !one.name.starts_with("zero3");
    });
    for (const Layout& layout : sampled(those, 2)) {
      SCOPED_TRACE(layout.name + " " + recipe);
      const std::string run = layout.name + "_" + recipe;
      train(config_of(layout, run, keys), layout.ranks);
      const auto found = losses(run);
      if (layout.name == "recomputed" || layout.name == "op") {
        EXPECT_EQ(found, expected);
      } else {
        expect_close(found, expected, 0.01);
        EXPECT_NEAR(found[0], expected[0], 1e-3 * expected[0]);
      }
    }
  }
}

TEST_F(TrainerFloat8Test, LayersAreChosenByTheirSizesAndNames) {
  const auto text_of = [&](std::vector<std::string> more) {
    const auto c = config("x", float8("rowwise", std::move(more)));
    const models::Llama model(config::model_config(c), nn::TensorOptionsOfModule{.without_memory = true});
    return float8_text(model, c, at::kCPU);
  };
  const std::string all = text_of({});
  EXPECT_THAT(all, HasSubstr("rowwise, emulated by float32 products (slow), "));
  EXPECT_THAT(all, HasSubstr("layers.*.attention.wk, layers.*.attention.wo, layers.*.attention.wq, "
                             "layers.*.attention.wv, layers.*.feed_forward.w1, "));
  EXPECT_THAT(all, HasSubstr("; in bfloat16: output (the output)"));
  const std::string some = text_of({"--quantize.linear.float8.filter_fqns=attention.wk,nonesuch"});
  EXPECT_THAT(some, HasSubstr("layers.*.attention.wk (filter_fqns has \"attention.wk\")"));
  EXPECT_THAT(some, HasSubstr("filter_fqns has \"nonesuch\", which is in no layer's name"));
  EXPECT_THAT(text_of({"--model.ffn_hidden=200"}), HasSubstr("200 x 64: a size is no multiple of 16"));
  EXPECT_THAT(text_of({"--quantize.linear.float8.filter_fqns=layers"}), HasSubstr(": none; in bfloat16: "));
}

TEST_F(TrainerFloat8Test, LayersInBothPrecisionsTrainTogether) {
  train(config("bf16", bfloat16()), 1);
  train(config("all", float8("tensorwise")), 1);
  const std::vector<std::string> filters = {"attention.wk", "attention.wo", "w1",          "w2",
                                            "layers.0",     "attention",    "feed_forward"};
  for (const std::string& filter : sampled(filters, 3)) {
    const std::vector<std::string> keys = {"--quantize.linear.float8.filter_fqns=" + filter};
    train(config(filter, float8("tensorwise", keys)), 1);
    EXPECT_NE(losses(filter), losses("bf16")) << filter;
    EXPECT_NE(losses(filter), losses("all")) << filter;
    expect_close(losses(filter), losses("bf16"), 0.02);
  }
  train(config("none", float8("tensorwise", {"--quantize.linear.float8.filter_fqns=layers"})), 1);
  EXPECT_EQ(losses("none"), losses("bf16"));
}

TEST_F(TrainerFloat8Test, PartsOfARankMustFitTheProducts) {
  const auto keys = float8("tensorwise", {"--parallelism.tensor_parallel_degree=2", "--model.ffn_hidden=176"});
  EXPECT_THAT(refusal<ConfigError>(config("tp", keys), 2),
              HasSubstr("tensor_parallel_degree = 2 leaves 88 x 64 of 'layers.0.feed_forward.w1' to a rank: expected "
                        "multiples of 16"));
}

TEST_F(TrainerFloat8Test, AResumedRunMayChangeTheRecipeAndSaysSo) {
  train(config("run", float8("tensorwise", {"--training.steps=6"})), 1);
  train(config("run", float8("rowwise")), 1);
  EXPECT_EQ(result_.step, 12);
  std::ifstream file(path("run") + "/run.json");
  const std::string record((std::istreambuf_iterator<char>(file)), {});
  EXPECT_THAT(record, HasSubstr("[quantize.linear.float8] recipe_name"));
}

TEST_F(TrainerFloat8Test, AGradientThatIsNotFiniteEndsTheRun) {
  const auto keys =
      float8("tensorwise", {"--optimizer.lr=1e30", "--training.max_norm=0", "--lr_scheduler.warmup_steps=0"});
  EXPECT_THAT(refusal<Error>(config("run", keys)), HasSubstr("the gradient norm is nan"));
}

}  // namespace
}  // namespace phalanx::train::float8_test
