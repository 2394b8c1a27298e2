// Shared by the trainer's tests: a text with something to learn, runs on threads, and access to the files they leave.
#pragma once

#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/tensor_bytes.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/data/token_file_writer.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/nn/init.h"
#include "phalanx/train/trainer.h"

namespace phalanx::train {

using Weights = std::map<std::string, std::string>;  // name -> bytes

class TrainerTest : public FolderTest {
 protected:
  TrainerTest() {
    // Text with something to learn: a token follows from the one before, with noise from a small generator.
    std::uint32_t state = 1;
    for (int i = 0; i < 6000; ++i) {
      state = state * 1664525U + 1013904223U;
      const std::uint32_t noise = state >> 24;
      tokens_.push_back(noise < 40 || tokens_.empty() ? noise % 512
                                                      : static_cast<std::uint16_t>((tokens_.back() * 7 + 3) % 512));
    }
    write_tokens("tokens.bin", tokens_);
  }

  void write_tokens(const std::string& name, const std::vector<std::uint16_t>& tokens) const {
    std::ofstream file(path(name), std::ios::binary);
    file.write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(2 * tokens.size()));
  }

  /// Documents of 2 to 20 tokens, in the token file "documents".
  void write_documents() const {
    data::TokenFileWriter writer(path("documents"), {.vocab_size = 512});
    for (std::int32_t i = 0; i < 600; ++i) {
      std::vector<std::int32_t> ids;
      for (std::int32_t t = 0; t < 2 + i * 7 % 19; ++t) ids.push_back((i * 31 + t * 7) % 512);
      writer.add_document(ids);
    }
    writer.finish();
  }

  config::TrainConfig config(const std::string& run, std::vector<std::string> more = {}) const {
    std::vector<std::string> flags = {"--model.flavor=debug",
                                      "--training.dataset_path=" + path("tokens.bin"),
                                      "--training.seq_len=32",
                                      "--training.local_batch_size=4",
                                      "--training.global_batch_size=8",
                                      "--training.steps=12",
                                      "--lr_scheduler.warmup_steps=2",
                                      "--optimizer.lr=3e-3",
                                      "--validation.enable",
                                      "--validation.freq=6",
                                      "--metrics.no-enable_tensorboard",
                                      "--checkpoint.interval=100",
                                      "--job.dump_folder=" + path(run)};
    flags.insert(flags.end(), more.begin(), more.end());
    return config::parse_config("", "test", flags);
  }

  /// The keys of a new model of so many experts, of which each token goes through two.
  std::vector<std::string> mixture(std::int64_t experts = 8) const {
    models::LlamaConfig shape = models::llama_flavor("debug");
    shape.family = models::LlamaFamily::mixtral;
    shape.experts = experts;
    shape.experts_per_token = 2;
    shape.max_seq_len = 64;
    std::filesystem::create_directories(path("mixture"));
    std::ofstream(path("mixture/config.json")) << models::llama_hf_config(shape, "float32");
    return {"--model.flavor=hf", "--model.hf_assets_path=" + path("mixture"), "--checkpoint.initial_random_weights"};
  }

  /// How a batch of 8 sequences is distributed. Each data-parallel rank (ranks / tp / pp / cp) has its own share of it.
  struct Layout {
    std::string name;
    int ranks = 1;
    int tp = 1, pp = 1;
    std::vector<std::string> keys = {};
    int cp = 1;
  };
  config::TrainConfig config_of(const Layout& layout, const std::string& run,
                                const std::vector<std::string>& more = {}) const {
    std::vector<std::string> keys = {
        "--training.global_batch_size=8",
        "--training.local_batch_size=" + std::to_string(8 * layout.tp * layout.pp * layout.cp / layout.ranks),
        "--parallelism.pipeline_parallel_degree=" + std::to_string(layout.pp),
        "--parallelism.context_parallel_degree=" + std::to_string(layout.cp),
        "--parallelism.tensor_parallel_degree=" + std::to_string(layout.tp)};
    keys.insert(keys.end(), layout.keys.begin(), layout.keys.end());
    keys.insert(keys.end(), more.begin(), more.end());
    return config(run, std::move(keys));
  }
  static std::vector<std::string> sharded(int stage, int shards = -1) {
    return {"--parallelism.data_parallel_shard_degree=" + std::to_string(shards),
            "--parallelism.zero_stage=" + std::to_string(stage)};
  }

