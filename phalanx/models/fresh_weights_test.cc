// A model computes with the current values of its weights: after an in-place update, the forward pass, the backward
// pass and recomputation use the new values, even if some code has saved a copy of the old ones. And what activation
// checkpointing saves is not recomputed.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/sin.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/kernels/autocast.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/testing/small_families.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/activation_checkpoint.h"

namespace phalanx::models {
namespace {

enum class Recompute : std::uint8_t { none, full, costly };

struct Precision {
  std::string name;
  std::optional<at::ScalarType> products;  // by autocast
  at::ScalarType weights = at::kFloat;
};

std::vector<Precision> precisions() {
  return {{"float32", std::nullopt},
          {"bfloat16 products", at::kBFloat16},
          {"float16 products", at::kHalf},
          {"bfloat16 weights", std::nullopt, at::kBFloat16}};
}

/// Those of Llama and GPT-2 tied, too.
std::vector<LlamaConfig> tied_and_untied() {
  std::vector<LlamaConfig> all;
  for (LlamaConfig config : small_families(/*n_layers=*/1, /*max_seq_len=*/16)) {
    all.push_back(config);
    config.tie_embeddings = true;
    if (config.family == LlamaFamily::llama || config.family == LlamaFamily::gpt2) all.push_back(config);
  }
  return all;
}

std::shared_ptr<Llama> make_model(const LlamaConfig& config, const Precision& precision, Recompute recompute) {
  auto model = std::make_shared<Llama>(config);
  nn::initialise(*model, 3);
  model->to(precision.weights);
  for (const auto& layer : model->layers) {
    if (recompute == Recompute::full) checkpoint_activations(*layer);
    if (recompute == Recompute::costly) checkpoint_activations(*layer, op_sac_policy);
  }
  return model;
}

at::Tensor some_tokens(std::int64_t first) {
  return at::remainder(at::arange(24, at::TensorOptions(at::kLong)).mul(7).add(first), 61).view({2, 12});
}

/// The loss, every gradient, and the output of an inference without a graph.
std::vector<at::Tensor> results_of(Llama& model, const Precision& precision) {
  std::vector<at::Tensor> results;
  std::optional<kernels::AutocastScope> products;
  const auto begin = [&] {
    if (precision.products) products.emplace(at::kCPU, kernels::AutocastState{true, *precision.products});
  };
  begin();
  results.push_back(model.loss(some_tokens(0), some_tokens(7)));
  products.reset();
  results[0].backward();
  results[0] = results[0].detach();
  for (const auto& p : model.parameters()) {
    results.push_back(p.grad().clone());
    p.mutable_grad().reset();
  }
  const at::NoGradGuard no_grad;
  begin();
  auto cache = model.make_cache(2, 16);
  if (!precision.products) results.push_back(model.forward(some_tokens(3), cache));  // a cache is of the weights' type
  results.push_back(model.forward(some_tokens(3)));
  return results;
}

TEST(FreshWeights, AreUsedByBothPassesAndByWhatIsComputedAgain) {
  for (const LlamaConfig& config : tied_and_untied()) {
    for (const Precision& precision : precisions()) {
      for (const Recompute recompute : {Recompute::none, Recompute::full, Recompute::costly}) {
        SCOPED_TRACE(std::string(family_name(config.family)) + (config.tie_embeddings ? ", tied, " : ", ") +
                     precision.name + ", recomputation " + std::to_string(static_cast<int>(recompute)));
        const auto used = make_model(config, precision, recompute);
        const auto before = results_of(*used, precision);
        const auto fresh = make_model(config, precision, Recompute::none);
        {
          const at::NoGradGuard no_grad;  // as optimizers do
          const auto from = used->parameters(), to = fresh->parameters();
          for (std::size_t i = 0; i < from.size(); ++i) {
            from[i].mul_(0.9).add_(at::sin(at::arange(from[i].numel(), at::kFloat)).view(from[i].sizes()), 0.05);
            to[i].copy_(from[i]);
          }
        }
        const auto now = results_of(*used, precision), expected = results_of(*fresh, precision);
        ASSERT_EQ(now.size(), expected.size());
        for (std::size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], expected[i])) << "result " << i;
        EXPECT_FALSE(at::equal(now.front(), before.front()) || at::equal(now.back(), before.back()));
      }
    }
  }
}

thread_local std::map<std::string, int> operator_calls;

/// Operators by name, of this thread, for as long as it lives.
class OperatorCount {
 public:
  OperatorCount() {
    operator_calls.clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
          ++operator_calls[call.name()];
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~OperatorCount() { at::removeCallback(handle_); }
  OperatorCount(const OperatorCount&) = delete;
  OperatorCount& operator=(const OperatorCount&) = delete;
  int of(const std::string& name) const {
    const auto found = operator_calls.find(name);
    return found == operator_calls.end() ? 0 : found->second;
  }

 private:
  at::CallbackHandle handle_;
};

TEST(SavedOperations, AreNotComputedAgainInAnyPrecision) {
  const std::string attention = "aten::_scaled_dot_product_flash_attention_for_cpu";
  for (const LlamaConfig& config : tied_and_untied()) {
    if (config.tie_embeddings || (config.family != LlamaFamily::llama && !config.is_gpt2())) continue;
    for (const Precision& precision : precisions()) {
      const bool is_narrow = precision.products || precision.weights != at::kFloat;
      // In a block: queries, keys, values and the output projection; the feed-forward net, which is one function in
      // float32.
      const int linears = config.is_gpt2() ? 6 : is_narrow ? 7 : 4;
      const int kept = config.is_gpt2() ? 3 : 2;
      for (const Recompute recompute : {Recompute::none, Recompute::full, Recompute::costly}) {
        SCOPED_TRACE(std::string(family_name(config.family)) + ", " + precision.name + ", recomputation " +
                     std::to_string(static_cast<int>(recompute)));
        const auto model = make_model(config, precision, recompute);
        at::Tensor loss;
        {
          std::optional<kernels::AutocastScope> products;
          if (precision.products) products.emplace(at::kCPU, kernels::AutocastState{true, *precision.products});
          loss = model->loss(some_tokens(0), some_tokens(7));
        }
        const OperatorCount again;
        loss.backward();
        const bool is_full = recompute == Recompute::full;
        const int expected = recompute == Recompute::none ? 0 : is_full ? linears : linears - kept;
        const int seen = precision.products ? 2 : 1;  // autocast calls the operator once more
        EXPECT_EQ(again.of("aten::linear"), seen * expected);
        EXPECT_EQ(again.of(attention), is_narrow && is_full ? 1 : 0);
      }
    }
  }
}

}  // namespace
}  // namespace phalanx::models
