// Data parallelism on the debug Llama against one rank: losses, gradients and weights of 50 steps, and bits between
// ranks and runs.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/remainder.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/optim/lr_schedule.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/ddp/ddp.h"

namespace phalanx {
namespace {

constexpr std::int64_t kLlamaBatch = 24, kLlamaSeq = 8;
constexpr int kLlamaSteps = 50;

struct LlamaRun {
  std::vector<double> losses;  // of the global batch
  std::vector<double> norms;
  std::vector<NamedTensor> first_grads;  // at the initial weights
  std::vector<NamedTensor> weights;      // after the last step
  double summed_rates = 0;
};

// [batch, seq + 1]: arithmetic progressions modulo a small number, so that there is something to learn.
at::Tensor llama_tokens(int step) {
  const at::Tensor row = at::arange(kLlamaBatch, at::kLong).add(kLlamaBatch * step).unsqueeze(1);
  const at::Tensor column = at::arange(kLlamaSeq + 1, at::kLong).unsqueeze(0);
  return at::remainder(row.mul(7).add(column.mul(row.remainder(3).add(1))), 61);
}

std::vector<NamedTensor> copies_of(const std::vector<NamedTensor>& tensors, bool of_grads) {
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor, shard] : tensors) {
    result.push_back({name, (of_grads ? tensor.grad() : tensor).detach().clone()});
  }
  return result;
}

LlamaRun train_llama(const std::shared_ptr<Communicator>& comm, bool adamw) {
  models::Llama model(models::llama_flavor("debug"));
  nn::initialise(model, /*seed=*/comm->rank() + 1);  // rank 0's start counts
  DistributedDataParallel ddp(model, comm, {.first_bucket_bytes = 50'000, .bucket_bytes = 200'000});
  std::unique_ptr<Optimizer> optimizer;
  if (adamw) {
    optimizer = std::make_unique<AdamW>(ddp.parameters());
  } else {
    optimizer = std::make_unique<Sgd>(ddp.parameters(), SgdOptions{.momentum = 0.9});
  }
  const LearningRateSchedule schedule(
      {.base_lr = adamw ? 2e-3 : 0.03, .total_steps = kLlamaSteps, .warmup_steps = 5, .min_lr_factor = 0.1});
  const std::int64_t share = kLlamaBatch / comm->size();
  LlamaRun run;
  for (int step = 0; step < kLlamaSteps; ++step) {
    const at::Tensor tokens = llama_tokens(step).narrow(0, comm->rank() * share, share);
    const at::Tensor loss = model.loss(tokens.narrow(1, 0, kLlamaSeq), tokens.narrow(1, 1, kLlamaSeq));
    loss.backward();
    const at::Tensor mean = loss.detach().to(at::kDouble).clone();
    comm->all_reduce(mean, {.op = ReduceOp::avg});
    run.losses.push_back(mean.item<double>());
    if (step == 0) run.first_grads = copies_of(ddp.parameters(), /*of_grads=*/true);
    run.norms.push_back(clip_grad_norm(ddp.parameters(), 1.0).value());
    run.summed_rates += schedule.lr_at(step);
    optimizer->step(schedule.lr_at(step));
    optimizer->zero_grad();
  }
  EXPECT_GT(ddp.buckets().size(), 2U);
  run.weights = copies_of(ddp.parameters(), /*of_grads=*/false);
  return run;
}

std::vector<LlamaRun> llama_runs(int world, bool adamw) {
  std::vector<LlamaRun> runs(static_cast<std::size_t>(world));
  run_local_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
    runs[static_cast<std::size_t>(comm->rank())] = train_llama(comm, adamw);
  });
  return runs;
}

void expect_same_bits(const LlamaRun& a, const LlamaRun& b, const std::string& what) {
  SCOPED_TRACE(what);
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  for (std::size_t i = 0; i < a.weights.size(); ++i) {
    EXPECT_TRUE(at::equal(a.first_grads[i].tensor, b.first_grads[i].tensor)) << a.weights[i].name;
    EXPECT_TRUE(at::equal(a.weights[i].tensor, b.weights[i].tensor)) << a.weights[i].name;
  }
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  return a.sub(b).to(at::kDouble).norm().item<double>() / b.to(at::kDouble).norm().item<double>();
}

class DdpLlama : public ::testing::TestWithParam<bool> {};

TEST_P(DdpLlama, EveryWorldTrainsAsOneRankDoes) {
  const bool adamw = GetParam();
  const LlamaRun one = llama_runs(1, adamw)[0];
  EXPECT_LT(one.losses.back(), 0.8 * one.losses.front());  // it learns: later steps depend on earlier ones
  for (const int world : {2, 3, 4, 8}) {
    SCOPED_TRACE("world " + std::to_string(world));
    const auto runs = llama_runs(world, adamw);
    for (std::size_t rank = 1; rank < runs.size(); ++rank) {
      expect_same_bits(runs[rank], runs[0], "rank " + std::to_string(rank) + " against rank 0");
    }
    if (world == 3) expect_same_bits(llama_runs(world, adamw)[0], runs[0], "a second run");
    for (std::size_t step = 0; step < one.losses.size(); ++step) {
      EXPECT_NEAR(runs[0].losses[step], one.losses[step], 1e-5 * one.losses[step]) << "step " << step;
    }
    for (std::size_t i = 0; i < one.weights.size(); ++i) {
      SCOPED_TRACE(one.weights[i].name);
      const double largest = runs[0].weights[i].tensor.sub(one.weights[i].tensor).abs().max().item<double>();
      EXPECT_LT(relative_error(runs[0].first_grads[i].tensor, one.first_grads[i].tensor), 1e-5);
      if (adamw) {
        EXPECT_LT(relative_error(runs[0].weights[i].tensor, one.weights[i].tensor), 2e-5);
        EXPECT_LT(largest, 0.2 * one.summed_rates);
      } else {
        EXPECT_LT(largest, 1e-6);
      }
    }
  }
}

