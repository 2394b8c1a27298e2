// Runs the examples of pages that have a name.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <string>

#include "phalanx/base/temp_directory.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/optim/adamw.h"

namespace {

std::atomic<int> printed = 0;
void print(double stall_seconds) { printed += stall_seconds >= 0; }

}  // namespace

#include "run_snippets.h"

namespace phalanx {
namespace {

/// A Linear whose weights are `value`, and the optimizer that has stepped it once.
struct Trained {
  explicit Trained(float value) {
    model->weight.data().fill_(value);
    model->weight.mutable_grad() = at::full({2, 3}, value);
    optimizer.step(0.1);
  }
  std::shared_ptr<nn::Linear> model =
      std::make_shared<nn::Linear>(nn::LinearOptions{.in_features = 3, .out_features = 2});
  AdamW optimizer{nn::named_parameters(*model)};
};

void save_and_load_on(int ranks) {
  const TempDirectory scratch("snippets");
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(scratch.path());
  run_local_ranks(ranks, [](const std::shared_ptr<Communicator>& comm) {
    Trained first(1.0F), second(2.0F);
    ASSERT_FALSE(first.model->weight.equal(second.model->weight));
    std::int64_t step = 7;
    save_and_load(first.model, first.optimizer, comm, step);
    EXPECT_EQ(step, 7);  // there was nothing to load

    step = 0;
    save_and_load(second.model, second.optimizer, comm, step);
    EXPECT_EQ(step, 7);
    EXPECT_TRUE(first.model->weight.equal(second.model->weight));
    TrainState one, other;
    first.optimizer.collect_state(one);
    second.optimizer.collect_state(other);
    ASSERT_EQ(one.tensors.size(), other.tensors.size());
    for (std::size_t i = 0; i < one.tensors.size(); ++i)
      EXPECT_TRUE(one.tensors[i].tensor.equal(other.tensors[i].tensor)) << one.tensors[i].name;
  });
  EXPECT_EQ(printed.exchange(0), 2 * ranks);  // how long each background save stalled
  EXPECT_TRUE(std::filesystem::exists("run/checkpoint/step-7/manifest.json"));
  std::filesystem::current_path(before);
}

TEST(Snippets, TheCheckpointPageSavesAndLoadsOnOneRank) { save_and_load_on(1); }
TEST(Snippets, TheCheckpointPageSavesAndLoadsOnTwoRanks) { save_and_load_on(2); }

}  // namespace
}  // namespace phalanx
