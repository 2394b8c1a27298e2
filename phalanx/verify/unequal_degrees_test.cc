// Experts, cut sequences and cut matrices whose degrees all differ: equal ones would hide a sum over the wrong group.
#include <mutex>

#include "phalanx/base/testing/case_sample.h"
#include "phalanx/train/testing/trainer_test_support.h"
#include "phalanx/verify/layout_check.h"

namespace phalanx::verify {
namespace {

using Keys = std::vector<std::string>;

class UnequalDegreesTest : public train::TrainerTest {
 protected:
  LayoutCheck check(int ranks, const Keys& more) {
    Keys keys = mixture(6);
    keys.insert(keys.end(), {"--training.dataset_path=" + path("tokens.bin"), "--training.seq_len=36",
                             "--training.local_batch_size=2", "--training.global_batch_size=8", "--training.steps=10",
                             "--lr_scheduler.warmup_steps=1"});
    keys.insert(keys.end(), more.begin(), more.end());
    const config::TrainConfig config = config::parse_config("", "test", keys);
    LayoutCheck result;
    run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
      LayoutCheck mine = check_layout(config, {.world = world}, {.steps = 2});
      if (world->rank() == 0) result = std::move(mine);
    });
    return result;
  }
};

TEST_F(UnequalDegreesTest, HaveOneRanksNumbers) {
  const Keys degrees = {"--parallelism.data_parallel_shard_degree=2", "--parallelism.context_parallel_degree=3",
                        "--parallelism.tensor_parallel_degree=2", "--parallelism.expert_parallel_degree=6"};
  const Keys ring = {"--parallelism.context_parallel_exchange=ring"},
             narrow = {"--training.mixed_precision_param=bfloat16"}, recomputed = {"--activation_checkpoint.mode=full"},
             accumulated = {"--training.local_batch_size=1"},
             losses = {"--training.moe_z_loss_coeff=0.1", "--training.moe_router_enable_expert_bias"};
  std::vector<Keys> cases;
  for (const Keys& exchange : {Keys{}, ring}) {
    for (const Keys& type : {Keys{}, narrow}) {
      for (const Keys& how : {losses, recomputed, accumulated}) {
        Keys keys = degrees;
        for (const Keys& some : {exchange, type, how}) keys.insert(keys.end(), some.begin(), some.end());
        cases.push_back(std::move(keys));
      }
    }
  }
  for (const Keys& keys : sampled(cases, 2)) {
    const LayoutCheck found = check(12, keys);
    EXPECT_FALSE(found.finding) << testing::PrintToString(keys) << ": " << found.finding->text();
  }
}

}  // namespace
}  // namespace phalanx::verify
