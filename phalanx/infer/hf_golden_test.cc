// Models read from directories as transformers writes them give what transformers computes with them (golden numbers of
// scripts/make_hf_golden.py): logits, greedy generation, losses in training, and the same in every layout.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/hf_weights.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/infer/generator.h"
#include "phalanx/infer/model_files.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/hf_names.h"
#include "phalanx/models/config/hf_unsupported.h"
#include "phalanx/models/config/llama_json.h"
#include "phalanx/models/expert_bias.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/llama_parallel.h"
#include "phalanx/models/testing/golden_weight.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/fsdp/fully_shard.h"

namespace phalanx::infer {
namespace {

const nlohmann::json& golden_cases() {
  static const nlohmann::json cases =
      nlohmann::json::parse(std::ifstream(std::string(PHALANX_MODELS_TESTDATA) + "/hf_golden.json"));
  return cases;
}

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& [name, golden] : golden_cases().items()) names.push_back(name);
  return names;
}

/// A directory with config.json, two files of weights and their index.
void write_model(const std::filesystem::path& folder, const nlohmann::json& golden) {
  write_file(folder / "config.json", golden["config"].dump());
  std::vector<NamedTensor> files[2];
  nlohmann::json index;
  for (const auto& [name, shape] : golden["tensors"].items()) {
    const bool is_bytes = name.ends_with(kMxfp4Blocks) || name.ends_with(kMxfp4Scales);
    const at::Tensor tensor =
        at::empty(shape.get<std::vector<std::int64_t>>(), at::TensorOptions(is_bytes ? at::kByte : at::kFloat));
    models::set_golden_weight(name, tensor, golden["config"]["model_type"] == "gemma3_text");
    const std::size_t file = index["weight_map"].size() % 2;
    files[file].push_back({name, tensor});
    index["weight_map"][name] = file == 0 ? "model-00001-of-00002.safetensors" : "model-00002-of-00002.safetensors";
  }
  for (const std::size_t file : {0, 1}) {
    export_weights(folder / (file == 0 ? "model-00001-of-00002.safetensors" : "model-00002-of-00002.safetensors"),
                   files[file], {}, posix_file_system());
  }
  write_file(folder / "model.safetensors.index.json", index.dump());
}

/// Position by position, 1e-4 at most.
void expect_golden_logits(const at::Tensor& logits, const nlohmann::json& golden) {
  const std::int64_t step = golden["logits_step"];
  std::vector<float> expected;
  for (const auto& row : golden["logits"]) {
    for (const auto& logit : row) expected.push_back(logit.get<float>());
  }
  const at::Tensor found = logits.detach()[0].slice(0, 0, std::nullopt, step).reshape({-1});
  ASSERT_EQ(found.numel(), static_cast<std::int64_t>(expected.size()));
  EXPECT_LT((found - at::tensor(expected)).abs().max().item<double>(), 1e-4);
}

at::Tensor golden_tokens(const nlohmann::json& golden) {
  return at::tensor(golden["tokens"].get<std::vector<std::int64_t>>(), at::TensorOptions(at::kLong)).unsqueeze(0);
}

/// `parameters` of the model, or its shards, and the biases of its experts, if they are a part of its weights.
std::uint64_t load_bytes(const std::filesystem::path& folder, models::Llama& model,
                         std::vector<NamedTensor> parameters) {
  const models::LlamaConfig& config = model.config();
  if (config.has_expert_biases()) std::ranges::copy(models::make_expert_biases(model), std::back_inserter(parameters));
  const bool is_whole = model.part().is_whole(config);
  return load_weights(folder, parameters, is_whole ? hf_weights(config) : hf_weights_of_part(config)).bytes;
}

/// What load_model() of the directory fails with; "" if it does not.
std::string load_error(const std::filesystem::path& folder) {
  return error_text([&] { load_model(find_model(folder), at::kCPU); });
}

