// Which tokens begin a text, end it and fill up a batch, as the files beside a tokenizer.json say:
// tokenizer_config.json or, where that has no word on it, special_tokens_map.json and generation_config.json. Names and
// ids only.
//
//   const SpecialTokens tokens = special_tokens_beside("Llama-3.2-1B");
//   tokens.eos.name;                                                       // <|end_of_text|>
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace phalanx::data {

struct SpecialToken {
  std::optional<std::string> name;  // as tokenizer_config.json or special_tokens_map.json say
  std::optional<std::int64_t> id;   // else as generation_config.json says: of several its first
  std::string said_by;              // the file
};

struct SpecialTokens {
  SpecialToken bos, eos, pad;
};

/// Of the folder, or the one that a tokenizer.json is in. Files that are not there say nothing; a malformed one is a
/// DataError that names it.
SpecialTokens special_tokens_beside(const std::filesystem::path& path);

}  // namespace phalanx::data
