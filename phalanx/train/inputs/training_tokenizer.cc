#include "phalanx/train/inputs/training_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/data/token_sidecar.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"

namespace phalanx::train {
namespace {

struct KnownTokenizer {
  std::string fingerprint;
  std::int64_t vocab_size = 0;
  std::string place;
  std::optional<std::int64_t> end_of_text = {};
};

/// The token that ends the documents of all files of one kind, from the first file that records it. The kinds are texts
/// and conversations (files with a mask): each has an end of its own.
std::optional<std::int64_t> document_end_of(const config::TrainConfig& config,
                                            const std::vector<const data::TokenFile*>& files, bool has_mask,
                                            std::vector<std::string>& lines) {
  const data::TokenFile* first = nullptr;
  for (const data::TokenFile* file : files) {
    if (!file->sidecar() || !file->sidecar()->document_end || file->mask().empty() == has_mask) continue;
    if (first == nullptr) first = file;
    const std::int64_t known = *first->sidecar()->document_end, found = *file->sidecar()->document_end;
    if (found == known) continue;
    refuse_difference(config,
                      fmt::format("the documents in {} end {}, but those in {} {}", first->path(),
                                  data::document_end_text(known), file->path(), data::document_end_text(found)),
                      lines);
  }
  return first != nullptr ? first->sidecar()->document_end : std::nullopt;
}

/// Whether texts have the tokens of the tokenizer's template around them, from the first file that records it.
std::optional<bool> special_tokens_of(const config::TrainConfig& config,
                                      const std::vector<const data::TokenFile*>& files,
                                      std::vector<std::string>& lines) {
  const data::TokenFile* first = nullptr;
  for (const data::TokenFile* file : files) {
    if (!file->sidecar() || !file->sidecar()->special_tokens || !file->mask().empty()) continue;
    if (first == nullptr) first = file;
    const bool known = *first->sidecar()->special_tokens;
    if (known == *file->sidecar()->special_tokens) continue;
    refuse_difference(
        config,
        fmt::format("the documents in {} have the tokens of the tokenizer's template around them, those in {} do not",
                    (known ? first : file)->path(), (known ? file : first)->path()),
        lines);
  }
  return first != nullptr ? first->sidecar()->special_tokens : std::nullopt;
}

std::optional<KnownTokenizer> tokenizer_of_model(const config::TrainConfig& config, bool data_say_theirs,
                                                 std::vector<std::string>& lines) {
  if (config.model.hf_assets_path.empty()) return std::nullopt;
  std::filesystem::path path = config.model.hf_assets_path;
  if (std::error_code none; !std::filesystem::exists(path, none)) {
    const std::string hint = hub_hint(path.string());
    throw FileError(
        fmt::format("[model] hf_assets_path '{}' does not exist{}", path.string(),
                    hint.empty() ? ": expected the folder of tokenizer.json; remove the key without one" : hint),
        ENOENT);
  }
  if (path.filename() != "tokenizer.json") path /= "tokenizer.json";
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    if (data_say_theirs)
      lines.push_back(
          fmt::format("[model] hf_assets_path: there is no {}: the tokenizer could not be compared with the data's",
                      path.string()));
    return std::nullopt;
  }
  try {
    const auto tokenizer = data::BpeTokenizer::load(path.string());
    return KnownTokenizer{data::tokenizer_fingerprint(tokenizer), tokenizer.vocab_size(), path.string(),
                          tokenizer.end_of_text()};
  } catch (const DataError& reason) {
    lines.push_back(fmt::format("the tokenizer in [model] hf_assets_path could not be compared with the data's: {}",
                                reason.what()));
    return std::nullopt;
  }
}

}  // namespace

void refuse_difference(const config::TrainConfig& config, const std::string& text, std::vector<std::string>& lines) {
  if (!config.training.allow_tokenizer_mismatch) {
    throw ConfigError(text +
                      ": expected the same; make one again by `phalanx tokenize`, or train all the same by [training] "
                      "allow_tokenizer_mismatch = true");
  }
  lines.push_back(text + ": trained all the same, as [training] allow_tokenizer_mismatch says");
}

TrainingTokenizer training_tokenizer(const config::TrainConfig& config, std::int64_t vocab_size,
                                     const std::vector<const data::TokenFile*>& files) {
  TrainingTokenizer result;
  const bool data_say_theirs = std::ranges::any_of(
      files, [](const data::TokenFile* file) { return file->sidecar() && !file->sidecar()->tokenizer.empty(); });
  std::optional<KnownTokenizer> known = tokenizer_of_model(config, data_say_theirs, result.lines);
  if (known && known->vocab_size > vocab_size) {
    throw ConfigError(
        fmt::format("[model] vocab_size is {}, but the tokenizer {} has {} ids: expected at most as many as the model; "
                    "use a model with more ids, or its own tokenizer",
                    vocab_size, known->place, known->vocab_size));
  }
  for (const data::TokenFile* file : files) {
    const auto& sidecar = file->sidecar();
    if (!sidecar || sidecar->tokenizer.empty()) {
      if (known) {
        result.lines.push_back(
            fmt::format("{}: nothing says with which tokenizer it was made: it could not be compared "
                        "with {}",
                        file->path(), known->place));
      }
      continue;
    }
    const KnownTokenizer mine{sidecar->tokenizer, sidecar->vocab_size, data::sidecar_path(file->path())};
    if (!known) {
      known = mine;
    } else if (data::are_other_tokenizers(known->fingerprint, mine.fingerprint)) {
      const std::string found = fmt::format(
          "{} was made with the tokenizer {} of {} ids (so says {}), but {} is of {} with {}", file->path(),
          mine.fingerprint, mine.vocab_size, mine.place, known->place, known->fingerprint, known->vocab_size);
      if (!config.training.allow_tokenizer_mismatch) {
        throw ConfigError(found +
                          ": its ids would mean other texts; make the file again by `phalanx tokenize` with that "
                          "tokenizer, or name the right one as [model] hf_assets_path; [training] "
                          "allow_tokenizer_mismatch = true trains all the same");
      }
      result.lines.push_back(found + ": trained all the same, as [training] allow_tokenizer_mismatch says");
    } else if (known->fingerprint == mine.fingerprint && known->vocab_size != mine.vocab_size && mine.vocab_size > 0) {
      throw ConfigError(
          fmt::format("{}: \"vocab_size\" is {}, but {} says {} of the same tokenizer, {}: expected the same; make the "
                      "file again by `phalanx tokenize`, or remove its .json",
                      mine.place, mine.vocab_size, known->place, known->vocab_size, known->fingerprint));
    } else if (known->fingerprint != mine.fingerprint) {
      result.lines.push_back(fmt::format("{}: its tokenizer's fingerprint is of another version ({}): not compared",
                                         mine.place, mine.fingerprint));
    }
  }
  if (known) result.identity = {{"fingerprint", known->fingerprint}, {"vocab_size", known->vocab_size}};
  result.ends_texts = document_end_of(config, files, /*has_mask=*/false, result.lines);
  result.special_tokens = special_tokens_of(config, files, result.lines);
  const auto ends_conversations = document_end_of(config, files, /*has_mask=*/true, result.lines);
  if (const auto end = result.ends_texts ? result.ends_texts : ends_conversations) {
    result.identity["document_end"] = data::document_end_json(*end);
    if (known && known->end_of_text && *known->end_of_text != *end) {
      result.lines.push_back(
          fmt::format("the documents end {}, but {} and the files beside it name token {} as the one that ends a text",
                      data::document_end_text(*end), known->place, *known->end_of_text));
    }
  }
  return result;
}

}  // namespace phalanx::train
