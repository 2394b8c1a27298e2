// A model that bitsandbytes has quantised is used with an adapter, and its matrices stay as they are.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/adapter_weights.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/infer/model_files.h"
#include "phalanx/kernels/nf4.h"
#include "phalanx/models/config/hf_names.h"
#include "phalanx/models/config/testing/tiny_hf_config.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/lora.h"
#include "phalanx/nn/init.h"

namespace phalanx::infer {
namespace four_bit_base_test {

class FourBitBaseTest : public FolderTest {
 protected:
  static models::LlamaConfig config() {
    return {.dim = 128,
            .n_layers = 2,
            .n_heads = 4,
            .n_kv_heads = 2,
            .ffn_hidden = 256,
            .vocab_size = 32,
            .max_seq_len = 12,
            .rope_theta = 20000.0,
            .norm_eps = 3e-5};
  }

  /// The folders "base" and "adapter". Returns a model in float32 with the values of both, those of the base rounded.
  std::shared_ptr<models::Llama> write() const {
    const at::NoGradGuard no_grad;
    auto model = std::make_shared<models::Llama>(config());
    models::add_lora(*model, lora_);
    nn::initialise(*model, 5);
    const auto all = nn::named_parameters(*model);
    save_adapter(path("adapter"), config(), lora_, all, {.base_name = "base", .metadata = ""});
    const auto tables = kernels::Nf4Tables::make(at::kCPU);
    std::vector<NamedTensor> in_files;
    for (const NamedTensor& one : base_among(all)) {
      const std::string name = models::hf_tensor_view(config(), one.name).name;
      if (one.name.find("layers.") == std::string::npos || one.tensor.dim() != 2) {
        in_files.push_back({name, one.tensor.clone()});
        one.tensor.copy_(one.tensor.to(at::kBFloat16));
        continue;
      }
      const std::int64_t rows = one.tensor.size(0), columns = one.tensor.size(1),
                         scales = (rows * columns / 64 + 255) / 256;
      const kernels::Nf4Weight stored = kernels::quantise_nf4(one.tensor, tables);
      one.tensor.copy_(kernels::dequantise_nf4(stored, {.columns = columns}, at::kFloat));
      const at::Tensor nested = stored.nested.view(at::kFloat);
      const std::string state = fmt::format(
          R"({{"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [{}, {}], "nested_blocksize": 256, )"
          R"("nested_dtype": "float32", "nested_offset": {:.17g}}})",
          rows, columns, nested[scales].item<float>());
      const at::Tensor text = at::empty({static_cast<std::int64_t>(state.size())}, at::TensorOptions(at::kByte));
      std::memcpy(text.mutable_data_ptr(), state.data(), state.size());
      in_files.insert(in_files.end(), {{name, stored.codes.view({-1, 1})},
                                       {name + ".absmax", stored.absmax.flatten()},
                                       {name + ".nested_absmax", nested.narrow(0, 0, scales).clone()},
                                       {name + ".quant_map", tables->values.clone()},
                                       {name + ".nested_quant_map", tables->scales.clone()},
                                       {name + ".quant_state.bitsandbytes__nf4", text}});
    }
    std::filesystem::create_directory(path("base"));
    export_weights(path("base/model.safetensors"), in_files, {}, posix_file_system());
    nlohmann::json description = models::tiny_hf_config();
    description.update({{"hidden_size", 128},
                        {"num_hidden_layers", 2},
                        {"num_attention_heads", 4},
                        {"num_key_value_heads", 2},
                        {"intermediate_size", 256},
                        {"vocab_size", 32},
                        {"quantization_config",
                         {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}, {"bnb_4bit_quant_type", "nf4"}}}});
    write_file(path("base/config.json"), description.dump());
    model->eval();
    return model;
  }
  ModelFiles files() const {
    ModelFiles found = find_model(path("base"));
    take_adapter(found, path("adapter"), /*allow_base_mismatch=*/false);
    return found;
  }

  const models::LoraOptions lora_{.rank = 3, .alpha = 6, .zero_b = false};
  const at::Tensor tokens_ = at::arange(16, at::kLong).view({2, 8});
};

