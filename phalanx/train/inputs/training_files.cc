#include "phalanx/train/inputs/training_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/config/config_checks.h"
#include "phalanx/config/model_config.h"
#include "phalanx/data/corpus/corpus.h"
#include "phalanx/data/corpus/text_stream.h"
#include "phalanx/data/token_sidecar.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx::train {
namespace {

data::TokenRange range_of(const config::Dataset& set, const data::TokenFile& file) {
  if (!set.range) return {0, file.size()};
  if (set.range->end <= file.size()) return {set.range->begin, set.range->end};
  throw DataError(fmt::format("data set '{}': range is [{}, {}], but {} has {} tokens: expected an end of at most that",
                              set.name, set.range->begin, set.range->end, file.path(), file.size()));
}

/// The files of [validation]; empty: it takes a part of the training data.
config::Datasets held_out_datasets(const config::TrainConfig& config) {
  const auto& validation = config.validation;
  if (!validation.datasets.empty() || validation.dataset_path.empty()) return validation.datasets;
  return {config::Dataset{.path = validation.dataset_path}};
}

std::unique_ptr<data::TextStream> open_texts(const config::TrainConfig& config, const config::RunPlan& plan,
                                             std::vector<std::string>& lines) {
  const auto& [paths, field, window, workers, special_tokens] = config.stream;
  data::CorpusListing listing;
  try {
    listing = data::list_corpus(paths, {.field = field});
  } catch (const DataError& error) {
    throw DataError(fmt::format("[stream] paths: {}", error.what()));
  }
  if (!listing.skipped.empty()) {
    lines.push_back(fmt::format("data: {} files that are no text are left out, such as {}", listing.skipped.size(),
                                listing.skipped.front()));
  }
  return std::make_unique<data::TextStream>(
      data::TextWindows(std::move(listing.documents), data::BpeTokenizer::load(config.model.hf_assets_path),
                        {.seq_len = config.training.seq_len,
                         .shuffle = config.training.shuffle,
                         .seed = static_cast<std::uint64_t>(config.debug.seed),
                         .separate_documents = config.training.attn_mask_type == "block_causal",
                         .pack = config.training.packing == "best_fit",
                         .window = window,
                         .workers = workers,
                         .special_tokens = special_tokens}),
      plan.global_batch_size);
}

/// What a set reads of a token file.
struct ReadPart {
  const config::Dataset* set;
  const data::TokenFile* file;
  data::TokenRange range;
  bool is_held_out;

  std::string shown() const {
    const std::string name = set->name.empty() ? "" : fmt::format(" '{}'", set->name);
    return fmt::format("the {} data set{} ({})", is_held_out ? "held-out" : "training", name, file->path());
  }
};

/// Two sets may read one token file, but only training sets the same tokens of it. A loss on tokens that were trained
/// says nothing, and tokens that are held out twice count twice.
void check_overlaps(const std::vector<ReadPart>& parts, std::vector<std::string>& lines) {
  std::vector<std::string> contents;
  if (parts.size() > 1) {
    for (const ReadPart& part : parts) contents.push_back(part.file->content_hash());
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (std::size_t j = i + 1; j < parts.size(); ++j) {
      const ReadPart &one = parts[i], &other = parts[j];
      const data::TokenRange both{std::max(one.range.begin, other.range.begin),
                                  std::min(one.range.end, other.range.end)};
      if (both.size() <= 0 || contents[i] != contents[j]) continue;
      const std::string text =
          fmt::format("tokens [{}, {}) are read by {} and by {}", both.begin, both.end, one.shown(), other.shown());
      if (!other.is_held_out) {
        lines.push_back(fmt::format("data: {}: they count for both shares", text));
        continue;
      }
      throw ConfigError(fmt::format(
          "{}: expected held-out tokens that no other set reads; give the sets ranges that do not overlap, or files of "
          "their own, as `phalanx tokenize --validation-fraction` writes them",
          text));
    }
  }
}

/// Says where the share of a set is not nearly what was asked for (blend_schedule.h rounds).
void tell_rounded_shares(const config::Datasets& sets, const data::BlendSchedule& schedule,
                         std::vector<std::string>& lines) {
  double sum = 0;
  for (const config::Dataset& set : sets) sum += set.weight.value_or(1);
  for (std::size_t i = 0; i < sets.size(); ++i) {
    const double asked = sets[i].weight.value_or(1) / sum;
    const double real = static_cast<double>(schedule.shares()[i]) / static_cast<double>(schedule.period());
    if (std::abs(real - asked) <= 0.01 * asked) continue;
    lines.push_back(
        fmt::format("data: '{}' is {:.4g} % of the sequences, where {:.4g} % was asked for: weights are rounded to "
                    "ten-thousandths of their sum",
                    sets[i].name, 100 * real, 100 * asked));
  }
}

/// Held-out token files of texts must have the same around their documents as the texts.
void compare_with_texts(const config::TrainConfig& config, data::TokenId end, TrainingTokenizer& tokenizer) {
  const nlohmann::json mine = data::document_end_json(end);
  const nlohmann::json held_out = tokenizer.ends_texts ? data::document_end_json(*tokenizer.ends_texts) : mine;
  if (held_out != mine) {
    refuse_difference(config,
                      fmt::format("the texts of [stream] paths end by token {}, the documents of the held-out token "
                                  "files by {}",
                                  mine.dump(), held_out.dump()),
                      tokenizer.lines);
  }
  tokenizer.identity["document_end"] = mine;
  const bool special_tokens = config.stream.special_tokens;
  if (tokenizer.special_tokens.value_or(special_tokens) != special_tokens) {
    refuse_difference(config,
                      fmt::format("the texts of [stream] paths have {}the tokens of the tokenizer's template around "
                                  "them, unlike the documents of the held-out token files ([stream] special_tokens)",
                                  special_tokens ? "" : "not "),
                      tokenizer.lines);
  }
}

}  // namespace