  /// Relative bound for losses of two layouts, which round in another order; it is the design's bound.
  static constexpr double kLossTolerance = 1e-5;
  static void expect_same_losses(const std::vector<double>& found, const std::vector<double>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_NEAR(found[i], expected[i], kLossTolerance * expected[i]) << "line " << i + 1;
    }
  }

  /// Trains on `ranks` threads. Returns the final weights, assembled if they are sharded. Checks that ranks with the
  /// same part have the same values.
  Weights train(const config::TrainConfig& config, int ranks, std::function<bool(int rank)> stop = {}) {
    std::vector<Weights> weights(static_cast<std::size_t>(ranks));
    bool is_model_sharded = false;
    run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
      const int rank = world->rank();
      Trainer trainer(
          config,
          {.world = world, .stop_requested = [&stop, rank] { return stop && stop(rank); }, .quiet = true, .job = job_});
      const TrainResult result = trainer.run();
      if (rank == 0) {
        result_ = result;
        is_model_sharded = trainer.is_model_sharded();
      }
      for (const auto& [name, tensor, shard] : trainer.weights()) {
        if (shard && !shard->is_first_holder()) continue;
        weights[static_cast<std::size_t>(rank)][name] =
            std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
      }
    });
    if (!is_model_sharded) {
      for (const Weights& other : weights) EXPECT_EQ(other, weights[0]);
      return weights[0];
    }
    Weights whole;  // ranks hold consecutive rows
    for (const Weights& part : weights) {
      for (const auto& [name, rows] : part) whole[name] += rows;
    }
    return whole;
  }

  /// A run of 12 steps that is stopped after each 4 and goes on in the next layout.
  void train_in_parts(const std::vector<Layout>& layouts, const std::string& run) {
    // Only the steps themselves ask whether to stop.
    const std::vector<std::string> steps_alone = {"--training.steps=12", "--validation.freq=100",
                                                  "--checkpoint.interval=100"};
    std::int64_t step = 4;
    for (const Layout& layout : layouts) {
      SCOPED_TRACE(layout.name);
      train(config_of(layout, run, steps_alone), layout.ranks,
            [asked = std::make_shared<std::atomic<int>>(0), &layout](int) {
              return asked->fetch_add(1) / layout.ranks >= 3;
            });
      EXPECT_EQ(result_.step, step);
      step += 4;
    }
  }

  std::vector<double> losses(const std::string& run) const {
    std::ifstream file(path(run) + "/metrics.jsonl");
    std::vector<double> values;
    for (std::string line; std::getline(file, line);) {
      const auto entry = nlohmann::json::parse(line);
      if (entry.contains("loss")) values.push_back(entry["loss"].get<double>());
    }
    return values;
  }

  template <class E>
  std::string refusal(const config::TrainConfig& config, int ranks = 1) {
    return error_text<E>([&] { train(config, ranks); });
  }

  /// Lines of metrics.jsonl that have this key.
  std::vector<nlohmann::json> lines_with(const std::string& run, const std::string& key) const {
    std::ifstream file(path(run) + "/metrics.jsonl");
    std::vector<nlohmann::json> entries;
    for (std::string line; std::getline(file, line);) {
      auto entry = nlohmann::json::parse(line);
      if (entry.contains(key)) entries.push_back(std::move(entry));
    }
    return entries;
  }
  std::vector<double> values_of(const std::string& run, const std::string& key) const {
    std::vector<double> values;
    for (const auto& entry : lines_with(run, key)) values.push_back(entry[key].get<double>());
    return values;
  }
  std::vector<std::string> checkpoints_of(const std::string& run) const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path(run) + "/checkpoint")) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  /// All that a checkpoint of one rank holds.
  TrainState state_in(const std::string& run, int step) const {
    return state_in_folder(path(run) + "/checkpoint", step);
  }
  static TrainState state_in_folder(const std::string& folder, int step) {
    const CheckpointReader reader(folder + "/step-" + std::to_string(step));
    TrainState state;
    state.integers = reader.manifest().integers;
    for (const ManifestFile& file : reader.manifest().files) {
      const safetensors::File shard((reader.folder() / file.name).string());
      for (const auto& info : shard.tensors()) {
        state.tensors.push_back({info.name, at::empty(info.shape, scalar_type_of(info.dtype))});
      }
    }
    reader.read(state.tensors);
    return state;
  }
  std::vector<std::int64_t> bucket_order_of(const std::string& run, int step) const {
    const CheckpointReader reader(path(run) + "/checkpoint/step-" + std::to_string(step));
    std::int64_t size = 0;
    for (const ManifestFile& file : reader.manifest().files) {
      const safetensors::File shard((reader.folder() / file.name).string());
      if (const auto* part = shard.find("layout.ddp.bucket_order")) size += part->shape[0];
    }
    const at::Tensor order = at::empty({size}, at::kLong);
    reader.read({{"layout.ddp.bucket_order", order}}, {.allow_unexpected = true});
    return {order.const_data_ptr<std::int64_t>(), order.const_data_ptr<std::int64_t>() + size};
  }
  static std::function<bool(int)> stop_after_first_step() {
    return [](int) { return true; };
  }

  std::vector<std::uint16_t> tokens_;
  RunJob job_;
  TrainResult result_;
};

}  // namespace phalanx::train
