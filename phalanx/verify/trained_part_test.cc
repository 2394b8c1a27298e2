// A run that trains a part of its model, frozen parameters beside others or adapters alone, has one rank's gradients
// and weights in every layout.
#include <ATen/ops/equal.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "phalanx/base/testing/case_sample.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/train/testing/trainer_test_support.h"
#include "phalanx/verify/layout_check.h"
#include "phalanx/verify/layout_side.h"

namespace phalanx::verify {
namespace trained_part_test {

struct Case {
  std::string name;
  int ranks = 1;
  std::vector<std::string> keys = {};
};

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<std::string> shards(int degree, int stage) {
  return {"--parallelism.data_parallel_shard_degree=" + std::to_string(degree),
          "--parallelism.zero_stage=" + std::to_string(stage)};
}
std::vector<std::string> tensor(int degree) {
  return {"--parallelism.tensor_parallel_degree=" + std::to_string(degree)};
}
std::vector<std::string> stages(int degree, const std::string& schedule = "1F1B") {
  return {"--parallelism.pipeline_parallel_degree=" + std::to_string(degree),
          "--parallelism.pipeline_parallel_schedule=" + schedule};
}

const std::vector<std::string> kRecomputed = {"--activation_checkpoint.mode=full"};
const std::vector<std::string> kRecomputedByOperator = {"--activation_checkpoint.mode=selective",
                                                        "--activation_checkpoint.selective_ac_option=op"};
const std::vector<std::string> kWholeTokens = {"--parallelism.no-enable_sequence_parallel"};
const std::vector<std::string> kNoOverlap = {"--parallelism.no-enable_async_tensor_parallel"};
const std::vector<std::string> kTied = {"--model.tie_embeddings"};
const std::vector<std::string> kBfloat16 = {"--training.mixed_precision_param=bfloat16"};

const std::vector<Case>& layouts() {
  static const std::vector<Case> all = {
      {"one_recomputed", 1, kRecomputed},
      {"ddp_2", 2},
      {"ddp_2_bfloat16", 2, kBfloat16},
      {"ddp_2_recomputed_by_operator", 2, kRecomputedByOperator},
      {"zero1_2", 2, shards(2, 1)},
      {"zero2_2", 2, shards(2, 2)},
      {"zero3_2_recomputed", 2, shards(2, 3) + kRecomputed},
      {"zero3_2_bfloat16", 2, shards(2, 3) + kBfloat16},
      {"zero3_2_offloaded", 2, shards(2, 3) + std::vector<std::string>{"--training.enable_cpu_offload"}},
      {"zero3_4_kept_by_2", 4, shards(4, 3) + std::vector<std::string>{"--parallelism.fsdp_reshard_after_forward=2"}},
      {"hsdp_2x2", 4,
       shards(2, 3) + std::vector<std::string>{"--parallelism.data_parallel_replicate_degree=2",
                                               "--parallelism.fsdp_reduce_each_microbatch=never"}},
      {"tp_2", 2, tensor(2)},
      {"tp_2_whole_tokens", 2, tensor(2) + kWholeTokens},
      {"tp_2_no_overlap_recomputed", 2, tensor(2) + kNoOverlap + kRecomputed},
      {"tp_4_two_ranks_a_key_head", 4, tensor(4)},
      {"tp_2_bfloat16", 2, tensor(2) + kBfloat16},
      {"zero3_2_tp_2", 4, shards(2, 3) + tensor(2)},
      {"pp_2", 2, stages(2)},
      {"pp_2_recomputed", 2, stages(2) + kRecomputed},
      {"pp_2_zbv_tied", 2, stages(2, "ZBV") + kTied},
      {"pp_2_ddp_2_zb1p", 4, stages(2, "ZB1P")},
      {"pp_2_zero3_2", 4, stages(2) + shards(2, 3)},
      {"pp_2_zero2_2_tp_2_recomputed", 8, stages(2) + shards(2, 2) + tensor(2) + kRecomputed}};
  return all;
}

std::vector<Case> layouts(const std::function<bool(const Case&)>& fits) {
  std::vector<Case> some = layouts();
  std::erase_if(some, [&](const Case& layout) { return !fits(layout); });
  return some;
}

bool is_tied(const Case& layout) { return std::ranges::count(layout.keys, kTied.front()) > 0; }
bool shares_layers(const Case& layout) { return layout.name.starts_with("tp_2") || layout.ranks > 2; }

class TrainedPartTest : public train::TrainerTest {
 protected:
  config::TrainConfig config_of(const std::vector<std::string>& keys) const {
    const std::vector<std::string> common = {
        "--model.flavor=debug",           "--training.dataset_path=" + path("tokens.bin"),
        "--training.seq_len=32",          "--training.local_batch_size=1",
        "--training.global_batch_size=8", "--training.steps=10",
        "--lr_scheduler.warmup_steps=2",  "--optimizer.lr=3e-3",
        "--optimizer.no_decay=*norm*",    R"(--optimizer.groups=[{params = ["*.w?.*", "*.wo.*"], lr_factor = 0.5}])",
        "--training.z_loss_weight=0.01"};
    return config::parse_config("", "test", common + keys);
  }

