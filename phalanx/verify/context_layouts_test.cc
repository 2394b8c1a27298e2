// Layouts that cut sequences (context parallelism) have the losses, gradients and weights of one rank, parameter by
// parameter.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/logaddexp2.h>

#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "phalanx/base/file.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/kernels/causal_attention.h"
#include "phalanx/parallel/context/context_attention.h"
#include "phalanx/parallel/context/ring_attention.h"
#include "phalanx/train/testing/trainer_test_support.h"
#include "phalanx/verify/layout_check.h"
#include "phalanx/verify/layout_side.h"

namespace phalanx::verify::context_layouts_test {
namespace {

using Keys = std::vector<std::string>;

Keys operator+(Keys keys, const Keys& more) {
  keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}
Keys cp(int degree) { return {"--parallelism.context_parallel_degree=" + std::to_string(degree)}; }
Keys tp(int degree) { return {"--parallelism.tensor_parallel_degree=" + std::to_string(degree)}; }
Keys pp(int degree) { return {"--parallelism.pipeline_parallel_degree=" + std::to_string(degree)}; }
Keys shards(int degree, int stage = 3) {
  return {"--parallelism.data_parallel_shard_degree=" + std::to_string(degree),
          "--parallelism.zero_stage=" + std::to_string(stage)};
}
const Keys kHeads = {"--parallelism.context_parallel_exchange=heads"};
const Keys kRing = {"--parallelism.context_parallel_exchange=ring"};
const Keys kHeadTail = {"--parallelism.context_parallel_load_balancer=headtail"};
const Keys kTwoReplicas = {"--parallelism.data_parallel_replicate_degree=2"};
const Keys kWholeTokens = {"--parallelism.no-enable_sequence_parallel"};

struct Case {
  std::string name;
  int ranks = 2;
  Keys keys;
};

std::vector<Case> layouts() {
  return {{"cp2", 2, cp(2)},
          {"cp4", 4, cp(4)},
          {"cp3", 3, cp(3)},
          {"cp2 heads", 2, cp(2) + kHeads},
          {"cp4 heads", 4, cp(4) + kHeads},
          {"cp2 ring", 2, cp(2) + kRing},
          {"cp3 ring", 3, cp(3) + kRing},
          {"cp4 ring", 4, cp(4) + kRing},
          {"zero2_2 cp2 ring", 4, cp(2) + shards(2, 2) + kRing},
          {"zero3 over cp4 ring", 4, cp(4) + shards(-1) + kRing},
          {"cp4 tp2 ring", 8, cp(4) + tp(2) + kRing},
          {"pp2 cp4 zbv ring", 8, pp(2) + cp(4) + kRing + Keys{"--parallelism.pipeline_parallel_schedule=ZBV"}},
          {"pp2 cp2 zero3_2 ring", 8, pp(2) + cp(2) + shards(2) + kRing},
          {"ddp3 cp2", 6, cp(2)},
          {"zero1 over cp4", 4, cp(4) + shards(-1, 1) + Keys{"--parallelism.data_parallel_replicate_degree=1"}},
          {"zero3 over cp2, replicated", 4, cp(2) + shards(-1) + kTwoReplicas},
          {"zero2_2 cp2", 4, cp(2) + shards(2, 2)},
          {"zero3_3 cp2 heads", 6, cp(2) + shards(3) + kHeads},
          {"cp4 tp2", 8, cp(4) + tp(2)},
          {"cp2 tp4", 8, cp(2) + tp(4)},
          {"cp2 tp2, whole tokens", 4, cp(2) + tp(2) + kWholeTokens},
          {"cp2 tp2 heads", 4, cp(2) + tp(2) + kHeads},
          {"pp2 cp2", 4, pp(2) + cp(2)},
          {"pp2 cp4 zbv", 8, pp(2) + cp(4) + Keys{"--parallelism.pipeline_parallel_schedule=ZBV"}},
          {"pp2 cp2 zero3_2", 8, pp(2) + cp(2) + shards(2)},
          {"pp2 cp2 tp2 tied", 8, pp(2) + cp(2) + tp(2) + Keys{"--model.tie_embeddings"}}};
}

/// Those of them with these names.
std::vector<Case> layouts(const std::set<std::string>& names) {
  std::vector<Case> some = layouts();
  std::erase_if(some, [&](const Case& layout) { return !names.contains(layout.name); });
  EXPECT_EQ(some.size(), names.size());
  return some;
}

class ContextLayoutsTest : public train::TrainerTest {
 protected:
  config::TrainConfig config_of(const Case& layout) const {
    return config::parse_config(
        "", "test",
        Keys{"--model.flavor=debug", "--training.dataset_path=" + path("tokens.bin"), "--training.seq_len=32",
             "--training.local_batch_size=1", "--training.global_batch_size=6", "--training.steps=10",
             "--lr_scheduler.warmup_steps=2", "--optimizer.lr=3e-3"} +
            layout.keys);
  }

