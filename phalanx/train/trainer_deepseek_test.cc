// DeepSeek-V3's biases by which experts are chosen are a part of its weights:
// trained, resumed, exported and read again.
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/train/testing/expert_biases.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train::trainer_deepseek_test {
namespace {

using Keys = std::vector<std::string>;

Keys operator+(Keys keys, const Keys& more) {
  keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}

class TrainerDeepSeekTest : public TrainerTest {
 protected:
  static std::vector<std::string> keys(std::vector<std::string> more) {
    more.insert(more.end(), {"--model.name=deepseek_v3", "--model.flavor=debug", "--lr_scheduler.decay_ratio=0"});
    return more;
  }
  /// Those of the two layers of experts, behind one without.
  at::Tensor biases_of(const std::string& run) const { return expert_biases_of(path(run), {1, 2}); }
};

TEST_F(TrainerDeepSeekTest, BiasesAreExportedInFloat32AndReadAgain) {
  const std::vector<std::string> moves = {"--training.moe_router_enable_expert_bias",
                                          "--training.moe_router_bias_update_rate=0.0123"};
  auto exported = moves;
  exported.insert(exported.end(),
                  {"--training.steps=3", "--checkpoint.last_save_in_hf", "--checkpoint.export_dtype=bfloat16"});
  train(config_of({.ranks = 4, .pp = 2, .keys = keys(sharded(3, 2) + exported)}, "run"), 4);
  const at::Tensor biases = biases_of("run");
  EXPECT_GT(biases.abs().max().item<double>(), 0.01);

  const std::string hf = path("run") + "/hf";
  const safetensors::File file(hf + "/model.safetensors");
  int found = 0;
  for (const auto& tensor : file.tensors()) {
    const bool is_bias = tensor.name.ends_with(".mlp.gate.e_score_correction_bias");
    EXPECT_EQ(tensor.dtype, is_bias ? safetensors::Dtype::f32 : safetensors::Dtype::bf16) << tensor.name;
    if (!is_bias) continue;
    const auto bytes = file.bytes(tensor);
    const at::Tensor row = biases[tensor.name.find("layers.1.") != std::string::npos ? 0 : 1].contiguous();
    EXPECT_EQ(std::memcmp(bytes.data(), row.const_data_ptr(), bytes.size()), 0) << tensor.name;
    ++found;
  }
  EXPECT_EQ(found, 2);

  // A run that begins with these files leaves the biases as they are, unless it is to move them.
  const std::vector<std::string> from_there = {"--model.flavor=hf", "--model.hf_assets_path=" + hf,
                                               "--checkpoint.initial_load_in_hf", "--training.steps=1",
                                               "--lr_scheduler.decay_ratio=0"};
  for (const Layout& layout :
       {Layout{.name = "one", .keys = from_there}, Layout{.name = "pp", .ranks = 2, .pp = 2, .keys = from_there},
        Layout{.name = "tp", .ranks = 2, .tp = 2, .keys = from_there}}) {
    train(config_of(layout, layout.name), layout.ranks);
    EXPECT_TRUE(at::equal(biases_of(layout.name), biases)) << layout.name;
  }
  train(config_of({.keys = from_there + moves}, "moved"), 1);
  EXPECT_FALSE(at::equal(biases_of("moved"), biases));
}

TEST_F(TrainerDeepSeekTest, AnotherLayoutGoesOnWithTheBiases) {
  const std::vector<std::string> moves = {"--training.moe_router_enable_expert_bias",
                                          "--training.moe_router_bias_update_rate=0.02"};
  train(config_of({.keys = keys(moves)}, "same"), 1);
  train(config_of({.ranks = 4, .tp = 2, .keys = keys(sharded(3, 2) + moves)}, "parts", {"--training.steps=6"}), 4);
  train(config_of({.ranks = 2, .pp = 2, .keys = keys(moves)}, "parts"), 2);
  expect_same_losses(losses("parts"), losses("same"));
  EXPECT_TRUE(at::equal(biases_of("parts"), biases_of("same")));
}

TEST_F(TrainerDeepSeekTest, FilesWithoutBiasesAreRefused) {
  train(config_of({.keys = keys({"--training.steps=1", "--checkpoint.last_save_in_hf"})}, "run"), 1);
  const std::filesystem::path file = path("run") + "/hf/model.safetensors";
  std::vector<NamedTensor> kept;
  {
    const safetensors::File weights(file.string());
    for (const auto& tensor : weights.tensors()) {
      if (tensor.name.ends_with("e_score_correction_bias")) continue;
      kept.push_back({tensor.name, at::zeros(tensor.shape)});
    }
  }
  export_weights(file, kept, {}, posix_file_system());
  EXPECT_THAT(
      refusal<CheckpointError>(config_of({.keys = {"--model.flavor=hf", "--model.hf_assets_path=" + path("run") + "/hf",
                                                   "--checkpoint.initial_load_in_hf", "--training.steps=1"}},
                                         "again")),
      testing::HasSubstr("model.layers.1.mlp.gate.e_score_correction_bias"));
}

}  // namespace
}  // namespace phalanx::train::trainer_deepseek_test
