// PREFIX.json, the third file of a token file: what PREFIX.bin itself does not say. Megatron's own two are as Megatron
// writes them, to the byte; tools that know nothing of this one read the pair as ever.
//
//   {"format": "phalanx.tokens", "version": 1, "type": "uint16", "tokens": 123, "documents": 4, "vocab_size": 4096,
//    "tokenizer": "tok1:...", "document_end": 0, "content": "...",
//    "set_aside": "..."}
//
// It may be written by hand for a file of raw ids (train.bin: train.json); then "format", and "type" or "vocab_size",
// are enough. A .json there without that "format" is somebody else's and not looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>

#include "phalanx/data/token_file.h"

namespace phalanx::data {

/// "data/train.json" for data/train.bin; other names get ".json" behind them.
std::string sidecar_path(const std::string& bin_path);

/// What is there, if something of ours is. DataError names the file, the key and what is wrong with it.
std::optional<TokenSidecar> read_sidecar(const std::string& bin_path);

/// A hash of type, number and values of ids: of all of up to 4 MiB, else of 256 blocks spread over them, the first and
/// the last among them.
std::string hash_of_ids(TokenType type, std::span<const std::byte> ids);

/// Whether a file stands there that is none of ours, damaged or not, and so not to be replaced.
bool is_foreign_sidecar(const std::string& bin_path);

/// How the id that ends documents is written, here and in a run's metadata: a number, or "none".
nlohmann::json document_end_json(std::int64_t id);
/// For messages: "by token 0", or "by no token".
std::string document_end_text(std::int64_t id);

std::string sidecar_text(const TokenSidecar& sidecar);

}  // namespace phalanx::data