TEST_F(FourBitBaseTest, ComputesWithAnAdapterWhatTheWideMatricesDo) {
  const at::NoGradGuard no_grad;
  const at::Tensor expected = write()->forward(tokens_);
  const auto model = load_model(files(), at::kCPU);
  std::map<std::string, at::Tensor> parameters;
  for (const NamedTensor& one : nn::named_parameters(*model)) parameters[one.name] = one.tensor;
  EXPECT_EQ(parameters.at("layers.0.attention.wq.weight").scalar_type(), at::kByte);
  EXPECT_EQ(parameters.at("layers.1.feed_forward.w2.lora_A").scalar_type(), at::kFloat);
  EXPECT_TRUE(at::allclose(model->forward(tokens_), expected, 1e-4, 1e-5));
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    const at::NoGradGuard no_grad_here;
    const auto part = load_model_shard(files(), {.tp = 2}, DeviceMesh(world, ParallelPlan{.tp = 2}.axes()), at::kCPU);
    EXPECT_TRUE(at::allclose(part->forward(tokens_), expected, 1e-4, 1e-5));
  });
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    const auto stage = load_model_shard(files(), {.pp = 2}, DeviceMesh(world, ParallelPlan{.pp = 2}.axes()), at::kCPU);
    std::size_t matrices = 0;
    for (const NamedTensor& one : nn::named_parameters(*stage)) {
      EXPECT_TRUE(at::equal(one.tensor, parameters.at(one.name))) << one.name;
      matrices += one.tensor.scalar_type() == at::kByte ? 1 : 0;
    }
    EXPECT_GT(matrices, 0U);
  });
  std::map<std::string, at::Tensor> merged;
  for (const NamedTensor& one : merged_weights(nn::named_parameters(*model), config(), files().lora)) {
    merged[one.name] = one.tensor;
  }
  models::Llama wide(config());
  for (const NamedTensor& one : nn::named_parameters(wide)) one.tensor.copy_(merged.at(one.name));
  EXPECT_TRUE(at::allclose(wide.forward(tokens_), expected, 1e-4, 1e-5));
}

TEST_F(FourBitBaseTest, IsRefusedAloneAndWhereMatricesOrPartsAreMissingOrMore) {
  write();
  EXPECT_THAT(error_text<CheckpointError>([&] { load_model(find_model(path("base")), at::kCPU); }),
              AllOf(HasSubstr("base holds matrices in 4 bits, of bitsandbytes"),
                    HasSubstr("expected an adapter as well (--adapter)")));
  const std::string file = path("base/model.safetensors");
  std::vector<NamedTensor> tensors;
  {
    const safetensors::File complete(file);
    for (const auto& info : complete.tensors()) {
      const auto type = info.dtype == safetensors::Dtype::u8 ? at::kByte : at::kFloat;
      tensors.push_back({info.name, at::empty(info.shape, at::TensorOptions(type))});
    }
  }
  load_weights(file, tensors);
  const auto refusal = [&](const std::vector<NamedTensor>& changed) {
    export_weights(file, changed, {}, posix_file_system());
    return error_text<CheckpointError>([&] { load_model(files(), at::kCPU); });
  };
  std::vector<NamedTensor> more = tensors, fewer = tensors;
  constexpr std::string_view kUp = "model.layers.1.mlp.up_proj", kOther = "model.layers.1.mlp.other_proj";
  for (const NamedTensor& one : tensors) {
    if (one.name.starts_with(kUp)) more.push_back({std::string(kOther) + one.name.substr(kUp.size()), one.tensor});
  }
  EXPECT_THAT(refusal(more), HasSubstr("model.layers.1.mlp.other_proj.weight"));
  std::erase_if(fewer, [&](const NamedTensor& one) { return one.name == std::string(kUp) + ".weight.nested_absmax"; });
  EXPECT_THAT(refusal(fewer),
              HasSubstr("has no \"model.layers.1.mlp.up_proj.weight.nested_absmax\": its scales are not quantised"));
  EXPECT_EQ(refusal(tensors), "");
}

}  // namespace four_bit_base_test
}  // namespace phalanx::infer
