#include "phalanx/train/training_data.h"

#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/data/stream_description.h"
#include "phalanx/data/token_statistics.h"
#include "phalanx/train/config_checks.h"
#include "phalanx/train/model_config.h"
#include "phalanx/train/precision.h"
#include "phalanx/train/training_tokenizer.h"

namespace phalanx::train {

TrainingData open_training_data(const TrainConfig& config, const RunPlan& plan, c10::Device device, int rank) {
  const auto& training = config.training;
  const std::int64_t vocab_size = model_config(config).vocab_size;
  require_dataset(config);
  data::TokenFileOptions options{.vocab_size = vocab_size};
  if (training.dataset_dtype != "auto") options.type = data::token_type_named(training.dataset_dtype);
  const data::TokenFile tokens(training.dataset_path, options);
  data::BatchOptions train{.seq_len = training.seq_len,
                           .global_batch_size = plan.global_batch_size,
                           .shuffle = training.shuffle,
                           .seed = static_cast<std::uint64_t>(config.debug.seed)};

  TrainingData result;
  std::vector<const data::TokenFile*> files{&tokens};
  const auto& validation = config.validation;
  data::TokenFile held_out = tokens;
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
    result.validator =
        std::make_unique<Validator>(data::Batches(held_out, {.seq_len = training.seq_len,
                                                             .global_batch_size = local * plan.parallel.data_ranks(),
                                                             .shuffle = false,
                                                             .range = range}),
                                    ValidatorOptions{.local_batch_size = local,
                                                     .steps = validation.steps,
                                                     .data_rank = plan.parallel.data_rank(rank),
                                                     .data_ranks = plan.parallel.data_ranks(),
                                                     .autocast = autocast_dtype(config, plan),
                                                     .device = device});
    result.validation = data::describe_range(held_out, range);
    if (rank == 0) result.unigram_entropy = data::unigram_entropy(held_out, range);
  }
  result.batches = std::make_unique<data::Batches>(tokens, train);
  result.identity = data::describe_stream(*result.batches);
  TrainingTokenizer tokenizer = training_tokenizer(config, vocab_size, files);
  result.tokenizer = std::move(tokenizer.identity);
  result.lines = std::move(tokenizer.lines);
  return result;
}

}  // namespace phalanx::train
