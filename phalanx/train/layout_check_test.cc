// Layouts held against one rank: none is found wrong that is right, and whatever is spoilt on the way is found.
#include "phalanx/train/layout_check.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "phalanx/comm/testing/mutated_backend.h"
#include "phalanx/train/trainer_test_support.h"

namespace phalanx::train {
namespace {

using ::testing::HasSubstr;

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
  LayoutCheck check(const Layout& layout, const std::optional<Mutation>& mutation = {}, std::int64_t steps = 2) const {
    LayoutCheck result;
    std::mutex mutex;
    std::vector<std::string> texts;
    run_local_ranks(layout.ranks, [&](const std::shared_ptr<Communicator>& world) {
      LayoutCheck mine = check_layout(config_of(layout),
                                      {.world = world, .layout_world = mutation ? mutated(world, *mutation) : nullptr},
                                      {.steps = steps});
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
    const LayoutCheck found = check(layout, {}, 5);
    EXPECT_FALSE(found.finding) << layout.name << ": " << found.finding->text();
    ASSERT_EQ(found.steps.size(), 5U);
    for (const StepCheck& step : found.steps) {
      EXPECT_GT(step.expected_loss, 1);
      EXPECT_EQ(step.gradients.size(), step.weights.size());
      EXPECT_GT(step.gradients.size(), 10U);
    }
  }
}

TEST_F(LayoutCheckTest, FindsWhatIsSpoiltOnTheWay) {
  using enum MutationKind;
  const auto named = [&](const std::string& name) {
    for (const Layout& layout : layouts()) {
      if (layout.name == name) return layout;
    }
    throw std::logic_error(name);
  };
  struct Spoilt {
    std::string layout;
    Mutation mutation;
    std::string what, cause;
  };
  const std::vector<Spoilt> cases = {
      {"ddp_2", {.kind = dropped}, "gradient", "not averaged over dp_replicate"},
      {"ddp_2", {.kind = dropped, .rank = 1}, "gradient", ""},
      {"ddp_2", {.kind = doubled}, "gradient", "2 times too large"},
      {"ddp_4", {.kind = doubled, .rank = 3}, "gradient", "twice as large"},
      {"ddp_2", {.kind = halved}, "gradient", "2 times too small"},
      {"ddp_2", {.kind = stale}, "gradient", "stale"},
      {"ddp_4", {.kind = zeroed, .rank = 2}, "gradient", "it is zero"},
      {"ddp_4", {.kind = one_off, .rank = 1}, "gradient", "no simple mistake"},
      {"ddp_2", {.kind = swapped}, "gradient", ""},
      {"zero3_2", {.kind = doubled, .verb = Verb::reduce_scatter}, "gradient", "2 times too large"},
      {"zero3_2", {.kind = stale, .verb = Verb::reduce_scatter}, "gradient", ""},
      {"zero3_2", {.kind = zeroed, .verb = Verb::reduce_scatter, .rank = 1}, "gradient", "it is zero"},
      {"zero3_2", {.kind = swapped, .verb = Verb::all_gather}, "gradient", ""},
      {"zero3_2", {.kind = stale, .verb = Verb::all_gather}, "gradient", ""},
      {"zero2_2", {.kind = halved, .verb = Verb::reduce_scatter}, "gradient", "2 times too small"},
      {"zero1_2", {.kind = one_off, .verb = Verb::all_gather, .rank = 0}, "gradient", ""},
      {"hsdp_2x2", {.kind = dropped, .group = "dp_replicate"}, "gradient", "not averaged over dp_replicate"},
      {"hsdp_2x2", {.kind = doubled, .group = "dp_replicate", .rank = 1}, "gradient", "2 times too large"},
      {"hsdp_2x2",
       {.kind = halved, .verb = Verb::reduce_scatter, .group = "dp_shard"},
       "gradient",
       "2 times too small"},
      {"tp_2", {.kind = dropped, .verb = Verb::reduce_scatter}, "gradient", ""},
      {"tp_2", {.kind = doubled, .verb = Verb::reduce_scatter, .rank = 1}, "gradient", ""},
      {"tp_2", {.kind = swapped, .verb = Verb::all_gather}, "gradient", ""},
      {"tp_2", {.kind = stale, .verb = Verb::all_gather, .rank = 0}, "gradient", ""},
      {"tp_2", {.kind = dropped, .only_elements = 64}, "gradient", "not summed over tp"},  // norms' gradients
      {"tp_2_whole_tokens", {.kind = dropped}, "gradient", ""},
      {"tp_4_tied", {.kind = halved, .verb = Verb::reduce_scatter}, "gradient", ""},
      {"ddp_2_tp_2", {.kind = dropped, .group = "dp_replicate"}, "gradient", "not averaged over dp_replicate"},
      {"zero3_2_tp_2",
       {.kind = doubled, .verb = Verb::reduce_scatter, .group = "dp_shard"},
       "gradient",
       "2 times too large"},
      {"zero3_2_tp_2", {.kind = zeroed, .verb = Verb::all_gather, .group = "tp", .rank = 1}, "gradient", ""},
      {"pp_2_ddp_2_zb1p", {.kind = dropped, .group = "dp_replicate"}, "gradient", "not averaged over dp_replicate"},
      {"pp_2_ddp_2_zb1p", {.kind = doubled, .group = "dp_replicate"}, "gradient", "2 times too large"},
      {"pp_2_tp_2", {.kind = halved, .verb = Verb::reduce_scatter, .group = "tp"}, "gradient", ""},
  };
  for (const Spoilt& one : cases) {
    SCOPED_TRACE(fmt::format("{}: kind {}, verb {}, rank {}", one.layout, static_cast<int>(one.mutation.kind),
                             static_cast<int>(one.mutation.verb), one.mutation.rank));
    const LayoutCheck found = check(named(one.layout), one.mutation);
    if (!found.finding) {
      ADD_FAILURE() << "not found";
      continue;
    }
    EXPECT_EQ(found.finding->what, one.what) << found.finding->text();
    EXPECT_FALSE(found.finding->parameter.empty());
    EXPECT_THAT(found.finding->cause, HasSubstr(one.cause)) << found.finding->text();
    // Where one rank alone is wrong, it is named; wrong weights or activations spoil what others compute, too.
    if (one.mutation.rank >= 0 && one.mutation.group.empty() && one.mutation.verb != Verb::all_gather &&
        !one.layout.starts_with("tp")) {
      EXPECT_EQ(found.finding->rank, one.mutation.rank) << found.finding->text();
    }
  }
}

}  // namespace
}  // namespace phalanx::train