class HuggingFaceModel : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    golden_ = golden_cases()[GetParam()];
    write_model(scratch_.path(), golden_);
  }
  /// Runs `use` on four ranks, with the model sharded over two and its matrices cut over two.
  void on_sharded_ranks(
      const std::function<void(models::Llama&, FullyShardedDataParallel&, const DeviceMesh&)>& use) const {
    const models::LlamaConfig config = find_model(scratch_.path()).config;
    run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
      const DeviceMesh mesh(world, {{"dp_shard", 2}, {"tp", 2}});
      models::Llama model(config, {.without_memory = true});
      models::parallelize_llama(model, mesh);
      FullyShardedDataParallel sharded(model, mesh);
      load_bytes(scratch_.path(), model, sharded.parameters());
      sharded.invalidate_unsharded();
      use(model, sharded, mesh);
    });
  }

  TempDirectory scratch_{"hf_model"};
  nlohmann::json golden_;
};

TEST_P(HuggingFaceModel, LogitsAreTransformers) {
  const auto model = load_model(find_model(scratch_.path()), at::kCPU);
  std::set<std::string> in_files;
  for (const auto& [tensor, shape] : models::llama_weight_shapes(model->config())) {
    in_files.insert(models::hf_tensor_view(model->config(), tensor).name);
  }
  // A matrix in 4 bits is in two tensors.
  std::size_t scales = 0;
  for (const auto& [name, shape] : golden_["tensors"].items()) scales += name.ends_with(kMxfp4Scales) ? 1 : 0;
  EXPECT_EQ(in_files.size() + scales, golden_["tensors"].size());
  std::int64_t elements = 0;
  for (const auto& parameter : nn::named_parameters(*model)) elements += parameter.tensor.numel();
  EXPECT_EQ(model->config().parameter_count(), elements);
  expect_golden_logits(model->forward(golden_tokens(golden_)), golden_);
}

TEST_P(HuggingFaceModel, GreedyGenerationIsTransformers) {
  const auto model = load_model(find_model(scratch_.path()), at::kCPU);
  Generator generator(*model, {.max_batch = 2});
  const auto tokens = golden_["tokens"].get<std::vector<std::int64_t>>();
  const auto expected = golden_["generated"].get<std::vector<std::int64_t>>();
  const Request whole{.prompt = {tokens.begin(), tokens.begin() + golden_["prompt"].get<std::int64_t>()},
                      .max_new_tokens = static_cast<std::int64_t>(expected.size()),
                      .sampling = {.temperature = 0.0}};
  EXPECT_EQ(generator.generate({whole})[0].tokens, expected);
  Request shorter = whole;
  shorter.prompt.resize(3);
  shorter.max_new_tokens = 8;
  const auto both = generator.generate({whole, shorter});
  EXPECT_EQ(both[0].tokens, expected);
  if (model->config().rope_scaling.type == RopeScalingType::dynamic) return;  // rows share the longest one's angles
  EXPECT_EQ(both[1].tokens, generator.generate({shorter})[0].tokens);
}

// Runs four passes; each is compared with one pass over everything it sees. Keys in the cache keep their rotation. So
// under scaling that depends on the length the two differ beyond the length at which scaling begins.
TEST_P(HuggingFaceModel, WhatACacheHoldsIsSeenAsInOnePass) {
  const auto model = load_model(find_model(scratch_.path()), at::kCPU);
  const RopeScaling& scaling = model->config().rope_scaling;
  const at::Tensor tokens = golden_tokens(golden_);
  auto cache = model->make_cache(1, tokens.size(1));
  for (const auto& [first, count] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 3}, {3, 9}, {12, 1}, {13, 11}}) {
    if (scaling.depends_on_length() && first + count > scaling.original_max_seq_len) break;
    const at::Tensor whole = model->forward(tokens.narrow(1, 0, first + count)).detach();
    const at::Tensor logits = model->forward(tokens.narrow(1, first, count), cache);
    EXPECT_LT((logits[0] - whole[0][first + count - 1]).abs().max().item<double>(), 1e-5) << first;
  }
}