  /// Checks three steps, and that frozen weights keep their bits and have no gradient.
  void expect_one_ranks_training(const Case& layout, const std::vector<std::string>& trained,
                                 std::size_t trained_count) const {
    SCOPED_TRACE(layout.name);
    std::mutex mutex;
    run_local_ranks(layout.ranks, [&](const std::shared_ptr<Communicator>& world) {
      std::map<std::string, at::Tensor> frozen;
      std::vector<NamedTensor> weights;
      const auto prepare = [&](LayoutSide& side) {
        weights = side.model->weights();
        for (const std::string& name : side.model->frozen()) frozen[name];
        for (const NamedTensor& one : weights) {
          if (frozen.contains(one.name)) frozen[one.name] = one.tensor.detach().clone();
        }
        const std::lock_guard lock(mutex);
        EXPECT_EQ(side.model->parameters().size(), trained_count);
        EXPECT_EQ(weights.size(), trained_count + frozen.size());
      };
      const LayoutCheck found =
          check_layout(config_of(layout.keys + trained), {.world = world, .prepare = prepare}, {.steps = 3});
      const std::lock_guard lock(mutex);
      EXPECT_FALSE(found.finding) << found.finding->text();
      EXPECT_EQ(found.steps.size(), 3U);
      for (const NamedTensor& one : weights) {
        if (!frozen.contains(one.name)) continue;
        EXPECT_TRUE(at::equal(one.tensor, frozen[one.name])) << one.name;
        EXPECT_FALSE(one.tensor.grad().defined()) << one.name;
      }
    });
  }
};

// Of the blocks: one kind of matrix, the fused feed-forward net in part, and a whole block.
TEST_F(TrainedPartTest, FrozenParametersStayAndTheOthersTrainAsOnOneRank) {
  const std::vector<std::string> frozen = {
      "--training.frozen=tok_embeddings.weight,*norm*,layers.0.attention.w[qk]*,*.feed_forward.w1.weight,output*"};
  // No pattern may match nothing.
  for (const Case& layout : sampled(layouts(std::not_fn(is_tied)), 4)) {
    // 2 blocks: wv, wo, w2, w3 in both, wq and wk in one.
    expect_one_ranks_training(layout, frozen, 10);
  }
  const std::vector<std::string> half = {"--training.frozen=tok_embeddings.weight,layers.0.*"};
  const std::vector<Case> of_half = {{"pp_2_whole_stage", 2, stages(2)},
                                     {"pp_2_ddp_2_whole_stage", 4, stages(2)},
                                     {"pp_2_zero3_2_whole_stage", 4, stages(2) + shards(2, 3)},
                                     {"zero3_2_whole_units", 2, shards(2, 3)},
                                     {"pp_2_tied", 2, stages(2) + kTied}};
  for (const Case& layout : sampled(of_half, 2)) {
    expect_one_ranks_training(layout, half, layout.name == "pp_2_tied" ? 10 : 11);
  }
}

TEST_F(TrainedPartTest, AdaptersTrainAsOnOneRank) {
  const std::vector<std::string> lora = {"--lora.rank=4", "--lora.alpha=8", "--lora.no-zero_b"};
  for (const Case& layout : sampled(layouts(), 4)) expect_one_ranks_training(layout, lora, 28);
  const std::vector<std::string> some = lora + std::vector<std::string>{"--lora.target_modules=q_proj,v_proj,w2"};
  for (const Case& layout : sampled(layouts(shares_layers), 2)) expect_one_ranks_training(layout, some, 12);
}

// Every rank of tensor parallelism makes the latent vectors of all heads, so both halves of their adapters are whole.
TEST_F(TrainedPartTest, AdaptersOfLatentAttentionAndSharedExpertsTrainAsOnOneRank) {
  for (const auto family : {models::LlamaFamily::deepseek_v2, models::LlamaFamily::deepseek_v3}) {
    const auto model = models::llama_flavor("debug", family);
    const std::size_t attention = model.q_lora_rank > 0 ? 5 : 4;
    const std::vector<std::string> lora = {std::string("--model.name=") + models::family_name(family), "--lora.rank=4",
                                           "--lora.no-zero_b", "--lora.dropout=0.3"};
    const auto fits = [](const Case& layout) {
      const bool has_four_stages = layout.name.find("zbv") != std::string::npos;  // of two layers
      return !has_four_stages && std::ranges::count(layout.keys, kBfloat16.front()) == 0;
    };
    for (const Case& layout : sampled(layouts(fits), 3)) {
      expect_one_ranks_training(layout, lora, static_cast<std::size_t>(model.n_layers) * 2 * (attention + 3));
    }
  }
}

TEST_F(TrainedPartTest, AdaptersOfTheOutputLayerTrainAsOnOneRank) {
  const std::vector<std::string> lora = {"--lora.rank=4", "--lora.alpha=8", "--lora.no-zero_b", "--lora.dropout=0.3",
                                         "--lora.target_modules=all-linear,lm_head"};
  const std::vector<std::string> alone = {"--lora.rank=4", "--lora.no-zero_b", "--lora.target_modules=lm_head"};
  for (const Case& layout : sampled(layouts(std::not_fn(is_tied)), 3)) {
    expect_one_ranks_training(layout, lora, 30);
    expect_one_ranks_training(layout, alone, 2);
  }
}

// Their biases behind a product that ranks share, and matrices that their files keep in one, change nothing.
TEST_F(TrainedPartTest, AdaptersOfGpt2AndPhi3TrainAsOnOneRank) {
  for (const auto family : {models::LlamaFamily::gpt2, models::LlamaFamily::phi3}) {
    const auto model = models::llama_flavor("debug", family);
    const std::vector<std::string> lora = {std::string("--model.name=") + models::family_name(family), "--lora.rank=4",
                                           "--lora.no-zero_b", "--lora.dropout=0.3"};
    const auto layers = static_cast<std::size_t>(model.n_layers * (4 + model.ffn_matrices()));
    for (const Case& layout : sampled(layouts(), 3)) expect_one_ranks_training(layout, lora, 2 * layers);
    // Their biases and norms are narrow, too.
    const std::vector<std::string> narrow = lora + std::vector<std::string>{"--lora.base_dtype=bfloat16"};
    const std::vector<std::string> in_nf4 =
        lora + std::vector<std::string>{"--lora.base_dtype=nf4", "--model.dim=256", "--model.ffn_hidden=256"};
    for (const Case& layout : sampled(layouts(shares_layers), 2)) {
      expect_one_ranks_training(layout, narrow, 2 * layers);
      expect_one_ranks_training(layout, in_nf4, 2 * layers);
    }
  }
}

TEST_F(TrainedPartTest, AdaptersTrainOnABaseInFewerBitsAsOnOneRank) {
  const std::vector<std::string> lora = {"--lora.rank=4", "--lora.alpha=8", "--lora.no-zero_b",
                                         "--lora.base_dtype=bfloat16"};
  for (const Case& layout : sampled(layouts(), 4)) expect_one_ranks_training(layout, lora, 28);
  // In NF4 rows are blocks of 64: each rank of tensor parallelism has whole ones.
  const std::vector<std::string> in_nf4 = {"--lora.rank=4",         "--lora.alpha=8",  "--lora.no-zero_b",
                                           "--lora.base_dtype=nf4", "--model.dim=256", "--model.ffn_hidden=256"};
  for (const Case& layout : sampled(layouts(), 4)) expect_one_ranks_training(layout, in_nf4, 28);
  // Layers without adapters keep their weights in 16 bits, too.
  const std::vector<std::string> some = lora + std::vector<std::string>{"--lora.target_modules=q_proj,v_proj,w2"};
  for (const Case& layout : sampled(layouts(shares_layers), 2)) expect_one_ranks_training(layout, some, 12);
}

TEST_F(TrainedPartTest, AdaptersDropOutWhatOneRankDropsOut) {
  const std::vector<std::string> lora = {"--lora.rank=4", "--lora.alpha=8", "--lora.no-zero_b", "--lora.dropout=0.3"};
  for (const Case& layout : sampled(layouts(), 4)) expect_one_ranks_training(layout, lora, 28);
}

}  // namespace trained_part_test
}  // namespace phalanx::verify
