// Layouts held against one rank: none is found wrong that is right. layout_mutations_test.cc: what is wrong is found.
#include "phalanx/train/layout_check.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <mutex>

#include "phalanx/train/trainer_test_support.h"

namespace phalanx::train {
namespace {

TEST(TensorDifference, SaysHowFarAndWhere) {
  const at::Tensor expected = at::arange(6, at::TensorOptions(at::kFloat)).view({2, 3});
  at::Tensor found = expected.clone();
  EXPECT_EQ(difference_of(found, expected, 1).relative, 0);
  found[1][0] += 0.5;
  const TensorDifference d = difference_of(found, expected, 5, {10, 20});
  EXPECT_DOUBLE_EQ(d.relative, 0.1);
  EXPECT_EQ(d.index, (std::vector<std::int64_t>{11, 20}));
  EXPECT_DOUBLE_EQ(d.found, 3.5);
  EXPECT_DOUBLE_EQ(d.expected, 3);
  EXPECT_EQ(d.ulps, 1 << 21);  // of 2^23 numbers from 2 to 4
  found[0][1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(difference_of(found, expected, 5).relative, std::numeric_limits<double>::infinity());
  EXPECT_EQ(difference_of(found, expected, 5).index, (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(difference_of(expected, at::zeros_like(expected), 0).relative, std::numeric_limits<double>::infinity());
}

TEST(TensorDifference, CountsTheNumbersBetween) {
  EXPECT_EQ(ulps_between(1, 1), 0);
  EXPECT_EQ(ulps_between(0.0F, -0.0F), 0);
  EXPECT_EQ(ulps_between(1, std::nextafter(1.0F, 2.0F)), 1);
  const float least = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(ulps_between(-least, least), 2);
  EXPECT_EQ(ulps_between(std::numeric_limits<float>::quiet_NaN(), 0), std::numeric_limits<std::int64_t>::max());
}

class LayoutCheckTest : public TrainerTest {
 protected:
  struct Layout {
    std::string name;
    int ranks = 2;
    std::vector<std::string> keys = {};
  };
  static std::vector<std::string> degrees(int replicas, int shards, int stage = 3) {
    return {"--parallelism.data_parallel_replicate_degree=" + std::to_string(replicas),
            "--parallelism.data_parallel_shard_degree=" + std::to_string(shards),
            "--parallelism.zero_stage=" + std::to_string(stage)};
  }
  static std::vector<std::string> tensor(int degree, std::vector<std::string> more = {}) {
    more.push_back("--parallelism.tensor_parallel_degree=" + std::to_string(degree));
    return more;
  }
  static std::vector<std::string> pipeline(int degree, std::vector<std::string> more = {}) {
    more.push_back("--parallelism.pipeline_parallel_degree=" + std::to_string(degree));
    return more;
  }
  static std::vector<Layout> layouts() {
    return {{"ddp_2", 2},
            {"ddp_4", 4},
            {"zero1_2", 2, degrees(1, 2, 1)},
            {"zero2_2", 2, degrees(1, 2, 2)},
            {"zero3_2", 2, degrees(1, 2, 3)},
            {"hsdp_2x2", 4, degrees(2, 2, 3)},
            {"tp_2", 2, tensor(2)},
            {"tp_2_whole_tokens", 2, tensor(2, {"--parallelism.no-enable_sequence_parallel"})},
            {"tp_4_tied", 4, tensor(4, {"--model.tie_embeddings"})},
            {"ddp_2_tp_2", 4, tensor(2)},
            {"zero3_2_tp_2", 4, tensor(2, degrees(1, 2, 3))},
            {"pp_2", 2, pipeline(2)},
            {"pp_2_zbv", 2, pipeline(2, {"--parallelism.pipeline_parallel_schedule=ZBV"})},
            {"pp_2_ddp_2_zb1p", 4, pipeline(2, {"--parallelism.pipeline_parallel_schedule=ZB1P"})},
            {"pp_2_tp_2", 4, tensor(2, pipeline(2))},
            {"pp_2_zero3_2", 4, pipeline(2, degrees(1, 2, 3))},
            {"pp_2_zero2_2_zbv_tied", 4,
             pipeline(2, {"--parallelism.data_parallel_shard_degree=2", "--parallelism.zero_stage=2",
                          "--parallelism.pipeline_parallel_schedule=ZBV", "--model.tie_embeddings"})}};
  }

  TrainConfig config_of(const Layout& layout) const {
    std::vector<std::string> keys = {"--model.flavor=debug",           "--training.dataset_path=" + path("tokens.bin"),
                                     "--training.seq_len=32",          "--training.local_batch_size=1",
                                     "--training.global_batch_size=8", "--training.steps=10",
                                     "--lr_scheduler.warmup_steps=2",  "--optimizer.lr=3e-3"};
    keys.insert(keys.end(), layout.keys.begin(), layout.keys.end());
    return parse_config("", "test", keys);
  }

  /// Rank 0's result; all ranks must agree.
  LayoutCheck check(const Layout& layout, std::int64_t steps) const {
    LayoutCheck result;
    std::mutex mutex;
    std::vector<std::string> texts;
    run_local_ranks(layout.ranks, [&](const std::shared_ptr<Communicator>& world) {
      LayoutCheck mine = check_layout(config_of(layout), {.world = world}, {.steps = steps});
      const std::lock_guard lock(mutex);
      texts.push_back(mine.finding ? mine.finding->text() : "");
      if (world->rank() == 0) result = std::move(mine);
    });
    for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
    return result;
  }
};

TEST_F(LayoutCheckTest, RaisesNoAlarmWhereAllIsRight) {
  for (const Layout& layout : layouts()) {
    const LayoutCheck found = check(layout, 5);
    EXPECT_FALSE(found.finding) << layout.name << ": " << found.finding->text();
    ASSERT_EQ(found.steps.size(), 5U);
    for (const StepCheck& step : found.steps) {
      EXPECT_GT(step.expected_loss, 1);
      EXPECT_EQ(step.gradients.size(), step.weights.size());
      EXPECT_GT(step.gradients.size(), 10U);
    }
  }
}

}  // namespace
}  // namespace phalanx::train
