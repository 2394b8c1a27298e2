#include "phalanx/train/training_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "phalanx/base/assert.h"
#include "phalanx/base/human.h"
#include "phalanx/data/corpus/token_statistics.h"
#include "phalanx/data/data_loader.h"
#include "phalanx/data/stream_description.h"
#include "phalanx/train/inputs/training_files.h"
#include "phalanx/train/model/precision.h"
#include "phalanx/train/model/preference_reference.h"

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

nlohmann::json describe_held_out(const std::vector<TrainingFiles::HeldOut>& sets) {
  if (sets.size() == 1) return data::describe_range(sets.front().dataloader.tokens(), sets.front().range);
  nlohmann::json all = nlohmann::json::array();
  for (const auto& [name, dataloader, range] : sets) {
    all.push_back({{"name", name}, {"stream", data::describe_range(dataloader.tokens(), range)}});
  }
  return {{"sets", all}};
}

/// Of the tokens of all sets together.
double unigram_entropy(const std::vector<TrainingFiles::HeldOut>& sets) {
  std::vector<std::int64_t> counts;
  for (const auto& [name, dataloader, range] : sets) {
    const std::vector<std::int64_t> more = data::token_counts(dataloader.tokens(), range);
    counts.resize(std::max(counts.size(), more.size()));
    for (std::size_t id = 0; id < more.size(); ++id) counts[id] += more[id];
  }
  return data::unigram_entropy(counts);
}

}  // namespace

TrainingData open_training_data(const config::TrainConfig& config, const config::RunPlan& plan, c10::Device device,
                                int rank) {
  TrainingFiles files = open_training_files(config, plan);
  TrainingData result;
  if (!files.validation.empty()) {
    result.validation = describe_held_out(files.validation);
    // The entropy of all tokens says nothing about the loss of some of them.
    const auto has_mask = [](const auto& set) { return !set.dataloader.tokens().mask().empty(); };
    if (rank == 0 && std::ranges::none_of(files.validation, has_mask)) {
      result.unigram_entropy = unigram_entropy(files.validation);
    }
    if (!config.dpo.preferences.empty()) {
      result.validation_reference = make_reference_table(files.validation.front().dataloader);
    }
    std::vector<Validator::Set> sets;
    for (auto& [name, dataloader, range] : files.validation) sets.push_back({name, std::move(dataloader)});
    result.validator = std::make_unique<Validator>(
        std::move(sets), ValidatorOptions{.local_batch_size = files.validation_batch_size,
                                          .steps = config.validation.steps,
                                          .data_parallel_rank = plan.parallel.data_parallel_rank(rank),
                                          .data_parallel_size = plan.parallel.data_parallel_size(),
                                          .cut = plan.context_cut(rank),
                                          .autocast = autocast_dtype(config, plan),
                                          .device = device,
                                          .reference = result.validation_reference});
  }
  result.dataloader = std::move(files.train);
  if (!config.dpo.preferences.empty()) {
    result.dataloader->each_file([&](const std::string&, const data::DataLoader& loader) {
      PHALANX_ASSERT(!result.reference.defined(), "preferences are one file");
      result.reference = make_reference_table(loader);
    });
  }
  result.identity = result.dataloader->describe();
  result.tokenizer = std::move(files.tokenizer.identity);
  result.lines = std::move(files.lines);
  for (std::string& line : files.tokenizer.lines) result.lines.push_back(std::move(line));
  result.dataloader->each_file([&](const std::string& name, const data::DataLoader& loader) {
    const data::PackedRows* const packed = loader.packed_rows();
    if (packed == nullptr) return;
    result.lines.push_back(
        fmt::format("data: {}{}{}", name, name.empty() ? "" : ": ", packing_text(*packed, config.training.seq_len)));
  });
  return result;
}

}  // namespace phalanx::train
