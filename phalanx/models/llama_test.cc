#include "phalanx/models/llama.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/models/config/hf_names.h"
#include "phalanx/models/testing/golden_weight.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"

namespace {

using phalanx::models::Llama;
using phalanx::models::llama_flavor;
using phalanx::models::llama_fqn_from_hf;
using phalanx::models::llama_hf_name;
using phalanx::models::LlamaConfig;
using phalanx::models::set_golden_weight;
using testing::HasSubstr;

const at::TensorOptions kIds = at::TensorOptions(at::kLong);

nlohmann::json golden() {
  std::ifstream file(std::string(PHALANX_MODELS_TESTDATA) + "/llama_golden.json");
  return nlohmann::json::parse(file);
}

LlamaConfig golden_config(const nlohmann::json& data, bool tied) {
  const auto& c = data["config"];
  return {.dim = c["dim"],
          .n_layers = c["n_layers"],
          .n_heads = c["n_heads"],
          .n_kv_heads = c["n_kv_heads"],
          .ffn_hidden = c["ffn_hidden"],
          .vocab_size = c["vocab_size"],
          .max_seq_len = c["max_seq_len"],
          .rope_theta = c["rope_theta"],
          .norm_eps = c["norm_eps"],
          .tie_embeddings = tied};
}

at::Tensor golden_tokens(const nlohmann::json& data, std::int64_t offset) {
  const std::int64_t batch = data["batch"], seq = data["seq"], vocab = data["config"]["vocab_size"];
  const at::Tensor i = at::arange(batch * seq, kIds);
  return at::remainder(i * i * 7 + i * 3 + offset, vocab).view({batch, seq});
}

class LlamaGolden : public testing::TestWithParam<bool> {};

TEST_P(LlamaGolden, LossLogitsAndGradientsEqualPyTorchs) {
  const auto data = golden();
  const auto& expected = data[GetParam() ? "tied" : "untied"];
  Llama model(golden_config(data, GetParam()));
  for (const auto& p : model.named_parameters()) set_golden_weight(p.key(), p.value());

  const at::Tensor tokens = golden_tokens(data, 0), labels = golden_tokens(data, 5);
  const at::Tensor loss = model.loss(tokens, labels);
  EXPECT_NEAR(loss.item<double>(), expected["loss"].get<double>(), 2e-6);
  loss.backward();
  ASSERT_EQ(model.named_parameters().size(), expected["grads"].size());
  for (const auto& p : model.named_parameters()) {
    const auto& g = expected["grads"][p.key()];
    const double norm = g["norm"];
    EXPECT_NEAR(p.value().grad().norm().item<double>(), norm, 1e-5 * norm) << p.key();
    const at::Tensor first = p.value().grad().flatten();
    for (int i = 0; i < 3; ++i)
      EXPECT_NEAR(first[i].item<double>(), g["first"][i].get<double>(), 1e-5 * norm) << p.key();
  }
  const at::NoGradGuard no_grad;
  const at::Tensor logits = model.forward(tokens);
  const at::Tensor last = logits[-1][-1];
  for (std::int64_t i = 0; i < last.numel(); ++i)
    EXPECT_NEAR(last[i].item<double>(), expected["logits"][i].get<double>(), 5e-6);
  EXPECT_NEAR(at::cross_entropy_loss(logits.flatten(0, 1), labels.flatten()).item<double>(), loss.item<double>(), 1e-6);
}

TEST_P(LlamaGolden, LossesOfAdamWStepsEqualPyTorchs) {
  const auto data = golden();
  const auto& expected = data[GetParam() ? "tied" : "untied"]["adamw_losses"];
  Llama model(golden_config(data, GetParam()));
  for (const auto& p : model.named_parameters()) set_golden_weight(p.key(), p.value());
  phalanx::AdamW optimizer(phalanx::nn::named_parameters(model),
                           {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1});
  for (std::size_t step = 0; step < expected.size(); ++step) {
    const auto offset = static_cast<std::int64_t>(step);
    const at::Tensor loss = model.loss(golden_tokens(data, offset), golden_tokens(data, offset + 5));
    EXPECT_NEAR(loss.item<double>(), expected[step].get<double>(), 2e-5) << step;
    loss.backward();
    phalanx::clip_grad_norm(optimizer.parameters(), 1.0);
    optimizer.step(1e-2);
    optimizer.zero_grad();
  }
}

INSTANTIATE_TEST_SUITE_P(Embeddings, LlamaGolden, testing::Bool(),
                         [](const auto& info) { return info.param ? "Tied" : "Untied"; });

std::shared_ptr<Llama> debug_model() {
  auto model = std::make_shared<Llama>(llama_flavor("debug"));
  phalanx::nn::initialise(*model, 3);
  return model;
}

TEST(Llama, CachedDecodingEqualsTheFullForward) {
  const auto model = debug_model();
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(512, {2, 12}, kIds);
  const at::Tensor full = model->forward(tokens);
  auto cache = model->make_cache(2, 16);
  // A prompt, one token, then several at once.
  std::int64_t seen = 0;
  for (const std::int64_t n : {5, 1, 4, 1, 1}) {
    const at::Tensor logits = model->forward(tokens.narrow(1, seen, n), cache);
    seen += n;
    EXPECT_TRUE(at::allclose(logits, full.select(1, seen - 1), 1e-4, 1e-5)) << seen;
  }
  cache.truncate(7);
  EXPECT_TRUE(at::allclose(model->forward(tokens.narrow(1, 7, 3), cache), full.select(1, 9), 1e-4, 1e-5));
}

TEST(Llama, UnequalPromptsGiveWhatEachRowAloneGives) {
  const auto model = debug_model();
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(512, {3, 7}, kIds), next = at::randint(512, {3, 2}, kIds);
  const std::vector<std::int64_t> counts = {7, 2, 4};
  auto cache = model->make_cache(3, 16);
  const at::Tensor first = model->forward(tokens, cache, counts);
  const at::Tensor second = model->forward(next.narrow(1, 0, 1), cache);
  const at::Tensor third = model->forward(next.narrow(1, 1, 1), cache);
  EXPECT_THAT(cache.lengths(), testing::ElementsAre(9, 4, 6));
  for (std::int64_t r = 0; r < 3; ++r) {
    const std::int64_t n = counts[static_cast<std::size_t>(r)];
    const at::Tensor alone = at::cat({tokens[r].narrow(0, 0, n), next[r]}).unsqueeze(0);
    const at::Tensor full = model->forward(alone)[0];
    EXPECT_TRUE(at::allclose(first[r], full[n - 1], 1e-4, 1e-5)) << r;
    EXPECT_TRUE(at::allclose(second[r], full[n], 1e-4, 1e-5)) << r;
    EXPECT_TRUE(at::allclose(third[r], full[n + 1], 1e-4, 1e-5)) << r;
  }
}

// If the decoding kernels do not apply: with the cache's masks.
TEST(Llama, UnequalRowsDecodeInDoublePrecisionAsEachAlone) {
  for (const std::int64_t window : {0, 4}) {
    auto config = llama_flavor("debug");
    if (window > 0) config.family = phalanx::models::LlamaFamily::mistral, config.sliding_window = window;
    Llama model(config, {.dtype = at::kDouble});
    phalanx::nn::initialise(model, 3);
    const at::NoGradGuard no_grad;
    const at::Tensor tokens = at::randint(512, {3, 9}, kIds);
    const at::Tensor full = model.forward(tokens);
    auto cache = model.make_cache(3, 16);
    const std::vector<std::int64_t> counts = {7, 2, 5};
    const at::Tensor first = model.forward(tokens.narrow(1, 0, 7), cache, counts);
    const at::Tensor next = at::stack({tokens[0][7], tokens[1][2], tokens[2][5]}).unsqueeze(1);
    const at::Tensor second = model.forward(next, cache);
    for (std::int64_t r = 0; r < 3; ++r) {
      const std::int64_t n = counts[static_cast<std::size_t>(r)];
      EXPECT_TRUE(at::allclose(first[r], full[r][n - 1], 1e-9, 1e-9)) << r << ", window " << window;
      EXPECT_TRUE(at::allclose(second[r], full[r][n], 1e-9, 1e-9)) << r << ", window " << window;
    }
  }
}

TEST(Llama, AFullCacheIsAnErrorThatNamesRowAndNumbers) {
  const auto model = debug_model();
  auto cache = model->make_cache(2, 4);
  const at::Tensor tokens = at::randint(512, {2, 3}, kIds);
  model->forward(tokens, cache, {3, 1});
  EXPECT_THAT(phalanx::error_text([&] { model->forward(tokens.narrow(1, 0, 2), cache); }),
              HasSubstr("row 0 holds 3 tokens and 2 more do not fit its 4 positions"));
  EXPECT_THAT(cache.lengths(), testing::ElementsAre(3, 1));  // as it was
}

TEST(Llama, ACacheMayBeLongerThanTheSequencesOfTraining) {
  auto config = llama_flavor("debug");
  config.max_seq_len = 8;
  Llama model(config);
  phalanx::nn::initialise(model, 3);
  const auto longer = debug_model();  // the same weights, positions to 256
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(512, {1, 20}, kIds);
  model.forward(tokens.narrow(1, 0, 8));  // makes the tables of 8 positions
  auto cache = model.make_cache(1, 20);
  EXPECT_TRUE(at::allclose(model.forward(tokens, cache), longer->forward(tokens).select(1, 19), 1e-4, 1e-5));
}

TEST(Llama, ACacheOfAnotherModelIsAnError) {
  auto config = llama_flavor("debug");
  config.n_layers = 3;
  auto cache = Llama(config).make_cache(1, 8);
  const at::Tensor tokens = at::randint(512, {1, 4}, kIds);
  EXPECT_THROW(debug_model()->forward(tokens, cache), phalanx::Error);
  auto one_row = debug_model()->make_cache(1, 8);
  EXPECT_THROW(debug_model()->forward(tokens.expand({2, 4}), one_row), phalanx::Error);
  EXPECT_THROW(debug_model()->forward(tokens, one_row, {}, 1), phalanx::Error);
  EXPECT_THROW(debug_model()->forward(tokens, one_row, {2, 2}), phalanx::Error);
  EXPECT_EQ(one_row.longest(), 0);
}

TEST(Llama, SomeRowsGoOnAndAFreeOneTakesAnotherSequence) {
  const auto model = debug_model();
  const c10::InferenceMode inference;
  const at::Tensor tokens = at::randint(512, {4, 9}, kIds);
  const at::Tensor full = model->forward(tokens);
  auto cache = model->make_cache(3, 16);
  model->forward(tokens.narrow(0, 0, 3).narrow(1, 0, 5), cache);
  // Row 1 ends and row 3 of the tokens takes its slot, alone. Then all go on, then the last two.
  cache.truncate(1, 0);
  EXPECT_TRUE(
      at::allclose(model->forward(tokens.narrow(0, 3, 1).narrow(1, 0, 7), cache, {}, 1), full[3][6], 1e-4, 1e-5));
  EXPECT_THAT(cache.lengths(), testing::ElementsAre(5, 7, 5));
  const at::Tensor next = at::stack({tokens[0][5], tokens[3][7], tokens[2][5]}).unsqueeze(1);
  const at::Tensor logits = model->forward(next, cache);
  EXPECT_TRUE(at::allclose(logits, at::stack({full[0][5], full[3][7], full[2][5]}), 1e-4, 1e-5));
  const at::Tensor last = model->forward(at::stack({tokens[3][8], tokens[2][6]}).unsqueeze(1), cache, {}, 1);
  EXPECT_TRUE(at::allclose(last, at::stack({full[3][8], full[2][6]}), 1e-4, 1e-5));
  // A moved row continues in its new place.
  cache.move_row(2, 0);
  EXPECT_THAT(cache.lengths(), testing::ElementsAre(7, 9, 0));
  const at::Tensor moved = model->forward(tokens[2].narrow(0, 7, 2).unsqueeze(0), cache, {2}, 0);
  EXPECT_TRUE(at::allclose(moved, full[2][8], 1e-4, 1e-5));
}

TEST(Llama, DecodesARowToTheSameBitsInAnyBatch) {
  const auto model = debug_model();
  const c10::InferenceMode inference;
  const at::Tensor tokens = at::randint(512, {5, 3}, kIds);
  auto together = model->make_cache(5, 8), alone = model->make_cache(1, 8);
  for (std::int64_t i = 0; i < 3; ++i) {
    const at::Tensor logits = model->forward(tokens.narrow(1, i, 1), together);
    EXPECT_TRUE(at::equal(logits[3], model->forward(tokens.narrow(0, 3, 1).narrow(1, i, 1), alone)[0])) << i;
  }
}

TEST(Llama, ThetaAndEpsAreTheConfigurations) {
  auto config = llama_flavor("debug");
  config.rope_theta = 100.0;
  config.norm_eps = 0.125;
  Llama model(config);
  EXPECT_EQ(model.norm->eps(), 0.125);
  for (const auto& layer : model.layers) {
    EXPECT_EQ(layer->attention_norm->eps(), 0.125);
    EXPECT_EQ(layer->ffn_norm->eps(), 0.125);
  }
  config.norm_eps = llama_flavor("debug").norm_eps;
  Llama turned(config);
  phalanx::nn::initialise(turned, 3);
  const at::Tensor tokens = at::randint(512, {1, 9}, kIds);
  EXPECT_FALSE(at::allclose(turned.forward(tokens), debug_model()->forward(tokens), 1e-4, 1e-5));
}

TEST(Llama, DecodesInSixteenBits) {
  Llama half(llama_flavor("debug"), {.dtype = at::kBFloat16});
  phalanx::nn::initialise(half, 3);
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(512, {2, 6}, kIds);
  auto cache = half.make_cache(2, 8);
  EXPECT_EQ(cache.options().dtype, at::kBFloat16);
  half.forward(tokens.narrow(1, 0, 5), cache);
  const at::Tensor last = half.forward(tokens.narrow(1, 5, 1), cache);
  EXPECT_TRUE(at::allclose(last.to(at::kFloat), half.forward(tokens).select(1, 5).to(at::kFloat), 0.1, 0.02));
}

TEST(Llama, TwoRunsAreBitwiseEqual) {
  const at::Tensor tokens = at::randint(512, {2, 33}, kIds), labels = at::randint(512, {2, 33}, kIds);
  const auto a = debug_model(), b = debug_model();
  const at::Tensor loss_a = a->loss(tokens, labels), loss_b = b->loss(tokens, labels);
  EXPECT_TRUE(at::equal(loss_a, loss_b));
  loss_a.backward();
  loss_b.backward();
  const auto pa = a->parameters(), pb = b->parameters();
  for (std::size_t i = 0; i < pa.size(); ++i) EXPECT_TRUE(at::equal(pa[i].grad(), pb[i].grad()));
}

TEST(Llama, GradientsAccumulateOverBackwards) {
  const at::Tensor tokens = at::randint(512, {2, 9}, kIds);
  const auto once = debug_model(), twice = debug_model();
  once->loss(tokens, tokens).backward();
  twice->loss(tokens, tokens).backward();
  twice->loss(tokens, tokens).backward();
  const auto a = once->parameters(), b = twice->parameters();
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::allclose(b[i].grad(), a[i].grad() * 2.0));
}

