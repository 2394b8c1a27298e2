// Which tokens begin a text, end it and pad a batch, according to the files beside a tokenizer.json:
// tokenizer_config.json or, if it does not name them, special_tokens_map.json and generation_config.json. Names and ids
// only.
//
//   const SpecialTokens tokens = special_tokens_beside("Llama-3.2-1B");
//   tokens.eos.name;                                                       // <|end_of_text|>
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

namespace phalanx::data {

struct SpecialToken {
  std::optional<std::string> name;  // from tokenizer_config.json or special_tokens_map.json
  std::optional<std::int64_t> id;   // else from generation_config.json: the first if there are several
  std::string said_by;              // the file it comes from
};

struct SpecialTokens {
  SpecialToken bos, eos, pad;
};

/// `path` is a folder, or a tokenizer.json in it. Missing files are ignored. Throws DataError that names a malformed
/// file.
SpecialTokens special_tokens_beside(const std::filesystem::path& path);

/// The texts of all special tokens that these files name, by key ("bos_token", "unk_token"), as chat templates see
/// them. Throws DataError as above.
std::map<std::string, std::string> special_token_texts(const std::filesystem::path& path);

}  // namespace phalanx::data
