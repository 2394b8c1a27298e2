// 16-bit matrix products, loss scaling, and steps that are skipped.
#include <atomic>
#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/train/model/precision.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

class TrainerPrecisionTest : public TrainerTest {
 protected:
  static std::vector<std::string> in_float16(std::vector<std::string> more = {}) {
    more.insert(more.begin(), "--training.mixed_precision_param=float16");
    return more;
  }
  std::vector<std::int64_t> skipped_steps(const std::string& run) const {
    std::vector<std::int64_t> steps;
    for (const auto& line : lines_with(run, "skipped")) steps.push_back(line["step"].get<std::int64_t>());
    return steps;
  }
};

TEST_F(TrainerPrecisionTest, TrainsInSixteenBits) {
  train(config("float32", {"--training.steps=14"}), 1);
  const auto exact = losses("float32");
  for (const std::string type : {"bfloat16", "float16"}) {
    train(config(type, {"--training.steps=14", "--training.mixed_precision_param=" + type}), 1);
    const auto found = losses(type);
    ASSERT_EQ(found.size(), exact.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], exact[i], 0.01 * exact[i]) << type << " " << i;
  }
  EXPECT_EQ(values_of("float16", "loss_scale"), std::vector<double>(14, 65536));
  EXPECT_TRUE(lines_with("bfloat16", "loss_scale").empty());
}

TEST_F(TrainerPrecisionTest, AnOverflowSkipsTheStepOnAllRanksAndHalvesTheScale) {
  const std::string huge = "--training.initial_loss_scale=268435456";  // 2^28: no gradient fits into float16
  const Weights untouched = train(config("start", {"--training.steps=1", "--optimizer.lr=0"}), 2);
  EXPECT_EQ(train(config("one", in_float16({"--training.steps=1", huge})), 2), untouched);
  EXPECT_EQ(skipped_steps("one"), std::vector<std::int64_t>{1});
  EXPECT_TRUE(lines_with("one", "skipped")[0]["grad_norm"].is_null());  // not finite
  EXPECT_TRUE(std::isfinite(losses("one")[0]));

  EXPECT_NE(train(config("many", in_float16({"--training.steps=16", huge})), 2), untouched);
  const auto skipped = skipped_steps("many");
  const auto scales = values_of("many", "loss_scale");
  ASSERT_GE(skipped.size(), 1U);
  ASSERT_LT(skipped.size(), 16U);
  EXPECT_EQ(skipped[0], 1);
  ASSERT_EQ(scales.size(), 16U);
  for (std::size_t i = 1; i < scales.size(); ++i) {
    const bool was_skipped = std::ranges::find(skipped, static_cast<std::int64_t>(i)) != skipped.end();
    EXPECT_EQ(scales[i], was_skipped ? scales[i - 1] / 2 : scales[i - 1]) << i;
  }
  EXPECT_LT(losses("many").back(), losses("many").front());
}

TEST_F(TrainerPrecisionTest, ShardedUnitsAreGatheredInSixteenBits) {
  const auto sharded = [](int stage, const std::string& type, const std::string& reduce) {
    return std::vector<std::string>{"--training.steps=14", "--parallelism.data_parallel_shard_degree=-1",
                                    "--parallelism.zero_stage=" + std::to_string(stage),
                                    "--training.mixed_precision_param=" + type,
                                    "--training.mixed_precision_reduce=" + reduce};
  };
  train(config("float32", sharded(3, "float32", "float32")), 2);
  const auto exact = losses("float32");
  std::vector<std::tuple<int, std::string, std::string>> all;
  for (const int stage : {1, 3}) {
    for (const std::string type : {"bfloat16", "float16"}) {
      for (const std::string& reduce : {std::string("float32"), type}) all.emplace_back(stage, type, reduce);
    }
  }
  for (const auto& [stage, type, reduce] : sampled(all, 2)) {
    const std::string name = std::to_string(stage) + type + reduce;
    train(config(name, sharded(stage, type, reduce)), 2);
    const auto found = losses(name);
    ASSERT_EQ(found.size(), exact.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], exact[i], 0.01 * exact[i]) << name;
    EXPECT_NE(found, exact);
  }
}