TEST(Llama, InitialValuesDependOnNameAndSeedAlone) {
  const auto model = debug_model();
  auto config = llama_flavor("debug");
  config.n_layers = 1;  // another model around the same parameters
  config.tie_embeddings = true;
  config.depth_scaled_init = false;
  Llama smaller(config);
  phalanx::nn::initialise(smaller, 3);
  const auto full = model->named_parameters(), part = smaller.named_parameters();
  EXPECT_TRUE(at::equal(full["layers.0.attention.wq.weight"], part["layers.0.attention.wq.weight"]));
  EXPECT_TRUE(at::equal(full["tok_embeddings.weight"], part["tok_embeddings.weight"]));
  EXPECT_FALSE(at::equal(full["layers.0.attention.wq.weight"], full["layers.1.attention.wq.weight"]));
  EXPECT_NEAR(full["layers.0.attention.wq.weight"].std().item<double>(), 0.02, 0.001);
  EXPECT_NEAR(full["layers.0.attention.wo.weight"].std().item<double>(), 0.01, 0.0005);  // 0.02 / sqrt(2 * 2)
  EXPECT_NEAR(full["layers.0.feed_forward.w2.weight"].std().item<double>(), 0.01, 0.0005);
  EXPECT_NEAR(full["layers.0.feed_forward.w1.weight"].std().item<double>(), 0.02, 0.001);
  EXPECT_NEAR(part["layers.0.attention.wo.weight"].std().item<double>(), 0.02, 0.001);
  EXPECT_TRUE(at::equal(full["norm.weight"], at::empty({64}, at::TensorOptions(at::kFloat)).fill_(1.0)));
}