TrainingFiles open_training_files(const config::TrainConfig& config, const config::RunPlan& plan) {
  const auto& training = config.training;
  const auto& validation = config.validation;
  config::require_dataset(config);
  const models::LlamaConfig model = config::model_config(config);
  const RopeScaling& scaling = model.rope_scaling;
  if (training.attn_mask_type == "block_causal" && scaling.depends_on_length() &&
      training.seq_len > scaling.original_max_seq_len) {
    throw ConfigError(fmt::format(
        "[training] attn_mask_type is \"block_causal\", and the model's rotary angles depend on the length of a "
        "sequence "
        "beyond {} tokens (rope_scaling {}), which documents of one sequence do not share: set seq_len to at most "
        "{}, or attn_mask_type to \"causal\"",
        scaling.original_max_seq_len, models::rope_scaling_name(scaling.type), scaling.original_max_seq_len));
  }
  data::TokenFileOptions options{.vocab_size = model.vocab_size};
  if (training.dataset_dtype != "auto") options.type = data::token_type_named(training.dataset_dtype);
  const config::Datasets sets = config::training_datasets(config);
  const bool is_blend = sets.size() > 1;
  std::vector<data::TokenFile> files;
  for (const config::Dataset& set : sets) files.emplace_back(set.path, options);
  std::vector<data::TokenRange> ranges;
  for (std::size_t i = 0; i < sets.size(); ++i) ranges.push_back(range_of(sets[i], files[i]));

  const config::Datasets held_out_sets = held_out_datasets(config);
  std::vector<data::TokenFile> held_out;
  std::vector<data::TokenRange> held_out_ranges;
  const bool takes_part = validation.enable && held_out_sets.empty();
  if (validation.enable) {
    for (const config::Dataset& set : held_out_sets) {
      held_out.emplace_back(set.path, options);
      held_out_ranges.push_back(range_of(set, held_out.back()));
    }
  }
  if (takes_part) {
    held_out = files;
    for (data::TokenRange& range : ranges) {
      const auto parts = data::split_validation(range.size(), validation.fraction);
      const std::int64_t border = range.begin + parts.train.end;
      held_out_ranges.push_back({border, range.end});
      range.end = border;
    }
  }

  const config::Datasets& names = takes_part ? sets : held_out_sets;
  TrainingFiles result;
  {
    std::vector<ReadPart> read;
    for (std::size_t i = 0; i < files.size(); ++i) read.push_back({&sets[i], &files[i], ranges[i], false});
    for (std::size_t i = 0; i < held_out.size(); ++i) {
      read.push_back({&names[i], &held_out[i], held_out_ranges[i], true});
    }
    check_overlaps(read, result.lines);
  }

  const bool separate_documents = training.attn_mask_type == "block_causal";
  const bool pack = training.packing == "best_fit";
  const auto loader = [&](const data::TokenFile& file, data::TokenRange range, std::int64_t batch, bool shuffle,
                          std::size_t set = 0) {
    return data::DataLoader(file, {.seq_len = training.seq_len,
                                   .global_batch_size = batch,
                                   .shuffle = shuffle,
                                   .seed = data::seed_of_set(static_cast<std::uint64_t>(config.debug.seed), set),
                                   .range = range,
                                   .separate_documents = separate_documents,
                                   .pack = pack,
                                   .pairs = !config.dpo.preferences.empty()});
  };
  const std::int64_t local =
      validation.local_batch_size == -1 ? training.local_batch_size : validation.local_batch_size;
  result.validation_batch_size = local;
  for (std::size_t i = 0; i < held_out.size(); ++i) {
    result.validation.push_back({.name = held_out.size() > 1 ? names[i].name : "",
                                 .dataloader = loader(held_out[i], held_out_ranges[i],
                                                      local * plan.parallel.data_parallel_size(), /*shuffle=*/false),
                                 .range = held_out_ranges[i]});
  }
  if (!config.stream.paths.empty()) {
    result.train = open_texts(config, plan, result.lines);
  } else if (is_blend) {
    std::vector<data::BlendedLoader::Part> parts;
    for (std::size_t i = 0; i < sets.size(); ++i) {
      parts.push_back({.name = sets[i].name,
                       .weight = sets[i].weight.value_or(1),
                       .rows = loader(files[i], ranges[i], 1, training.shuffle, i)});
    }
    auto blend = std::make_unique<data::BlendedLoader>(std::move(parts), plan.global_batch_size);
    tell_rounded_shares(sets, blend->schedule(), result.lines);
    result.train = std::move(blend);
  } else {
    result.train = std::make_unique<data::DataLoader>(
        loader(files.front(), ranges.front(), plan.global_batch_size, training.shuffle));
  }
  std::vector<const data::TokenFile*> all;
  for (const data::TokenFile& file : files) all.push_back(&file);
  if (!takes_part) {
    for (const data::TokenFile& file : held_out) all.push_back(&file);
  }
  result.tokenizer = training_tokenizer(config, options.vocab_size, all);
  if (const auto* const texts = dynamic_cast<const data::TextStream*>(result.train.get())) {
    compare_with_texts(config, texts->windows().document_end(), result.tokenizer);
  }
  return result;
}

}  // namespace phalanx::train
