#include "phalanx/train/inputs/training_files.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/config/config_checks.h"
#include "phalanx/config/model_config.h"

namespace phalanx::train {

TrainingFiles open_training_files(const config::TrainConfig& config, const config::RunPlan& plan) {
  const auto& training = config.training;
  const auto& validation = config.validation;
  config::require_dataset(config);
  const models::LlamaConfig model = config::model_config(config);
  const RopeScaling& scaling = model.rope_scaling;
  if (training.attn_mask_type == "block_causal" && scaling.type == RopeScalingType::dynamic &&
      training.seq_len > scaling.original_max_seq_len) {
    throw ConfigError(fmt::format(
        "[training] attn_mask_type is \"block_causal\", and the model's rotary angles depend on the length of a "
        "sequence "
        "beyond {} tokens (rope_scaling dynamic), which documents of one sequence do not share: set seq_len to at most "
        "{}, or attn_mask_type to \"causal\"",
        scaling.original_max_seq_len, scaling.original_max_seq_len));
  }
  data::TokenFileOptions options{.vocab_size = model.vocab_size};
  if (training.dataset_dtype != "auto") options.type = data::token_type_named(training.dataset_dtype);
  const data::TokenFile tokens(training.dataset_path, options);
  std::vector<const data::TokenFile*> files{&tokens};
  data::DataLoaderOptions train{.seq_len = training.seq_len,
                                .global_batch_size = plan.global_batch_size,
                                .shuffle = training.shuffle,
                                .seed = static_cast<std::uint64_t>(config.debug.seed),
                                .separate_documents = training.attn_mask_type == "block_causal",
                                .pack = training.packing == "best_fit"};
  data::TokenFile held_out = tokens;
  std::optional<TrainingFiles::HeldOut> part;
  if (validation.enable) {
    data::TokenRange range{0, tokens.size()};
    if (validation.dataset_path.empty()) {
      const auto parts = data::split_validation(tokens.size(), validation.fraction);
      train.range = parts.train;
      range = parts.validation;
    } else {
      files.push_back(&held_out);
      held_out = data::TokenFile(validation.dataset_path, options);
      range = {0, held_out.size()};
    }
    const std::int64_t local =
        validation.local_batch_size == -1 ? training.local_batch_size : validation.local_batch_size;
    part = {.dataloader = data::DataLoader(held_out, {.seq_len = training.seq_len,
                                                      .global_batch_size = local * plan.parallel.data_parallel_size(),
                                                      .shuffle = false,
                                                      .range = range,
                                                      .separate_documents = train.separate_documents,
                                                      .pack = train.pack}),
            .range = range,
            .local_batch_size = local};
  }
  return {.train = data::DataLoader(tokens, train),
          .validation = std::move(part),
          .tokenizer = training_tokenizer(config, options.vocab_size, files)};
}

}  // namespace phalanx::train
