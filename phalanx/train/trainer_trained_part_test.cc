// Runs that train a part of their model: what checkpoints hold of them, from which layout to which they go on, and what
// is refused.
#include <ATen/ops/equal.h>

#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace trained_part_test {

class TrainedPartRunTest : public TrainerTest {
 protected:
  /// Of the saved state: what the optimizer has, without the moments' names.
  std::set<std::string> stepped_in(const std::string& run, int step) const {
    std::set<std::string> names;
    for (const NamedTensor& one : state_in(run, step).tensors) {
      const std::string begin = "optimizer.", end = ".exp_avg";
      if (one.name.starts_with(begin) && one.name.ends_with(end)) {
        names.insert(one.name.substr(begin.size(), one.name.size() - begin.size() - end.size()));
      }
    }
    return names;
  }
  static at::Tensor tensor_of(const TrainState& state, const std::string& name) {
    const auto found = std::ranges::find(state.tensors, name, &NamedTensor::name);
    EXPECT_NE(found, state.tensors.end()) << name;
    return found->tensor;
  }
  const std::vector<std::string> frozen_ = {"--training.frozen=tok_embeddings*,layers.0.*,*norm*",
                                            "--optimizer.no_decay=*norm*"};
  const std::vector<std::string> lora_ = {"--lora.rank=4", "--lora.dropout=0.1", "--lora.target_modules=q_proj,w[13]"};
};

TEST_F(TrainedPartRunTest, CheckpointsHoldFrozenWeightsAndTheStateOfTheTrainedOnes) {
  train(config("frozen", frozen_), 1);
  EXPECT_THAT(
      stepped_in("frozen", 12),
      ElementsAre("layers.1.attention.wk.weight", "layers.1.attention.wo.weight", "layers.1.attention.wq.weight",
                  "layers.1.attention.wv.weight", "layers.1.feed_forward.w1.weight", "layers.1.feed_forward.w2.weight",
                  "layers.1.feed_forward.w3.weight", "output.weight"));
  const TrainState state = state_in("frozen", 12);
  EXPECT_TRUE(tensor_of(state, "model.norm.weight").eq(1).all().item<bool>());
  train(config("lora", lora_), 1);
  for (const std::string& name : stepped_in("lora", 12)) EXPECT_THAT(name, HasSubstr(".lora_")) << name;
  EXPECT_EQ(stepped_in("lora", 12).size(), 12U);
  EXPECT_LT(losses("lora").back(), losses("lora").front());
}

TEST_F(TrainedPartRunTest, GoesOnInAnyLayout) {
  for (const auto& [run, keys] : {std::pair{"frozen", frozen_}, std::pair{"lora", lora_}}) {
    SCOPED_TRACE(run);
    train(config(run, keys), 1);
    const std::vector<Layout> layouts = {{.name = "zero3", .ranks = 2, .keys = sharded(3)},
                                         {.name = "tp2", .ranks = 2, .tp = 2},
                                         {.name = "pp2_zero3_2", .ranks = 4, .pp = 2, .keys = sharded(3, 2)},
                                         {.name = "ddp", .ranks = 2}};
    const std::string parts = run + std::string("-in-parts");
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      train(config_of(layouts[i], parts, keys), layouts[i].ranks, stop_after_first_step());
      EXPECT_EQ(result_.step, static_cast<std::int64_t>(i) + 1) << layouts[i].name;
    }
    const std::vector<double> whole = losses(run);
    expect_same_losses(losses(parts), {whole.begin(), whole.begin() + std::ssize(layouts)});
  }
}

TEST_F(TrainedPartRunTest, WrongPatternsAndChangesAreRefused) {
  EXPECT_THAT(refusal<ConfigError>(config("a", {"--training.frozen=layers.0.attention.q_proj*"})),
              AllOf(HasSubstr("[training] frozen: pattern 'layers.0.attention.q_proj*' matches none"),
                    HasSubstr("the nearest is 'layers.0.attention.")));
  EXPECT_THAT(refusal<ConfigError>(config("b", {"--training.frozen=*"})), HasSubstr("nothing is left to train"));
  EXPECT_FALSE(std::filesystem::exists(path("a")));  // refused before the run's folder is made
  EXPECT_THAT(refusal<ConfigError>(config("c", {"--lora.rank=4", "--lora.target_modules=q_porj"})),
              AllOf(HasSubstr("'q_porj' matches none"), HasSubstr("did you mean 'q_proj'?")));
  EXPECT_THAT(refusal<ConfigError>(config("d", {"--lora.rank=4", "--training.frozen=*lora*"})),
              HasSubstr("nothing is left to train"));
  train(config("e", frozen_), 1);
  EXPECT_THAT(refusal<CheckpointError>(config("e", {"--training.steps=14"})), HasSubstr("[training] frozen: saved"));
  train(config("f", lora_), 1);
  EXPECT_THAT(refusal<CheckpointError>(config("f", {"--training.steps=14", "--lora.rank=8", lora_[1], lora_[2]})),
              HasSubstr("[lora] rank: saved 4, now 8"));
}

}  // namespace trained_part_test
}  // namespace phalanx::train