TEST(Llama, TrainsInSixteenBitsThroughTheAtenOps) {
  auto config = llama_flavor("debug");
  const auto full = debug_model();
  Llama half(config, {.dtype = at::kBFloat16});
  phalanx::nn::initialise(half, 3);
  const at::Tensor tokens = at::randint(512, {2, 33}, kIds), labels = at::randint(512, {2, 33}, kIds);
  const at::Tensor loss = half.loss(tokens, labels), reference = full->loss(tokens, labels);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), reference.item<double>(), 0.01);
  loss.backward();
  reference.backward();
  const at::Tensor a = half.named_parameters()["layers.0.attention.wq.weight"].grad().to(at::kFloat);
  const at::Tensor b = full->named_parameters()["layers.0.attention.wq.weight"].grad();
  EXPECT_LT((a - b).norm().item<double>(), 0.05 * b.norm().item<double>());
}

TEST(Llama, HooksOnInnerLayersSeeTheirCallsAndChangeNothing) {
  const auto fused = debug_model(), hooked = debug_model();
  int calls = 0;
  for (const auto& module : hooked->modules(/*include_self=*/false)) {
    std::dynamic_pointer_cast<phalanx::nn::Module>(module)->add_pre_forward_hook([&](auto&) { ++calls; });
  }
  const at::Tensor tokens = at::randint(512, {2, 33}, kIds), labels = at::randint(512, {2, 33}, kIds);
  const at::Tensor a = fused->loss(tokens, labels), b = hooked->loss(tokens, labels);
  EXPECT_EQ(calls, 3 + 2 * 12);  // embedding, norm, output; per layer itself, 2 norms, attention, its 4, ffn, its 3
  EXPECT_NEAR(a.item<double>(), b.item<double>(), 1e-5);
  a.backward();
  b.backward();
  const auto pa = fused->parameters(), pb = hooked->parameters();
  for (std::size_t i = 0; i < pa.size(); ++i) EXPECT_TRUE(at::allclose(pa[i].grad(), pb[i].grad(), 1e-3, 1e-6)) << i;
}

