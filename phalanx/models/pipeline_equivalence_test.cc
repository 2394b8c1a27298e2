// Llama in pipeline stages: the losses and gradients of one rank, in every schedule, with every split.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/remainder.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/testing/nccl_ranks.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/testing/small_families.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/simulate.h"
#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx {
namespace {

constexpr std::int64_t kPipelineSeq = 8;
constexpr int kPipelineMicroBatches = 8, kPipelineSteps = 4;

using models::LlamaFamily;

models::LlamaConfig four_layer_llama(bool tied, LlamaFamily family) {
  models::LlamaConfig config = models::llama_flavor("debug");  // 4 heads, 2 of keys and values
  config.family = family;
  if (family == LlamaFamily::gpt2) config.n_kv_heads = 4;
  if (config.has_experts()) {
    config.experts = 4;
    config.experts_per_token = 2;
  }
  config.n_layers = 4;
  if (family == LlamaFamily::smollm3) config.unrotated_layers = {2};
  if (family == LlamaFamily::gemma3_text) {
    config.sliding_window = 3;
    config.full_layers = {2};
    config.window_rope_theta = 100;
  }
  config.vocab_size = 128;
  config.max_seq_len = 16;
  config.tie_embeddings = tied;
  if (family == LlamaFamily::granite) models::with_multipliers(config);
  if (family == LlamaFamily::gpt_oss) models::with_gpt_oss_parts(config);
  if (config.has_latent_attention()) return models::with_latent_parts(config);
  return config;
}

// [8, seq + 1]
at::Tensor sequences(int step) {
  const at::Tensor row = at::arange(kPipelineMicroBatches, at::kLong).add(9 * step).unsqueeze(1);
  const at::Tensor column = at::arange(kPipelineSeq + 1, at::kLong).unsqueeze(0);
  return at::remainder(row.mul(7).add(column.mul(row.remainder(3).add(1))), 61);
}
at::Tensor tokens_of(int step) { return sequences(step).narrow(1, 0, kPipelineSeq).contiguous(); }
at::Tensor labels_of(int step) { return sequences(step).narrow(1, 1, kPipelineSeq).contiguous(); }

struct Trained {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> gradients;  // of the first step
};

void gather_and_descend(const torch::nn::Module& module, bool first, std::map<std::string, at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  for (const auto& p : nn::named_parameters(module)) {
    ASSERT_TRUE(p.tensor.grad().defined()) << p.name;
    if (first) {
      const auto [at_name, is_new] = gradients.emplace(p.name, p.tensor.grad().clone());
      EXPECT_TRUE(is_new || at::equal(at_name->second, p.tensor.grad())) << p.name << " has two gradients";
    }
    at::Tensor(p.tensor).sub_(p.tensor.grad(), 0.5);
    p.tensor.mutable_grad().reset();
  }
}

Trained on_one_rank(bool tied, LlamaFamily family = LlamaFamily::llama) {
  models::Llama model(four_layer_llama(tied, family));
  nn::initialise(model, 3);
  Trained result;
  for (int step = 0; step < kPipelineSteps; ++step) {
    double sum = 0;
    for (int m = 0; m < kPipelineMicroBatches; ++m) {
      const at::Tensor loss = model.loss(tokens_of(step).narrow(0, m, 1), labels_of(step).narrow(0, m, 1));
      sum += loss.item<double>();
      loss.backward(at::full({}, 1.0 / kPipelineMicroBatches));
    }
    result.losses.push_back(sum / kPipelineMicroBatches);
    gather_and_descend(model, step == 0, result.gradients);
  }
  return result;
}

struct PipelinedLlama {
  std::string schedule;
  int ranks = 2;
  bool tied = false;
  std::vector<double> layers;  // of each stage; empty: balanced
  bool checkpointed = false;
  LlamaFamily family = LlamaFamily::llama;
  bool over_nccl = false;
};

void run_pipeline_ranks(const PipelinedLlama& what,
                        const std::function<void(const std::shared_ptr<Communicator>&)>& body) {
  if (!what.over_nccl) return run_local_ranks(what.ranks, body);
  EXPECT_EQ(run_nccl_threads(what.ranks,
                             [&](const NcclRank& rank) {
                               at::set_num_threads(1);
                               body(rank.comm);
                             }),
            "");
}

Trained on_a_pipeline(const PipelinedLlama& what) {
  const auto plan =
      schedule::make_schedule({.name = what.schedule, .ranks = what.ranks, .micro_batches = kPipelineMicroBatches});
  const auto config = four_layer_llama(what.tied, what.family);
  const auto parts = what.layers.empty() ? models::balance_llama(config, plan.stages(), kPipelineSeq)
                                         : models::divide_llama(config, what.layers);
  Trained result;
  std::mutex mutex;
  run_pipeline_ranks(what, [&](const std::shared_ptr<Communicator>& comm) {
    std::vector<PipelineStage> stages;
    for (const int s : plan.stages_of(comm->rank())) {
      const auto part = std::make_shared<models::Llama>(config, parts[static_cast<std::size_t>(s)]);
      nn::initialise(*part, 3);
      for (const auto& layer : part->layers) {
        if (what.checkpointed) checkpoint_activations(*layer);
      }
      stages.push_back(part->part().head ? make_loss_stage(s, part) : make_stage(s, part));
    }
    PipelineRuntime pipeline(comm, plan, stages);
    EXPECT_EQ(pipeline.tied_names().size(),
              what.tied && (plan.rank_of_stage.front() == comm->rank() || plan.rank_of_stage.back() == comm->rank())
                  ? 1U
                  : 0U);
    for (int step = 0; step < kPipelineSteps; ++step) {
      const double loss = pipeline.step(tokens_of(step), labels_of(step)).loss();
      EXPECT_EQ(pipeline.statistics().peak_live_activations,
                schedule::peak_live_activations(plan)[static_cast<std::size_t>(comm->rank())]);
      const std::lock_guard lock(mutex);
      if (comm->rank() == 0) result.losses.push_back(loss);
      for (const auto& stage : stages) gather_and_descend(*stage.module, step == 0, result.gradients);
    }
    EXPECT_NEAR(pipeline.evaluate(tokens_of(9), labels_of(9)).loss(), 4.0, 2.0);
  });
  return result;
}

void expect_close_to(const Trained& found, const Trained& expected, double tolerance) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (std::size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << "step " << i;
  }
  ASSERT_EQ(found.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    const double difference = (found.gradients.at(name) - gradient).norm().item<double>();
    EXPECT_LE(difference, tolerance * gradient.norm().item<double>()) << name;
  }
}