  LayoutCheck check(const Case& layout, std::int64_t steps,
                    const std::function<void(LayoutSide&)>& prepare = nullptr) const {
    LayoutCheck result;
    std::mutex mutex;
    run_local_ranks(layout.ranks, [&](const std::shared_ptr<Communicator>& world) {
      LayoutCheck mine = check_layout(config_of(layout), {.world = world, .prepare = prepare}, {.steps = steps});
      const std::lock_guard lock(mutex);
      if (world->rank() == 0) result = std::move(mine);
    });
    return result;
  }

  void expect_right(const Case& layout, std::int64_t steps = 2, bool has_documents = false) const {
    SCOPED_TRACE(layout.name);
    const LayoutCheck found = check(layout, steps);
    EXPECT_FALSE(found.finding) << found.finding->text();
    if (has_documents) {
      EXPECT_GE(found.documents_compared.value_or(0), 2);
    }
  }

  Keys documents() const {
    write_documents();
    return {"--training.dataset_path=" + path("documents"), "--training.attn_mask_type=block_causal",
            "--training.packing=best_fit"};
  }

  Keys family(const std::string& name, nlohmann::json numbers) const {
    nlohmann::json json = {
        {"hidden_size", 64},       {"num_hidden_layers", 2}, {"num_attention_heads", 4},     {"num_key_value_heads", 2},
        {"intermediate_size", 96}, {"vocab_size", 512},      {"max_position_embeddings", 32}};
    if (name == "gpt2") json = nlohmann::json::object();
    json.update(numbers);
    json["model_type"] = name;
    std::filesystem::create_directories(path(name));
    write_file(path(name) + "/config.json", json.dump());
    return {"--model.flavor=hf", "--model.hf_assets_path=" + path(name), "--checkpoint.initial_random_weights"};
  }
};

TEST_F(ContextLayoutsTest, HaveOneRanksNumbers) {
  for (const Case& layout : sampled(layouts(), 9)) expect_right(layout);
}

TEST_F(ContextLayoutsTest, HaveOneRanksNumbersWhereARankHasTwoPositionsOfEachPiece) {
  expect_right({"cp8", 8, cp(8)});
  expect_right({"cp8 padded", 8, cp(8) + Keys{"--training.seq_len=17"}});
  expect_right({"cp8 ring", 8, cp(8) + kRing});
  expect_right({"cp8 ring padded", 8, cp(8) + kRing + Keys{"--training.seq_len=17"}});
}

TEST_F(ContextLayoutsTest, HaveOneRanksNumbersWhenRecomputed) {
  const Keys op = {"--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"};
  for (const Keys& how : {Keys{"--activation_checkpoint.mode=full"}, op}) {
    for (const Case& layout : sampled(layouts({"cp2", "cp4 heads", "zero3 over cp2, replicated", "cp2 tp2 heads",
                                               "pp2 cp2", "cp3 ring", "zero3 over cp4 ring", "pp2 cp4 zbv ring"}),
                                      3)) {
      expect_right({layout.name + ", " + how.back(), layout.ranks, layout.keys + how});
    }
  }
}

TEST_F(ContextLayoutsTest, HaveOneRanksNumbersIn16Bits) {
  const auto in = [](const Case& layout, const std::string& type) {
    return Case{
        layout.name + ", " + type, layout.ranks,
        layout.keys + Keys{"--training.mixed_precision_param=" + type, "--activation_checkpoint.mode=selective"}};
  };
  for (const Case& layout : sampled(layouts(), 6)) expect_right(in(layout, "bfloat16"), 1);
  for (const Case& layout : sampled(layouts({"cp4", "cp2 heads", "zero2_2 cp2", "cp3 ring"}), 1))
    expect_right(in(layout, "float16"));
}

// Lengths that the pieces do not divide.
TEST_F(ContextLayoutsTest, HaveOneRanksNumbersWithPadding) {
  for (const Case& layout :
       layouts({"cp4", "cp3", "cp4 heads", "ddp3 cp2", "zero1 over cp4", "cp4 tp2", "cp2 tp2, whole tokens",
                "pp2 cp4 zbv", "pp2 cp2 tp2 tied", "cp3 ring", "cp4 tp2 ring"})) {
    expect_right({layout.name + ", 30 tokens", layout.ranks, layout.keys + Keys{"--training.seq_len=30"}}, 1);
  }
}

TEST_F(ContextLayoutsTest, KeepDocumentsApart) {
  const Keys packed = documents();
  for (const Case& layout : sampled(layouts(), 6)) {
    expect_right({layout.name, layout.ranks, layout.keys + packed}, 1, /*has_documents=*/true);
  }
  const Keys padded = {"--training.seq_len=30", "--training.mixed_precision_param=bfloat16",
                       "--activation_checkpoint.mode=full"};
  for (const Case& layout :
       sampled(layouts({"cp4", "cp4 heads", "zero2_2 cp2", "cp2 tp2 heads", "pp2 cp2", "cp4 ring"}), 2)) {
    expect_right({layout.name + ", padded, bfloat16", layout.ranks, layout.keys + packed + padded}, 1,
                 /*has_documents=*/true);
  }
}

// Rows of several documents, several of them in a forward pass, and pieces of blocks that differ by one.
TEST_F(ContextLayoutsTest, CutsByWorkHaveOneRanksNumbers) {
  const Keys packed = documents() + Keys{"--training.seq_len=64", "--training.local_batch_size=3"};
  const Keys full = {"--activation_checkpoint.mode=full"},
             op = {"--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"},
             bfloat16 = {"--training.mixed_precision_param=bfloat16"},
             float16 = {"--training.mixed_precision_param=float16"}, longer = {"--training.seq_len=150"};
  std::vector<std::pair<int, Keys>> all;
  for (const int degree : {2, 4, 8}) {
    for (const Keys& how : {Keys(), full, op, bfloat16 + op, float16 + full, longer, kHeadTail, kRing + op}) {
      all.emplace_back(degree, how);
    }
  }
  for (const auto& [degree, how] : sampled(all, 7)) {
    const Case layout{"cp" + std::to_string(degree) + (how.empty() ? "" : ", " + how.back()), degree,
                      cp(degree) + packed + how};
    EXPECT_EQ(config::plan_run(config_of(layout), degree).cuts_by_work, how != kHeadTail && how != kRing + op);
    expect_right(layout, 1, /*has_documents=*/true);
  }
  for (const Case& layout : sampled(layouts({"zero2_2 cp2", "cp4 tp2", "pp2 cp4 zbv", "pp2 cp2 zero3_2"}), 1)) {
    expect_right({layout.name + ", longer", layout.ranks, layout.keys + packed + longer + full}, 2,
                 /*has_documents=*/true);
  }
}

// Learnt positions, experts, sinks, and windows that end within and beyond a rank's pieces.
TEST_F(ContextLayoutsTest, HaveOneRanksNumbersInOtherFamilies) {
  const std::vector<std::pair<std::string, nlohmann::json>> families = {
      {"gpt2", {{"n_embd", 64}, {"n_layer", 2}, {"n_head", 4}, {"n_positions", 32}, {"vocab_size", 512}}},
      {"mixtral", {{"num_local_experts", 3}, {"num_experts_per_tok", 2}}},
      {"mistral", {{"sliding_window", 5}}},
      {"gpt_oss",
       {{"num_local_experts", 3},
        {"num_experts_per_tok", 2},
        {"head_dim", 24},
        {"sliding_window", 5},
        {"swiglu_limit", 0.05},
        {"rope_scaling", {{"rope_type", "default"}}}}},
      {"granite", {{"attention_multiplier", 0.2}, {"logits_scaling", 2.5}, {"residual_multiplier", 0.4}}},
      {"qwen3", {{"head_dim", 16}, {"tie_word_embeddings", true}}}};
  const auto some =
      layouts({"cp4 heads", "cp3", "zero2_2 cp2", "cp2 tp2 heads", "pp2 cp2", "cp3 ring", "zero2_2 cp2 ring"});
  const Keys packed = documents();
  std::vector<Case> all;
  for (const auto& [name, numbers] : families) {
    Keys keys = family(name, numbers);
    // Softmax does not see what all keys have in common: this gradient is zero, and what is found of it is rounding.
    if (name == "gpt2") keys.emplace_back("--training.frozen=layers.*.attention.wk.bias");
    for (const Case& layout : some) {
      all.push_back({name + ", " + layout.name, layout.ranks, layout.keys + keys});
    }
  }
  for (const Case& one : sampled(all, 12)) {
    expect_right(one, 1);
    expect_right({one.name + ", packed, 30 tokens", one.ranks, one.keys + packed + Keys{"--training.seq_len=30"}}, 1,
                 /*has_documents=*/true);
  }
}

TEST_F(ContextLayoutsTest, AdaptersHaveOneRanksNumbers) {
  for (const Case& layout : layouts({"cp4", "cp2 heads", "zero2_2 cp2", "cp2 tp2, whole tokens", "cp4 ring"})) {
    expect_right({layout.name + ", LoRA", layout.ranks, layout.keys + Keys{"--lora.rank=4", "--lora.no-zero_b"}});
  }
}

/// Every layer of this rank's model attends through `attention`.
void attend_through(LayoutSide& side, const std::shared_ptr<const nn::ContextAttention>& attention) {
  for (nn::Module* const module : side.modules()) {
    for (const auto& layer : dynamic_cast<models::Llama&>(*module).layers) {
      layer->attention->set_context_attention(attention);
    }
  }
}

/// Attends to this rank's own positions alone.
class AloneAttention final : public nn::ContextAttention {
 public:
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const nn::AttendOptions& options) const override {
    return kernels::causal_attention(q, k, v, options.window);
  }
};

TEST_F(ContextLayoutsTest, WrongAttentionIsFoundAndNamed) {
  for (const Case& layout : {Case{"cp2", 2, cp(2)}, Case{"cp2 tp2", 4, cp(2) + tp(2)}}) {
    const LayoutCheck found =
        check(layout, 2, [](LayoutSide& side) { attend_through(side, std::make_shared<AloneAttention>()); });
    ASSERT_TRUE(found.finding) << layout.name;
    EXPECT_EQ(found.finding->step, 1);
    EXPECT_THAT(found.finding->parameter, HasSubstr("layers.0.attention")) << found.finding->text();
  }
}

/// Of four ranks, which cut sequences and do nothing else.
struct ContextRanks {
  explicit ContextRanks(const LayoutSide& side) {
    const std::shared_ptr<Communicator>& world = side.model->mesh().world();
    cut = side.plan.context_cut(world->rank());
    group = world->split(0, world->rank());
  }
  ContextCut cut;
  std::shared_ptr<Communicator> group;
};

TEST_F(ContextLayoutsTest, ALogSumExpThatIsMergedInAnotherBaseIsFound) {
  const auto merge_to_base_2 = [](const kernels::AttentionPart& sum, const kernels::AttentionPart& part) {
    const at::Tensor both = at::logaddexp2(sum.log_sums, part.log_sums);
    const auto share = [&](const at::Tensor& log_sums) { return (log_sums - both).exp2().unsqueeze(-1); };
    sum.y.mul_(share(sum.log_sums)).add_(part.y * share(part.log_sums));
    sum.log_sums.copy_(both);
  };
  const LayoutCheck found = check({"cp4 ring", 4, cp(4) + kRing}, 1, [&](LayoutSide& side) {
    const ContextRanks ranks(side);
    attend_through(side, make_ring_attention(ranks.group, ranks.cut, merge_to_base_2));
  });
  ASSERT_TRUE(found.finding);
  EXPECT_THAT(found.finding->parameter, HasSubstr("layers.0.attention")) << found.finding->text();
}

/// The right attention between faults.
class FaultyAttention final : public nn::ContextAttention {
 public:
  struct Fault {
    double key_gradients = 1;  // factor of the gradients of this rank's keys and values
    bool forgets_documents = false;
  };
  FaultyAttention(ContextExchange exchange, const ContextRanks& ranks, const Fault& fault)
      : right_(make_context_attention(exchange, ranks.group, ranks.cut)), fault_(fault) {}
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const nn::AttendOptions& given) const override {
    nn::AttendOptions options = given;
    if (fault_.forgets_documents) options.documents = nullptr;
    const auto spoilt = [&](const at::Tensor& x) { return x.detach() + (x - x.detach()) * fault_.key_gradients; };
    return right_->attend(q, spoilt(k), spoilt(v), options);
  }

