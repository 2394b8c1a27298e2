// [debug] replica_check_freq: a bit that flips on one rank of a run is found at the next check, in every layout.
#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

class ReplicaCheckRunTest : public TrainerTest {
 protected:
  /// The error of a run in which `rank` flips a bit of its part of `name` before a step, from 1.
  std::string message_of_run(const config::TrainConfig& config, int ranks, int rank, const std::string& name,
                             int step = 1) {
    std::string message;
    run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
      std::unique_ptr<Trainer> trainer;
      int calls = 0;
      const auto between = [&] {
        if (world->rank() != rank || ++calls != step) return false;
        for (const NamedTensor& held : trainer->collect_state().tensors) {
          if (held.name != name) continue;
          EXPECT_GT(held.tensor.numel(), 0);
          static_cast<unsigned char*>(held.tensor.data_ptr())[1] ^= 4U;
        }
        return false;
      };
      trainer =
          std::make_unique<Trainer>(config, TrainerContext{.world = world, .stop_requested = between, .quiet = true});
      try {
        trainer->run();
      } catch (const Error& error) {
        if (world->rank() == 0) message = error.what();
      }
    });
    return message;
  }
};

TEST_F(ReplicaCheckRunTest, EveryLayoutPassesAndTellsAFlippedBit) {
  struct Case {
    Layout layout;
    int rank;
    std::string name, ranks;
  };
  const std::vector<std::string> two_copies = sharded(3, 2), zero2 = sharded(2, 2);
  for (const Case& c : {
           Case{{.name = "ddp", .ranks = 3}, 1, "layers.0.attention_norm.weight", "ranks 0, 2 have "},
           Case{{.name = "hsdp", .ranks = 4, .keys = two_copies}, 2, "tok_embeddings.weight", "rank 0 has "},
           Case{{.name = "zero2", .ranks = 4, .keys = zero2}, 3, "output.weight", "rank 1 has "},
           Case{{.name = "tp", .ranks = 2, .tp = 2}, 1, "norm.weight", "rank 0 has "},
           Case{{.name = "pp-ddp", .ranks = 4, .pp = 2}, 3, "output.weight", "rank 2 has "},
       }) {
    SCOPED_TRACE(c.layout.name);
    std::vector<std::string> keys = {"--debug.replica_check_freq=2", "--training.steps=4", "--validation.no-enable"};
    if (c.layout.ranks == 3)
      keys.insert(keys.end(), {"--training.global_batch_size=6", "--training.local_batch_size=2"});
    EXPECT_EQ(message_of_run(config_of(c.layout, c.layout.name, keys), c.layout.ranks, -1, ""), "");
    const auto again = config_of(c.layout, c.layout.name + "-flipped", keys);
    EXPECT_THAT(
        message_of_run(again, c.layout.ranks, c.rank, "model." + c.name),
        AllOf(HasSubstr("replica check before the update of step 2: of "), HasSubstr("'model." + c.name + "': "),
              HasSubstr(c.ranks), HasSubstr("rank " + std::to_string(c.rank) + " has ")));
  }
}

// Also a bit of the optimizer state: its moments decide all later steps. Nothing else differs yet.
TEST_F(ReplicaCheckRunTest, TheOptimizersStateIsCompared) {
  for (const std::string state : {"exp_avg", "exp_avg_sq"}) {
    const std::string name = "optimizer.layers.0.attention.wo.weight." + state;
    const auto config = config_of({.name = state, .ranks = 2}, state,
                                  {"--debug.replica_check_freq=1", "--training.steps=3", "--validation.no-enable"});
    EXPECT_THAT(message_of_run(config, 2, 1, name, 2),
                AllOf(HasSubstr("before the update of step 2: of "), HasSubstr(" tensors, 1 differs "),
                      HasSubstr("'" + name + "': rank 0 has "), HasSubstr("; rank 1 has ")));
  }
}

// A bit that flips in the step that is checked is found before it is stepped on.
TEST_F(ReplicaCheckRunTest, TiedWeightsOfTwoStagesAreCompared) {
  for (const auto& keys : {std::vector<std::string>{}, sharded(3, 2)}) {
    std::vector<std::string> more = keys;
    more.insert(more.end(), {"--model.tie_embeddings", "--debug.replica_check_freq=1", "--training.steps=3",
                             "--validation.no-enable"});
    const Layout layout{.name = "tied", .ranks = keys.empty() ? 2 : 4, .pp = 2};
    const std::string suffix = keys.empty() ? "" : "-sharded";
    EXPECT_EQ(message_of_run(config_of(layout, "tied" + suffix, more), layout.ranks, -1, ""), "");
    const int owner = layout.ranks / 2;  // the last stage
    EXPECT_THAT(
        message_of_run(config_of(layout, "flipped" + suffix, more), layout.ranks, owner, "model.tok_embeddings.weight"),
        AllOf(HasSubstr("before the update of step 1"), HasSubstr("'model.tok_embeddings.weight': rank 0 has "),
              HasSubstr("; rank " + std::to_string(owner) + " has ")));
  }
}

TEST_F(ReplicaCheckRunTest, SaysWhereThereIsNothingToCompare) {
  const auto log_of = [&](const std::string& run, std::vector<std::string> keys) {
    keys.insert(keys.end(), {"--debug.replica_check_freq=1", "--training.steps=1", "--validation.no-enable"});
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(message_of_run(config_of({.name = run, .ranks = 2, .keys = keys}, run), 2, -1, ""), "");
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(log_of("zero3", sharded(3)), HasSubstr("replica_check_freq: in this layout no two ranks hold the same "));
  EXPECT_THAT(log_of("ddp", {}), Not(HasSubstr("no two ranks hold")));
}

TEST_F(ReplicaCheckRunTest, IsOffUnlessAskedFor) {
  const auto keys = {std::string("--training.steps=3"), std::string("--validation.no-enable")};
  EXPECT_EQ(message_of_run(config_of({.name = "off", .ranks = 2}, "off", keys), 2, 1, "model.norm.weight"), "");
}

}  // namespace
}  // namespace phalanx::train