TEST(Llama, CountsParametersAndOperations) {
  const auto config = llama_flavor("5M");
  EXPECT_EQ(config.parameter_count(), 4999424);
  EXPECT_EQ(config.flops_per_token(256), 6.0 * (4999424 - 4096 * 256) + 12.0 * 4 * 256 * 256);
  EXPECT_EQ(llama_flavor("llama3_8b").parameter_count(), 8030261248);
  EXPECT_EQ(llama_flavor("llama3_70b").parameter_count(), 70553706496);
  EXPECT_EQ(llama_flavor("llama3_405b").parameter_count(), 405853388800);
  LlamaConfig small = llama_flavor("llama3_debug");
  small.vocab_size = 2000;  // for which torchtitan's log states the number
  EXPECT_EQ(small.parameter_count(), 6139136);
  for (const char* name : {"llama3_1b", "llama3_8b", "llama3_70b"}) EXPECT_EQ(llama_flavor(name).rope_theta, 500000.0);
  EXPECT_EQ(llama_flavor("llama3_1b").parameter_count(), 1235814400);
  for (const bool tied : {false, true}) {
    auto small = llama_flavor("debug");
    small.tie_embeddings = tied;
    const Llama model(small);
    std::int64_t elements = 0;
    for (const auto& p : model.parameters()) elements += p.numel();
    EXPECT_EQ(elements, model.parameter_count());
    // The output matrix takes part in a product whether or not it is the embedding.
    const double in_products = static_cast<double>(elements - (tied ? 0 : 512 * 64));
    EXPECT_EQ(small.flops_per_token(10), 6.0 * in_products + 12.0 * 2 * 64 * 10);
  }
}