TEST_F(TrainerPrecisionTest, StagesOfAPipelineInSixteenBits) {
  train(config("float32", {"--training.steps=10"}), 1);
  const auto exact = losses("float32");
  for (const std::string type : {"bfloat16", "float16"}) {
    for (const int shards : sampled(std::vector<int>{1, 2}, 1)) {
      const std::string name = "pp2_" + std::to_string(shards) + type;
      SCOPED_TRACE(name);
      train(config(name, {"--training.steps=10", "--parallelism.pipeline_parallel_degree=2",
                          "--parallelism.data_parallel_shard_degree=" + std::to_string(shards),
                          "--training.mixed_precision_param=" + type}),
            2 * shards);
      const auto found = losses(name);
      ASSERT_EQ(found.size(), exact.size());
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], exact[i], 0.01 * exact[i]);
      EXPECT_NE(found, exact);
      if (type == "float16") {
        EXPECT_EQ(values_of(name, "loss_scale"), std::vector<double>(10, 65536));
      }
    }
  }
  // Copies of a tied matrix, whose gradients are summed between stages in float32.
  const std::vector<std::string> tied = {"--training.steps=10", "--model.tie_embeddings"};
  train(config("tied", tied), 1);
  auto stages = tied;
  for (const char* key : {"--parallelism.pipeline_parallel_degree=2", "--parallelism.data_parallel_shard_degree=2",
                          "--training.mixed_precision_param=bfloat16"}) {
    stages.emplace_back(key);
  }
  train(config("tied_stages", stages), 4);
  const auto one = losses("tied"), found = losses("tied_stages");
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(found[i], one[i], 0.01 * one[i]) << i;
  const auto one_norms = values_of("tied", "grad_norm"), norms = values_of("tied_stages", "grad_norm");
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(norms[i], one_norms[i], 0.02 * one_norms[i]) << i;
  const std::vector<std::string> huge = in_float16(
      {"--training.steps=1", "--training.initial_loss_scale=268435456", "--parallelism.pipeline_parallel_degree=2"});
  train(config("huge", huge), 2);
  EXPECT_EQ(skipped_steps("huge"), std::vector<std::int64_t>{1});
}

TEST_F(TrainerPrecisionTest, AnOverflowOfOneShardSkipsTheStepOnAllRanks) {
  const std::vector<std::string> keys = {"--training.steps=1", "--parallelism.data_parallel_shard_degree=-1"};
  auto still = keys, huge = in_float16(keys);
  still.emplace_back("--optimizer.lr=0");
  huge.emplace_back("--training.initial_loss_scale=268435456");
  const Weights untouched = train(config("start", still), 2);
  EXPECT_EQ(train(config("one", huge), 2), untouched);
  EXPECT_EQ(skipped_steps("one"), std::vector<std::int64_t>{1});
  huge[1] = "--training.steps=12";  // training begins when the scale is low enough
  EXPECT_NE(train(config("many", huge), 2), untouched);
  EXPECT_LT(skipped_steps("many").size(), 12U);
}

TEST_F(TrainerPrecisionTest, WhereShardsLieAndWhoKeepsUnitsChangesNoBit) {
  const std::vector<std::string> keys = {"--training.local_batch_size=2",
                                         "--parallelism.data_parallel_shard_degree=-1"};
  const Weights plain = train(config("plain", keys), 4);
  for (const std::string more : {"--training.enable_cpu_offload", "--parallelism.fsdp_reshard_after_forward=2"}) {
    auto with = keys;
    with.push_back(more);
    EXPECT_EQ(train(config(more.substr(2), with), 4), plain) << more;
    EXPECT_EQ(losses(more.substr(2)), losses("plain"));
  }
}

TEST_F(TrainerPrecisionTest, ARunGoesOnWithTheScaleThatItHad) {
  const auto keys = in_float16({"--training.initial_loss_scale=1024", "--training.loss_scale_window=3"});
  const Weights whole = train(config("whole", keys), 2);
  EXPECT_EQ(values_of("whole", "loss_scale")[11], 8192);
  train(config("parts", keys), 2,
        [asked = std::make_shared<std::atomic<int>>(0)](int) { return asked->fetch_add(1) / 2 >= 4; });
  EXPECT_EQ(result_.step, 5);
  EXPECT_EQ(train(config("parts", keys), 2), whole);
  EXPECT_EQ(values_of("parts", "loss_scale"), values_of("whole", "loss_scale"));
  // A run in another precision loads everything else.
  train(config("parts", {"--training.steps=13"}), 1);
  EXPECT_EQ(result_.step, 13);
  train(config("parts", in_float16({"--training.steps=14"})), 1);
  EXPECT_EQ(values_of("parts", "loss_scale").back(), 65536);
}

TEST_F(TrainerPrecisionTest, GradientsThatAreNotFiniteAtAnyScaleEndTheRun) {
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    Trainer trainer(config("run", in_float16({"--training.steps=1000", "--training.initial_loss_scale=1"})),
                    {.world = world, .quiet = true});
    trainer.model().output->weight.register_hook([](const at::Tensor& grad) { return grad.mul(NAN); });
    EXPECT_THAT(error_text([&] { trainer.run(); }),
                AllOf(HasSubstr("loss scaler: the gradients are not finite"), HasSubstr("smallest")));
  });
}

}  // namespace
}  // namespace phalanx::train
