#include "phalanx/models/config/training_flops.h"

#include <gtest/gtest.h>

#include "phalanx/models/config/frozen_parameters.h"

namespace phalanx::models {
namespace training_flops_test {

LlamaConfig four_layers() {
  return {.dim = 16, .n_layers = 4, .n_heads = 4, .n_kv_heads = 2, .ffn_hidden = 40, .vocab_size = 32};
}

// q and o: 16 x 16, k and v: 16 x 8, the net's three: 16 x 40, two norms of 16.
constexpr double kLayer = 2 * 256 + 2 * 128 + 3 * 640 + 2 * 16, kOutput = 32 * 16 + 16, kPosition = 16;

TrainingFlops flops(const std::vector<std::string>& patterns, const LoraOptions& lora = {},
                    const LlamaConfig& config = four_layers()) {
  return training_flops(config, frozen_parameters(config, patterns, lora), lora);
}

TEST(TrainingFlops, OfAllParametersAreThoseOfTheModel) {
  LlamaConfig tied = four_layers(), experts = four_layers();
  tied.tie_embeddings = true;
  experts.family = LlamaFamily::mixtral;
  experts.experts = 4;
  experts.experts_per_token = 2;
  LlamaConfig gpt2 = llama_flavor("debug");
  gpt2.family = LlamaFamily::gpt2;
  gpt2.n_kv_heads = gpt2.n_heads;
  for (const LlamaConfig& config : {four_layers(), tied, experts, gpt2}) {
    EXPECT_DOUBLE_EQ(flops({}, {}, config).per_token(24), config.flops_per_token(24));
  }
}

TEST(TrainingFlops, OfAdaptersLeaveOutTheGradientsOfFrozenWeights) {
  const LoraOptions lora{.rank = 2, .target_modules = {"q_proj"}};
  const double adapter = 2 * (16 + 16);
  EXPECT_DOUBLE_EQ(flops({}, lora).in_products, 4 * (4 * kLayer + kOutput) + 6 * 4 * adapter);
  EXPECT_DOUBLE_EQ(flops({}, lora).per_position, 12 * 4 * kPosition);
}

TEST(TrainingFlops, OfLayersInFrontOfTheFirstTrainedOneAreThoseOfForward) {
  const TrainingFlops half = flops({"tok_embeddings*", "layers.[01].*"});
  EXPECT_DOUBLE_EQ(half.in_products, 2 * 2 * kLayer + 6 * (2 * kLayer + kOutput));
  EXPECT_DOUBLE_EQ(half.per_position, (4 * 2 + 12 * 2) * kPosition);
  // The embedding's gradient goes through all layers.
  EXPECT_DOUBLE_EQ(flops({"layers.*"}).in_products, 4 * 4 * kLayer + 6 * kOutput);
}

// Nothing in front of the output layer has a gradient, but what the adapter's A makes.
TEST(TrainingFlops, OfAnAdapterOfTheOutputLayerAreThoseOfForwardAndItsOwn) {
  const LlamaConfig config = four_layers();
  const LoraOptions lora{.rank = 2, .target_modules = {"lm_head"}};
  EXPECT_DOUBLE_EQ(flops({}, lora).in_products,
                   2 * (4 * kLayer + kOutput) + static_cast<double>(2 * (4 * config.dim + 6 * config.vocab_size)));
}

TEST(TrainedCount, CountsModelAndAdapters) {
  const LoraOptions lora{.rank = 2, .target_modules = {"q_proj"}};
  const TrainedCount count = trained_count(four_layers(), frozen_parameters(four_layers(), {}, lora), lora);
  EXPECT_EQ(count.trained, 4 * 2 * (16 + 16));
  EXPECT_EQ(count.all, four_layers().parameter_count() + count.trained);
  EXPECT_EQ(trained_count(four_layers(), {"norm.weight"}, {}).trained, four_layers().parameter_count() - 16);
}

}  // namespace training_flops_test
}  // namespace phalanx::models
