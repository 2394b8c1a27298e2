// Identifies the tokenizer of a training run. There are two: the one that made the token files, and the model's own in
// [model] hf_assets_path. They must be the same by content (data/tokenizer/tokenizer_fingerprint.h).
//
//   const TrainingTokenizer tokenizer = training_tokenizer(config, vocab_size, {&tokens, &held_out});
//   identity["tokenizer"] = tokenizer.identity;
//   for (const std::string& line : tokenizer.lines) log_info(line);
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/config/config.h"
#include "phalanx/data/token_file.h"

namespace phalanx::train {

struct TrainingTokenizer {
  nlohmann::json identity = nlohmann::json::object();  // {"fingerprint", "vocab_size", "document_end"}, where known
  std::optional<std::int64_t> ends_texts = {};  // the id that ends documents of files without a mask, where known
  std::optional<bool> special_tokens = {};      // TokenSidecar::special_tokens of files without a mask, where known
  std::vector<std::string> lines;               // what could not be compared, or is allowed to differ
};

/// Throws ConfigError with `text`, which says how data differ that should be the same. If [training]
/// allow_tokenizer_mismatch is set, appends it to `lines` instead.
void refuse_difference(const config::TrainConfig& config, const std::string& text, std::vector<std::string>& lines);

/// Throws ConfigError if the model's tokenizer has more ids than the model. Unless [training] allow_tokenizer_mismatch
/// is set, also if
/// - the model's tokenizer differs from that of a file,
/// - files of one kind (with a mask, or without) end their documents differently,
/// - some texts have the tokens of the tokenizer's template around them, and others do not.
TrainingTokenizer training_tokenizer(const config::TrainConfig& config, std::int64_t vocab_size,
                                     const std::vector<const data::TokenFile*>& files);

}  // namespace phalanx::train
