// Recomputation changes no bit. Ten steps in 16 bits, with every kind of layout and of recomputation, are compared with
// the same ten steps without it. A copy of a weight that outlives its update shows from the second step on. A run of
// the tests takes some of the layouts, with one kind of recomputation each (base/testing/case_sample.h).
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "phalanx/base/testing/case_sample.h"
#include "phalanx/train/testing/trainer_test_support.h"
#include "phalanx/verify/layout_side.h"

namespace phalanx::verify {
namespace {

struct BitsLayout {
  std::string name;
  int ranks = 1;
  std::vector<std::string> keys = {};
};

std::string degree_of(const std::string& axis, int degree) {
  return "--parallelism." + axis + "_degree=" + std::to_string(degree);
}

std::vector<BitsLayout> layouts_of_bits() {
  const auto shards = [](int degree, int stage, std::vector<std::string> more = {}) {
    more.push_back(degree_of("data_parallel_shard", degree));
    more.push_back("--parallelism.zero_stage=" + std::to_string(stage));
    return more;
  };
  const std::string tp = degree_of("tensor_parallel", 2), pp = degree_of("pipeline_parallel", 2);
  return {{"one rank", 1},
          {"accumulation", 1, {"--training.local_batch_size=1"}},
          {"ddp", 2},
          {"zero1", 2, shards(2, 1)},
          {"zero2", 2, shards(2, 2)},
          {"zero3", 2, shards(2, 3)},
          {"hsdp", 4, shards(2, 3, {degree_of("data_parallel_replicate", 2)})},
          {"tp without sp", 2, {tp, "--parallelism.no-enable_sequence_parallel"}},
          {"tp with sp", 2, {tp, "--parallelism.no-enable_async_tensor_parallel"}},
          {"tp overlapped", 2, {tp}},
          {"tp tied", 2, {tp, "--model.tie_embeddings"}},
          {"pp", 2, {pp}},
          {"pp zero-bubble, tied", 2, {pp, "--parallelism.pipeline_parallel_schedule=ZBV", "--model.tie_embeddings"}},
          {"ddp x tp", 4, {tp}},
          {"zero3 x tp", 4, shards(2, 3, {tp})},
          {"pp x tp", 4, {pp, tp}},
          {"pp x zero2", 4, shards(2, 2, {pp})}};
}

class RecomputeBitsTest : public train::TrainerTest {
 protected:
  /// What a rank received and what it has at the end.
  using Bits = std::pair<std::vector<double>, std::map<std::string, std::string>>;

  config::TrainConfig config_of(const BitsLayout& layout, const std::string& type,
                                const std::vector<std::string>& recompute) const {
    std::vector<std::string> keys = {"--model.flavor=debug",
                                     "--model.vocab_size=64",
                                     "--training.dataset_path=" + path("few.bin"),
                                     "--training.seq_len=8",
                                     "--training.local_batch_size=2",
                                     "--training.global_batch_size=4",
                                     "--training.steps=10",
                                     "--lr_scheduler.warmup_steps=1",
                                     "--optimizer.lr=3e-3",
                                     "--parallelism.pipeline_parallel_microbatch_size=1",
                                     "--training.mixed_precision_param=" + type};
    if (layout.ranks == 4) keys[4] = "--training.local_batch_size=1";
    keys.insert(keys.end(), layout.keys.begin(), layout.keys.end());
    keys.insert(keys.end(), recompute.begin(), recompute.end());
    return config::parse_config("", "test", keys);
  }

  static Bits ten_steps(const config::TrainConfig& config, const std::shared_ptr<Communicator>& world) {
    LayoutSide side(config, world, at::kCPU);
    Bits bits;
    for (std::int64_t step = 0; step < 10; ++step) {
      bits.first.push_back(side.forward_backward(step));
      bits.first.push_back(side.optimizer_step->apply(step).grad_norm);
    }
    for (const NamedTensor& p : side.model->parameters()) {
      const at::Tensor values = p.tensor.detach().contiguous();
      bits.second[p.name] = std::string(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
    }
    return bits;
  }

  static bool are_same(double left, double right) { return left == right || (std::isnan(left) && std::isnan(right)); }

  void expect_same_bits(const std::string& type, std::size_t count) const {
    const std::string mode = "--activation_checkpoint.mode=", which = "--activation_checkpoint.selective_ac_option=";
    const std::vector<std::pair<std::string, std::vector<std::string>>> recomputations = {
        {"every second block", {mode + "selective", which + "2"}},
        {"op", {mode + "selective", which + "op"}},
        {"full", {mode + "full"}}};
    std::vector<std::uint16_t> tokens;
    for (const std::uint16_t token : tokens_) tokens.push_back(token % 64);
    write_tokens("few.bin", tokens);
    const std::vector<BitsLayout> layouts = layouts_of_bits();
    for (const std::size_t i : sampled_indices(layouts.size(), count)) {
      const BitsLayout& layout = layouts[i];
      const std::vector<std::size_t> kinds = sampled_indices(recomputations.size(), 1);
      run_local_ranks(layout.ranks, [&](const std::shared_ptr<Communicator>& world) {
        const Bits expected = ten_steps(config_of(layout, type, {mode + "none"}), world);
        for (const std::size_t kind : kinds) {
          const auto& [name, keys] = recomputations[kind];
          const auto [losses, weights] = ten_steps(config_of(layout, type, keys), world);
          // The norm of a step that overflows is not a number.
          EXPECT_TRUE(std::ranges::equal(losses, expected.first, are_same))
              << layout.name << ", " << name << ": losses and norms, rank " << world->rank() << ": "
              << testing::PrintToString(losses) << ", expected " << testing::PrintToString(expected.first);
          EXPECT_TRUE(weights == expected.second) << layout.name << ", " << name << ": weights, rank " << world->rank();
        }
      });
    }
  }
};

TEST_F(RecomputeBitsTest, InBfloat16) { expect_same_bits("bfloat16", /*count=*/8); }
// Fewer layouts: on most processors it is slow.
TEST_F(RecomputeBitsTest, InFloat16) { expect_same_bits("float16", /*count=*/3); }

}  // namespace
}  // namespace phalanx::verify