TEST(PipelinedLlama, EveryScheduleIsOneRank) {
  for (const bool tied : {false, true}) {
    const Trained one = on_one_rank(tied);
    EXPECT_LT(one.losses.back(), one.losses.front());
    Trained first;
    for (const int ranks : {2, 4}) {
      for (const auto& name : schedule::schedule_names()) {
        SCOPED_TRACE(testing::Message() << name << " on " << ranks << (tied ? " ranks, tied" : " ranks"));
        const Trained found = on_a_pipeline({.schedule = name, .ranks = ranks, .tied = tied});
        expect_close_to(found, one, 1e-5);
        if (first.losses.empty()) first = found;
        expect_close_to(found, first, 1e-6);
      }
    }
  }
}

// Messages without tags: each waits for its receive, and those of a rank are sent one after the other.
TEST(PipelinedLlama, OverNcclIsOneRankToo) {
  const Trained one = on_one_rank(true);
  for (const char* name : {"1F1B", "Interleaved1F1B", "ZBV"}) {
    SCOPED_TRACE(name);
    expect_close_to(on_a_pipeline({.schedule = name, .tied = true, .over_nccl = true}), one, 1e-5);
  }
  expect_close_to(on_a_pipeline({.schedule = "ZB1P", .ranks = 4, .tied = true, .over_nccl = true}), one, 1e-5);
}

TEST(PipelinedLlama, UnevenAndHalfLayers) {
  const Trained one = on_one_rank(false);
  expect_close_to(on_a_pipeline({.schedule = "1F1B", .layers = {3, 1}}), one, 1e-5);
  expect_close_to(on_a_pipeline({.schedule = "ZB1P", .layers = {0, 1.5, 2.5, 0}}), one, 1e-5);
  expect_close_to(on_a_pipeline({.schedule = "ZBV", .layers = {0.5, 1, 0.5, 2}}), one, 1e-5);
}

TEST(PipelinedLlama, CheckpointedLayersDeferTheirWeightsToo) {
  const Trained one = on_one_rank(true);
  for (const char* name : {"1F1B", "ZBV"}) {
    expect_close_to(on_a_pipeline({.schedule = name, .tied = true, .checkpointed = true}), one, 1e-5);
  }
}

// Positions belong to the embedding's part. Experts without a token have zero gradients, in W as well.
TEST(PipelinedLlama, OtherFamiliesAreOneRank) {
  for (const auto family :
       {LlamaFamily::gpt2, LlamaFamily::mixtral, LlamaFamily::qwen3_moe, LlamaFamily::olmo2, LlamaFamily::smollm3,
        LlamaFamily::gemma3_text, LlamaFamily::deepseek_v3, LlamaFamily::gpt_oss, LlamaFamily::granite}) {
    SCOPED_TRACE(models::family_name(family));
    const bool tied = family == LlamaFamily::gpt2 || family == LlamaFamily::gemma3_text;
    const Trained one = on_one_rank(tied, family);
    EXPECT_LT(one.losses.back(), one.losses.front());
    expect_close_to(on_a_pipeline({.schedule = "1F1B", .tied = tied, .layers = {2.5, 1.5}, .family = family}), one,
                    1e-5);
    expect_close_to(on_a_pipeline({.schedule = "ZBV", .tied = tied, .layers = {0.5, 1, 0.5, 2}, .family = family}), one,
                    1e-5);
    expect_close_to(on_a_pipeline({.schedule = "ZB1P", .tied = tied, .checkpointed = true, .family = family}), one,
                    1e-5);
  }
}

}  // namespace
}  // namespace phalanx