TEST_P(HuggingFaceModel, EveryLayoutGivesTheSame) {
  const models::LlamaConfig config = find_model(scratch_.path()).config;
  const at::Tensor tokens = golden_tokens(golden_);
  for (const bool sequence_parallel : {true, false}) {
    for (const int tp : {2, 4}) {
      run_local_ranks(tp, [&](const std::shared_ptr<Communicator>& world) {
        const DeviceMesh mesh(world, {{"tp", tp}});
        models::Llama model(config);
        models::parallelize_llama(model, mesh, {.sequence_parallel = sequence_parallel});
        load_bytes(scratch_.path(), model, nn::named_parameters(model));
        expect_golden_logits(model.forward(tokens), golden_);
      });
    }
  }
  on_sharded_ranks([&](models::Llama& model, FullyShardedDataParallel&, const DeviceMesh&) {
    expect_golden_logits(nn::call(model, tokens), golden_);
  });
  at::Tensor x = tokens;
  const auto parts = models::divide_llama(config, {0.5, static_cast<double>(config.n_layers) - 0.5});
  for (const auto& part : parts) {
    models::Llama stage(config, part);
    load_bytes(scratch_.path(), stage, nn::named_parameters(stage));
    x = stage.forward(x).detach();
  }
  expect_golden_logits(x, golden_);
}

// As in `phalanx generate`: each rank loads its part, by layers, by tensor parallelism and both.
TEST_P(HuggingFaceModel, EveryLayoutGeneratesTheSame) {
  const ModelFiles files = find_model(scratch_.path());
  const auto tokens = golden_["tokens"].get<std::vector<std::int64_t>>();
  const auto expected = golden_["generated"].get<std::vector<std::int64_t>>();
  const Request request{.prompt = {tokens.begin(), tokens.begin() + golden_["prompt"].get<std::int64_t>()},
                        .max_new_tokens = static_cast<std::int64_t>(expected.size()),
                        .sampling = {.temperature = 0.0}};
  Request shorter = request;
  shorter.prompt.resize(3);
  shorter.max_new_tokens = 5;
  for (const ParallelPlan& plan : {ParallelPlan{.pp = 2}, {.tp = 2}, {.pp = 2, .tp = 2}}) {
    run_local_ranks(static_cast<int>(plan.ranks()), [&](const std::shared_ptr<Communicator>& world) {
      const DeviceMesh mesh(world, plan.axes());
      const auto part = load_model_shard(files, plan, mesh, at::kCPU);
      Generator generator(*part, {.max_batch = 2, .stages = plan.pp > 1 ? mesh.communicator("pp") : nullptr});
      EXPECT_EQ(generator.generate({shorter, request})[1].tokens, expected) << plan.text() << ", " << world->rank();
    });
  }
}

/// The batches of make_hf_golden.py.
at::Tensor training_tokens(std::int64_t step, std::int64_t seq) {
  constexpr std::int64_t kBatch = 4;
  const at::Tensor row = at::arange(kBatch, at::kLong).add(kBatch * step).unsqueeze(1);
  const at::Tensor column = at::arange(seq + 1, at::kLong).unsqueeze(0);
  return at::remainder(row.mul(7).add(column.mul(row.remainder(3).add(1))), 61);
}

/// Trains on this rank's rows of each batch, as torch's AdamW does.
void expect_golden_losses(models::Llama& model, const std::vector<NamedTensor>& parameters,
                          const nlohmann::json& golden, Communicator* data_ranks = nullptr) {
  AdamW optimizer(parameters, {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1});
  const auto seq = static_cast<std::int64_t>(golden["tokens"].size());
  const auto expected = golden["losses"].get<std::vector<double>>();
  for (std::size_t step = 0; step < expected.size(); ++step) {
    at::Tensor batch = training_tokens(static_cast<std::int64_t>(step), seq);
    if (data_ranks != nullptr) batch = batch.chunk(data_ranks->size(), 0)[static_cast<std::size_t>(data_ranks->rank())];
    at::Tensor loss = model.loss(batch.narrow(1, 0, seq), batch.narrow(1, 1, seq));
    loss.backward();
    optimizer.step(golden["learning_rate"].get<double>());
    optimizer.zero_grad();
    loss = loss.detach().clone();
    if (data_ranks != nullptr) data_ranks->all_reduce(loss, {.op = ReduceOp::avg});
    EXPECT_NEAR(loss.item<double>(), expected[step], 2e-5 * expected[step]) << "step " << step;
  }
}