 private:
  std::shared_ptr<const nn::ContextAttention> right_;
  Fault fault_;
};

TEST_F(ContextLayoutsTest, GradientsOfKeysThatARingAddsTwiceAreFound) {
  for (const double times : {1.0, 2.0}) {
    const LayoutCheck found = check({"cp4 ring", 4, cp(4) + kRing}, 1, [&](LayoutSide& side) {
      const ContextRanks ranks(side);
      attend_through(side, std::make_shared<FaultyAttention>(
                               ContextExchange::ring, ranks,
                               FaultyAttention::Fault{.key_gradients = ranks.cut.rank == 2 ? times : 1}));
    });
    ASSERT_EQ(found.finding.has_value(), times != 1);
    if (times == 1) continue;
    EXPECT_THAT(found.finding->parameter, AnyOf(HasSubstr(".attention.wk"), HasSubstr(".attention.wv")))
        << found.finding->text();
  }
}

TEST_F(ContextLayoutsTest, AMaskOfDocumentsThatOneRankLosesIsFound) {
  const LayoutCheck found = check({"cp4", 4, cp(4) + documents() + kHeadTail}, 1, [&](LayoutSide& side) {
    const ContextRanks ranks(side);
    attend_through(side,
                   std::make_shared<FaultyAttention>(ContextExchange::keys, ranks,
                                                     FaultyAttention::Fault{.forgets_documents = ranks.cut.rank == 1}));
  });
  ASSERT_TRUE(found.finding);  // before any parameter is compared
  EXPECT_THAT(found.finding->text(), HasSubstr("attention crosses the boundary between two documents"));
}

