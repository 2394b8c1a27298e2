// PREFIX.json, the third file of a token file, describes PREFIX.bin. The other two are as Megatron writes them, to the
// byte, so that tools that do not know this file can still read them.
//
//   {"format": "phalanx.tokens", "version": 1, "type": "uint16", "tokens": 123, "documents": 4, "vocab_size": 4096,
//    "tokenizer": "tok1:...", "document_end": 0, "special_tokens": true, "content": "...", "set_aside": "..."}
//
// A file with a mask (PREFIX.mask) has "version": 2 and "mask": its hash. Programs that know no masks refuse it.
//
// It may be written by hand for a file of raw ids (train.bin: train.json). Then "format", and "type" or "vocab_size",
// are enough. A .json file without that "format" belongs to another program and is ignored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>

#include "phalanx/data/token_file.h"

namespace phalanx::data {

/// "data/train.json" for data/train.bin; other names get ".json" appended.
std::string sidecar_path(const std::string& bin_path);

/// "data/train.mask" for data/train.bin.
std::string mask_path(const std::string& bin_path);

/// Reads the sidecar; nothing if there is none of Phalanx's. Throws DataError that names the file, the key and what is
/// wrong.
std::optional<TokenSidecar> read_sidecar(const std::string& bin_path);

/// A hash of the type, number and values of ids: of all ids if they have up to 4 MiB, else of 256 blocks spread over
/// them, including the first and the last.
std::string hash_of_ids(TokenType type, std::span<const std::byte> ids);

/// Whether a file of that name exists that is not Phalanx's, damaged or not, and so must not be replaced.
bool is_foreign_sidecar(const std::string& bin_path);

/// Whether the sidecar names a mask, or is damaged, so that it may have.
bool names_mask(const std::string& bin_path);

/// Whether a file with the mask's name exists that no sidecar names: it may be another program's, and must not be
/// replaced or removed.
bool is_foreign_mask(const std::string& bin_path);
std::string foreign_mask_text(const std::string& bin_path);  // the error

/// The JSON form of the id that ends documents, here and in a run's metadata: a number, or "none".
nlohmann::json document_end_json(std::int64_t id);
/// For messages: "by token 0", or "by no token".
std::string document_end_text(std::int64_t id);

std::string sidecar_text(const TokenSidecar& sidecar);

}  // namespace phalanx::data