TEST(Llama, HuggingFaceNamesMapBothWays) {
  EXPECT_EQ(llama_hf_name("layers.11.feed_forward.w2.weight"), "model.layers.11.mlp.down_proj.weight");
  EXPECT_EQ(llama_fqn_from_hf("model.layers.3.self_attn.o_proj.weight"), "layers.3.attention.wo.weight");
  for (const auto& p : debug_model()->named_parameters()) EXPECT_EQ(llama_fqn_from_hf(llama_hf_name(p.key())), p.key());
  EXPECT_THROW(llama_fqn_from_hf("model.layers.x.self_attn.o_proj.weight"), phalanx::Error);
  EXPECT_THROW(llama_fqn_from_hf("transformer.wte.weight"), phalanx::Error);
  EXPECT_THROW(llama_hf_name("layers.0.attention.wz.weight"), phalanx::Error);
  EXPECT_THROW(llama_hf_name("layers.0.attention.wq.weights"), phalanx::Error);
  EXPECT_THROW(llama_fqn_from_hf("model.layers.0.self_attn.q_proj.weights"), phalanx::Error);
}

TEST(Llama, ConfigurationErrorsGiveEquationNumbersAndNearestChoice) {
  const auto message = [](LlamaConfig config) {
    return phalanx::error_text<phalanx::ConfigError>([&] { config.validate(); });
  };
  EXPECT_EQ(message({}), "");
  EXPECT_THAT(message({.dim = 256, .n_heads = 6}), HasSubstr("dim = 256 and n_heads = 6; nearest: n_heads = 4"));
  EXPECT_THAT(message({.dim = 20, .n_heads = 4, .n_kv_heads = 4}),
              HasSubstr("20 / 4 = 5 must be even; nearest: dim = 24"));
  EXPECT_THAT(message({.dim = 256, .n_heads = 8, .n_kv_heads = 3}),
              HasSubstr("8 / 3 is not whole; nearest: n_kv_heads = 2"));
  EXPECT_THAT(message({.n_layers = 0}), HasSubstr("n_layers = 0: expected a positive number"));
  EXPECT_THAT(message({.rope_theta = std::nan("")}), HasSubstr("rope_theta"));
  EXPECT_THAT(message({.rope_theta = 0.0}), HasSubstr("rope_theta = 0: expected above 0"));
  EXPECT_THAT(message({.norm_eps = -1e-5}), HasSubstr("norm_eps = -1e-05: expected 0 or above"));
  EXPECT_THAT(phalanx::error_text<phalanx::ConfigError>([&] { llama_flavor("llama3_8B"); }),
              HasSubstr("did you mean 'llama3_8b'?"));
}

TEST(Llama, RefusesSequencesBeyondItsLengthAndOtherTypes) {
  const auto model = debug_model();
  EXPECT_NO_THROW(model->forward(at::randint(512, {1, 256}, kIds)));
  EXPECT_THROW(model->forward(at::randint(512, {1, 257}, kIds)), phalanx::Error);
  EXPECT_THROW(model->forward(at::randint(512, {7}, kIds)), phalanx::Error);
  EXPECT_THROW(model->loss(at::randint(512, {1, 7}, kIds), at::randint(512, {1, 6}, kIds)), phalanx::Error);
  EXPECT_THROW(model->loss(at::randint(512, {1, 7}, kIds), at::randint(512, {1, 7}, kIds.dtype(at::kInt))),
               phalanx::Error);
}

}  // namespace