TEST_P(HuggingFaceModel, TrainingLossesAreTransformers) {
  const models::LlamaConfig config = find_model(scratch_.path()).config;
  {
    const auto model = load_model(find_model(scratch_.path()), at::kCPU);
    expect_golden_losses(*model, nn::named_parameters(*model), golden_);
  }
  golden_["losses"].erase(golden_["losses"].begin() + 6, golden_["losses"].end());  // the others take long
  for (const auto& [tp, sequence_parallel] : {std::pair(2, true), {4, false}}) {
    run_local_ranks(tp, [&, tp = tp, sequence_parallel = sequence_parallel](const auto& world) {
      SCOPED_TRACE(testing::Message() << tp << " ranks, sequence parallel " << sequence_parallel);
      const DeviceMesh mesh(world, {{"tp", tp}});
      models::Llama model(config);
      models::parallelize_llama(model, mesh, {.sequence_parallel = sequence_parallel});
      load_bytes(scratch_.path(), model, nn::named_parameters(model));
      expect_golden_losses(model, nn::named_parameters(model), golden_);
    });
  }
  on_sharded_ranks([&](models::Llama& model, FullyShardedDataParallel& sharded, const DeviceMesh& mesh) {
    SCOPED_TRACE("sharded and tensor parallel");
    expect_golden_losses(model, sharded.parameters(), golden_, mesh.communicator("dp_shard").get());
  });
}

TEST_P(HuggingFaceModel, ItsDescriptionComesBack) {
  const models::LlamaConfig config = find_model(scratch_.path()).config;
  const std::string text = models::llama_hf_config(config, "float32");
  EXPECT_EQ(models::llama_config_from_hf(text, "config.json"), config);
  EXPECT_THAT(models::hf_unsupported(golden_["config"].dump(), "f"), Not(HasSubstr("not read")));
  // What was read can be written again.
  const auto written = nlohmann::json::parse(text);
  for (const char* key : {"model_type",
                          "hidden_size",
                          "intermediate_size",
                          "num_attention_heads",
                          "num_hidden_layers",
                          "num_key_value_heads",
                          "max_position_embeddings",
                          "tie_word_embeddings",
                          "rms_norm_eps",
                          "vocab_size",
                          "n_embd",
                          "n_layer",
                          "n_head",
                          "n_positions",
                          "layer_norm_epsilon",
                          "num_local_experts",
                          "num_experts_per_tok",
                          "moe_intermediate_size",
                          "norm_topk_prob",
                          "no_rope_layers",
                          "query_pre_attn_scalar",
                          "layer_types",
                          "original_max_position_embeddings",
                          "head_dim",
                          "hidden_activation"}) {
    if (!golden_["config"].contains(key) || golden_["config"][key].is_null()) continue;
    // Of layers without experts, or of no effect on this model.
    if (key == std::string_view("intermediate_size") && golden_["config"].contains("moe_intermediate_size")) continue;
    const std::set<std::string> may_be_missing = {"layer_types", "original_max_position_embeddings",
                                                  "num_local_experts"};
    if (may_be_missing.contains(key) && !written.contains(key)) continue;
    EXPECT_EQ(written[key], golden_["config"][key]) << key;
  }
}

TEST(HuggingFaceDirectory, SixteenBitWeightsAreWidened) {
  const TempDirectory scratch("hf_model");
  write_model(scratch.path(), golden_cases()["qwen2"]);
  const auto exact = load_model(find_model(scratch.path()), at::kCPU);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const TempDirectory narrow("hf_model");
    write_file(narrow.path() / "config.json", golden_cases()["qwen2"]["config"].dump());
    export_weights(narrow.path() / "model.safetensors", nn::named_parameters(*exact),
                   {.key_mapping = models::llama_hf_name, .dtype = dtype}, posix_file_system());
    const auto model = load_model(find_model(narrow.path()), at::kCPU);
    const auto found = nn::named_parameters(*model), whole = nn::named_parameters(*exact);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(found[i].tensor.equal(whole[i].tensor.detach().to(dtype).to(at::kFloat))) << whole[i].name;
    }
  }
}

