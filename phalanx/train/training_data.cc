#include "phalanx/train/training_data.h"

#include <utility>

#include "phalanx/data/corpus/token_statistics.h"
#include "phalanx/data/stream_description.h"
#include "phalanx/train/inputs/training_files.h"
#include "phalanx/train/precision.h"

namespace phalanx::train {

TrainingData open_training_data(const config::TrainConfig& config, const config::RunPlan& plan, c10::Device device,
                                int rank) {
  TrainingFiles files = open_training_files(config, plan);
  TrainingData result;
  if (files.validation) {
    auto& [dataloader, range, local_batch_size] = *files.validation;
    result.validation = data::describe_range(dataloader.tokens(), range);
    if (rank == 0) result.unigram_entropy = data::unigram_entropy(dataloader.tokens(), range);
    result.validator = std::make_unique<Validator>(
        std::move(dataloader), ValidatorOptions{.local_batch_size = local_batch_size,
                                                .steps = config.validation.steps,
                                                .data_parallel_rank = plan.parallel.data_parallel_rank(rank),
                                                .data_parallel_size = plan.parallel.data_parallel_size(),
                                                .autocast = autocast_dtype(config, plan),
                                                .device = device});
  }
  result.dataloader = std::make_unique<data::DataLoader>(std::move(files.train));
  result.identity = data::describe_stream(*result.dataloader);
  result.tokenizer = std::move(files.tokenizer.identity);
  result.lines = std::move(files.tokenizer.lines);
  return result;
}

}  // namespace phalanx::train