TEST_F(ContextLayoutsTest, ARankWhoseAttentionCutsRowsOtherwiseIsFound) {
  for (const bool cuts_otherwise : {false, true}) {
    const LayoutCheck found = check({"cp4", 4, cp(4) + documents()}, 1, [&](LayoutSide& side) {
      ContextRanks ranks(side);
      EXPECT_TRUE(ranks.cut.by_work);
      if (cuts_otherwise && ranks.cut.rank == 1) ranks.cut.by_work = false;
      attend_through(side, make_context_attention(ContextExchange::keys, ranks.group, ranks.cut));
    });
    EXPECT_EQ(found.finding.has_value(), cuts_otherwise);
  }
}

// Rotary positions are relative, so they may start anywhere if all ranks agree. Learnt ones are not.
TEST_F(ContextLayoutsTest, PositionsThatOneRankDoesNotRestartAreFound) {
  Keys keys = cp(4) + kRing + documents() +
              family("gpt2", {{"n_embd", 64}, {"n_layer", 2}, {"n_head", 4}, {"n_positions", 32}, {"vocab_size", 512}});
  keys.emplace_back("--training.frozen=layers.*.attention.wk.bias");
  const LayoutCheck found = check({"gpt2 cp4 ring", 4, keys}, 1, [&](LayoutSide& side) {
    const ContextCut cut = ContextRanks(side).cut;
    if (cut.rank != 1) return;
    for (nn::Module* const module : side.modules()) {
      const auto& embedding = dynamic_cast<models::Llama&>(*module).pos_embeddings;
      embedding->add_post_forward_hook([cut, &weight = embedding->weight](nn::Module&, const at::Tensor& out) {
        std::vector<at::Tensor> rows;
        for (const auto& [first, count] : cut.ranges(32)) rows.push_back(weight.narrow(0, first, count));
        return at::cat(rows).expand_as(out);
      });
    }
  });
  ASSERT_TRUE(found.finding);
  EXPECT_THAT(found.finding->parameter, HasSubstr("pos_embeddings.weight")) << found.finding->text();
}

}  // namespace
}  // namespace phalanx::verify::context_layouts_test
