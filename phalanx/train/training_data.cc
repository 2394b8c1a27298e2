#include "phalanx/train/training_data.h"

#include <fmt/format.h>

#include <utility>

#include "phalanx/base/human.h"
#include "phalanx/data/corpus/token_statistics.h"
#include "phalanx/data/stream_description.h"
#include "phalanx/train/inputs/training_files.h"
#include "phalanx/train/precision.h"

namespace phalanx::train {

namespace {

std::string packing_text(const data::PackedRows& rows, std::int64_t seq_len) {
  const data::PackedRows::Statistics& seen = rows.statistics();
  const auto places = static_cast<double>(seen.rows * seq_len);
  std::string text =
      fmt::format("{} documents in {} sequences of {}, {:.1f} % padding", with_commas(seen.documents),
                  with_commas(seen.rows), seq_len, 100 * (1 - static_cast<double>(seen.places) / places));
  if (seen.cut > 0) text += fmt::format("; {} longer than a sequence were cut", with_commas(seen.cut));
  if (seen.skipped > 0) {
    text += fmt::format("{} {} of less than two tokens left out", seen.cut > 0 ? "," : ";", with_commas(seen.skipped));
  }
  if (seen.untrained > 0) {
    text += fmt::format("; {} (or parts of cut ones) without a trained token left out", with_commas(seen.untrained));
  }
  if (seen.labels < seen.places) {
    text += fmt::format("; {} of {} labels are trained ({:.1f} %)", with_commas(seen.labels), with_commas(seen.places),
                        100 * static_cast<double>(seen.labels) / static_cast<double>(seen.places));
  }
  return text;
}

}  // namespace

TrainingData open_training_data(const config::TrainConfig& config, const config::RunPlan& plan, c10::Device device,
                                int rank) {
  TrainingFiles files = open_training_files(config, plan);
  TrainingData result;
  if (files.validation) {
    auto& [dataloader, range, local_batch_size] = *files.validation;
    result.validation = data::describe_range(dataloader.tokens(), range);
    // The entropy of all tokens says nothing about the loss of some of them.
    if (rank == 0 && dataloader.tokens().mask().empty())
      result.unigram_entropy = data::unigram_entropy(dataloader.tokens(), range);
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
  if (const data::PackedRows* const packed = result.dataloader->packed_rows()) {
    result.lines.push_back("data: " + packing_text(*packed, config.training.seq_len));
  }
  return result;
}

}  // namespace phalanx::train