TEST(HuggingFaceDirectory, EachRankTakesItsPartOfTheFiles) {
  const TempDirectory scratch("hf_model");
  write_model(scratch.path(), golden_cases()["llama"]);
  const models::LlamaConfig config = find_model(scratch.path()).config;
  std::vector<std::uint64_t> bytes(4);
  run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
    const DeviceMesh mesh(world, {{"dp_shard", 2}, {"tp", 2}});
    models::Llama model(config, {.without_memory = true});
    models::parallelize_llama(model, mesh);
    const FullyShardedDataParallel sharded(model, mesh);
    bytes[static_cast<std::size_t>(world->rank())] = load_bytes(scratch.path(), model, sharded.parameters());
  });
  const auto whole = static_cast<std::uint64_t>(config.parameter_count()) * 4;
  // Norms are full on both ranks of a tensor-parallel group: 5 of 32 elements.
  EXPECT_EQ(bytes[0] + bytes[1] + bytes[2] + bytes[3], whole + 5 * 32 * 4);
  for (const std::uint64_t mine : bytes) EXPECT_LT(mine, whole / 3);
}

// One error that names the file and the reason.
TEST(HuggingFaceDirectory, WhatIsWrongWithItIsNamed) {
  const nlohmann::json& golden = golden_cases()["llama"];
  const std::string first = "model-00001-of-00002.safetensors", index = "model.safetensors.index.json";
  const auto error = [&](const std::function<void(const std::filesystem::path&)>& spoil) {
    const TempDirectory scratch("hf_model");
    write_model(scratch.path(), golden);
    EXPECT_EQ(load_error(scratch.path()), "");
    spoil(scratch.path());
    return load_error(scratch.path());
  };
  const auto with_config = [&](const char* key, const nlohmann::json& value) {
    return error([&](const auto& folder) {
      nlohmann::json config = golden["config"];
      config[key] = value;
      write_file(folder / "config.json", config.dump());
    });
  };
  EXPECT_THAT(error([&](const auto& folder) {
                std::filesystem::resize_file(folder / first, std::filesystem::file_size(folder / first) - 1);
              }),
              HasSubstr(first));
  EXPECT_THAT(error([&](const auto& folder) { std::filesystem::resize_file(folder / first, 5); }), HasSubstr(first));
  EXPECT_THAT(error([&](const auto& folder) { std::filesystem::remove(folder / first); }),
              AllOf(HasSubstr(index), HasSubstr(first)));
  EXPECT_THAT(error([&](const auto& folder) {
                write_file(folder / index, R"({"weight_map": {"lm_head.weight": "../lm_head.safetensors"}})");
              }),
              AllOf(HasSubstr(index), HasSubstr("in the same directory")));
  EXPECT_THAT(error([&](const auto& folder) {
                write_file(folder / index, R"({"weight_map": {"lm_head.weight": ")" + first + R"("}})");
              }),
              HasSubstr("is missing"));
  EXPECT_THAT(error([&](const auto& folder) { std::filesystem::remove(folder / index); }),
              HasSubstr("expected model.safetensors.index.json"));
  EXPECT_THAT(error([&](const auto& folder) { write_file(folder / "config.json", "{\"model_type\": "); }),
              HasSubstr("config.json: not valid JSON at column"));
  EXPECT_THAT(with_config("intermediate_size", 41), HasSubstr("\"model.layers.0.mlp.down_proj.weight\": expected F32 "
                                                              "[32, 41], found F32 [32, 40]"));
  EXPECT_THAT(with_config("num_hidden_layers", 3), HasSubstr("\"model.layers.2.self_attn.q_proj.weight\" is missing"));
  EXPECT_THAT(with_config("num_hidden_layers", 1),
              HasSubstr("\"model.layers.1.input_layernorm.weight\" is unexpected"));
  EXPECT_THAT(with_config("tie_word_embeddings", nlohmann::json::array()), HasSubstr("\"tie_word_embeddings\" is []"));
  EXPECT_THAT(with_config("model_type", "qwen2"), HasSubstr("\"model.layers.0.self_attn.k_proj.bias\" is missing"));
}

INSTANTIATE_TEST_SUITE_P(Transformers, HuggingFaceModel, testing::ValuesIn(golden_names()),
                         [](const auto& name) { return name.param; });

}  // namespace
}  // namespace phalanx::infer
