#include "phalanx/checkpoint/files/weights_description.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/files/rewrite.h"
#include "phalanx/checkpoint/testing/test_state.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx {
namespace {

using checkpoint_testing::make_state;

models::LlamaConfig described_model() {
  models::LlamaConfig config = models::llama_flavor("debug");
  config.rope_theta = 777;
  return config;
}

TEST(WeightsDescription, GoesWithTheWeightsWhereverTheyAreWritten) {
  const TempDirectory scratch;
  const nlohmann::json model = models::llama_metadata(described_model());
  const nlohmann::json metadata = {
      {"model", model},
      {"hf_assets_path", "/a/place"},
      {"run", {{"version", 1}, {"tokenizer", {{"hash", "x"}}}, {"settings", {{"dataset_path", "/a/secret"}}}}}};
  const nlohmann::json kept = {{"model", model}, {"run", {{"version", 1}, {"tokenizer", {{"hash", "x"}}}}}};
  CheckpointManager(scratch.path()).save(make_state(3), 3, metadata.dump());
  const auto step = scratch.path() / "step-3";
  SavedState saved(step);
  consolidate(saved, scratch.path() / "w.safetensors");
  consolidate(saved, scratch.path() / "several", {.max_file_bytes = 64});
  reshard(saved, scratch.path() / "again", {.files = 3});
  for (const auto& place :
       {step, scratch.path() / "w.safetensors", scratch.path() / "several", scratch.path() / "again" / "step-3"}) {
    const auto told = describe_weights(place);
    ASSERT_EQ(told.size(), 1U) << place;
    EXPECT_EQ(told[0].model, described_model()) << place;
    const bool is_step = std::filesystem::exists(place / "manifest.json");
    EXPECT_EQ(nlohmann::json::parse(told[0].metadata), is_step ? metadata : kept) << place;
    EXPECT_THAT(told[0].source, HasSubstr(place.string()));
  }
}

TEST(WeightsDescription, ConfigJsonBesideTheFilesSaysIt) {
  const TempDirectory scratch;
  write_file(scratch.path() / "config.json", models::llama_hf_config(described_model(), "float32"));
  const auto told = describe_weights(scratch.path());
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].model.rope_theta, 777);
  EXPECT_EQ(told[0].source, (scratch.path() / "config.json").string());
}

TEST(WeightsDescription, NothingIsMadeUp) {
  const TempDirectory scratch;
  EXPECT_TRUE(describe_weights(scratch.path()).empty());
  CheckpointManager(scratch.path()).save(make_state(1), 1, R"({"model": {"dim": 256}})");
  EXPECT_TRUE(describe_weights(scratch.path() / "step-1").empty());
  const std::string half = R"({"model": {"dim": 256, "rope_theta": 1.0}})";
  EXPECT_THAT(error_text<CheckpointError>([&] { model_in_metadata(half, "here"); }),
              AllOf(HasSubstr("here: metadata.model"), HasSubstr("n_layers")));
}

}  // namespace
}  // namespace phalanx
