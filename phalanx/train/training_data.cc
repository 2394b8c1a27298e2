#include "phalanx/train/training_data.h"

#include <utility>

#include "phalanx/data/corpus/token_statistics.h"
#include "phalanx/data/stream_description.h"
#include "phalanx/train/inputs/training_files.h"
#include "phalanx/train/precision.h"

namespace phalanx::train {

TrainingData open_training_data(const TrainConfig& config, const RunPlan& plan, c10::Device device, int rank) {
  TrainingFiles files = open_training_files(config, plan);
  TrainingData result;
  if (files.validation) {
    auto& [batches, range, local_batch_size] = *files.validation;
    result.validation = data::describe_range(batches.tokens(), range);
    if (rank == 0) result.unigram_entropy = data::unigram_entropy(batches.tokens(), range);
    result.validator =
        std::make_unique<Validator>(std::move(batches), ValidatorOptions{.local_batch_size = local_batch_size,
                                                                         .steps = config.validation.steps,
                                                                         .data_rank = plan.parallel.data_rank(rank),
                                                                         .data_ranks = plan.parallel.data_ranks(),
                                                                         .autocast = autocast_dtype(config, plan),
                                                                         .device = device});
  }
  result.batches = std::make_unique<data::Batches>(std::move(files.train));
  result.identity = data::describe_stream(*result.batches);
  result.tokenizer = std::move(files.tokenizer.identity);
  result.lines = std::move(files.tokenizer.lines);
  return result;
}

}  // namespace phalanx::train
