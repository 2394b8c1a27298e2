#include "cli/worker/training_sample.h"

#include <fmt/format.h>

#include <filesystem>
#include <span>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/config/model_config.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/infer/generator.h"
#include "phalanx/train/inputs/run_check.h"

namespace phalanx::cli {

namespace {

data::BpeTokenizer sample_tokenizer(const config::TrainConfig& config, std::int64_t vocab_size) {
  const std::filesystem::path path = std::filesystem::path(config.model.hf_assets_path) / "tokenizer.json";
  train::require_sample_tokenizer(config);
  data::BpeTokenizer tokenizer = data::BpeTokenizer::load(path.string());
  if (tokenizer.vocab_size() > vocab_size) {
    throw DataError(fmt::format("'{}' has {} ids, the model only {}: is it another tokenizer than the data's?",
                                path.string(), tokenizer.vocab_size(), vocab_size));
  }
  return tokenizer;
}

}  // namespace

void check_sample_tokenizer(const config::TrainConfig& config) {
  sample_tokenizer(config, config::model_config(config).vocab_size);
}

std::string training_sample(const config::TrainConfig& config, models::Llama& model) {
  const data::BpeTokenizer tokenizer = sample_tokenizer(config, model.config().vocab_size);
  // Tokens that the tokenizer puts after a text would end the prompt.
  std::vector<data::TokenId> prompt = tokenizer.model().prefix;
  tokenizer.encode_to(config.metrics.sample_prompt, prompt);
  infer::Request request{
      .prompt = {prompt.begin(), prompt.end()},
      .max_new_tokens = config.metrics.sample_tokens,
      .sampling = {.temperature = 0.8, .top_k = 50, .seed = static_cast<std::uint64_t>(config.debug.seed)}};
  if (const auto end = tokenizer.end_of_text()) request.stop_tokens = {*end};
  infer::Generator generator(model, {.max_batch = 1});
  const auto completions = generator.generate({request});
  return tokenizer.decode(std::span<const std::int64_t>(completions.at(0).tokens));
}

}  // namespace phalanx::cli