// Records the operators that this thread runs on tensors of one size, and the one that makes a gradient of that size
// from other tensors. They show whether a gradient took autograd's own way.
class OperatorsOfSize {
 public:
  explicit OperatorsOfSize(std::int64_t numel) {
    current_ = this;
    numel_ = numel;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(note).needsInputs(true).needsOutputs(false));
  }
  ~OperatorsOfSize() {
    at::removeCallback(handle_);
    current_ = nullptr;
  }
  std::multiset<std::string> names;

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
    bool is_ours = std::string_view(function.name()) == "aten::embedding_dense_backward";
    for (const auto& input : function.inputs()) {
      is_ours |= input.isTensor() && input.toTensor().defined() && input.toTensor().numel() == current_->numel_;
    }
    if (is_ours) current_->names.insert(function.name());
    return nullptr;
  }
  static thread_local OperatorsOfSize* current_;
  std::int64_t numel_ = 0;
  at::CallbackHandle handle_ = 0;
};
thread_local OperatorsOfSize* OperatorsOfSize::current_ = nullptr;

struct VocabularyRun {
  std::vector<std::vector<NamedTensor>> grads;  // after each micro-batch
  std::multiset<std::string> first, later;  // operators on the vocabulary's gradients, by micro-batch of the last step
};

// Two steps of three micro-batches on two ranks; rank 0's view.
VocabularyRun vocabulary_run(bool tied, bool by_autograd) {
  constexpr int kSteps = 2, kParts = 3;
  VocabularyRun run;
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    models::LlamaConfig config = models::llama_flavor("debug");
    config.tie_embeddings = tied;
    models::Llama model(config);
    nn::initialise(model, /*seed=*/1);
    DistributedDataParallel ddp(model, comm);
    std::vector<at::Tensor> weights = {model.tok_embeddings->weight};
    if (!tied) weights.push_back(model.output->weight);
    if (by_autograd) {  // autograd must see a gradient that a hook observes
      for (const auto& weight : weights) weight.register_hook([](const at::Tensor& grad) { return grad; });
    }
    for (int step = 0; step < kSteps; ++step) {
      for (const auto& [name, tensor, shard] : ddp.parameters()) tensor.mutable_grad().reset();
      for (int part = 0; part < kParts; ++part) {
        std::optional<DistributedDataParallel::NoSync> guard;
        if (part + 1 < kParts) guard.emplace(ddp.no_sync());
        const at::Tensor tokens = llama_tokens(step * kParts + part).narrow(0, comm->rank() * 12, 12);
        OperatorsOfSize seen(config.vocab_size * config.dim);
        const at::Tensor loss = model.loss(tokens.narrow(1, 0, kLlamaSeq), tokens.narrow(1, 1, kLlamaSeq)) / kParts;
        loss.backward();
        if (comm->rank() != 0) continue;
        (part == 0 ? run.first : run.later) = seen.names;
        run.grads.push_back(copies_of(ddp.parameters(), /*of_grads=*/true));
      }
    }
  });
  return run;
}

TEST(DdpLlamaVocabulary, TheGradientsHaveAutogradsBitsAndAreNotCopied) {
  for (const bool tied : {false, true}) {
    SCOPED_TRACE(tied ? "tied" : "untied");
    const VocabularyRun ours = vocabulary_run(tied, false), theirs = vocabulary_run(tied, true);
    ASSERT_EQ(ours.grads.size(), 6U);
    for (std::size_t part = 0; part < ours.grads.size(); ++part) {
      for (std::size_t i = 0; i < ours.grads[part].size(); ++i) {
        const auto& [name, grad, shard] = ours.grads[part][i];
        const at::Tensor& expected = theirs.grads[part][i].tensor;
        EXPECT_TRUE(at::allclose(grad, expected, 1e-5, 1e-8)) << name << ", part " << part;
        // If both ends of the model share a weight, autograd adds (a + b) to the existing value; we add a, then b.
        const bool in_one_order = part % 3 == 0 || !(tied && name == "tok_embeddings.weight");
        EXPECT_TRUE(!in_one_order || at::equal(grad, expected)) << name << ", part " << part;
      }
    }
    // The recorder detects autograd's own way in `theirs`; `ours` does not take it.
    EXPECT_GE(theirs.first.count("aten::copy_"), tied ? 1U : 2U);
    for (const char* name : {"aten::copy_", "aten::clone", "aten::empty_like", "aten::add_", "aten::add",
                             "aten::embedding_dense_backward"}) {
      EXPECT_EQ(ours.first.count(name), 0U) << name;
    }
    EXPECT_EQ(ours.later.count("aten::empty_like"), 1U);  // the fused loss's, added in one pass
    EXPECT_EQ(ours.later.count("aten::add_"), 1U);
    EXPECT_EQ(ours.later.count("aten::embedding_dense_backward"), 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, DdpLlama, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "AdamW" : "Sgd"; });

}  // namespace
}  // namespace phalanx
