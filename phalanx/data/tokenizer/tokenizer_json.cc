#include "phalanx/data/tokenizer/tokenizer_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/json_text.h"
#include "phalanx/base/log.h"
#include "phalanx/data/tokenizer/bpe_encoder.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/byte_level.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

/// Limit of ids: it allows gaps, but no table of gigabytes.
std::int64_t id_limit(std::size_t tokens) { return 2 * static_cast<std::int64_t>(tokens) + 65536; }

void read_vocabulary(const TokenizerJson& reader, const json& vocab, std::int64_t limit, BpeModel& model,
                     std::unordered_map<std::string, TokenId>& ids) {
  const bool byte_level = model.is_byte_level();
  if (byte_level && vocab.empty()) reader.fail("model.vocab", "no token for byte 0x00, nor for any other");
  ids.reserve(vocab.size());
  for (const auto& [text, value] : vocab.items()) {
    const std::string key = fmt::format("model.vocab['{}']", text);
    const TokenId id = reader.id(value, key, limit);
    if (text.empty()) reader.fail("model.vocab", "holds an empty token");
    if (static_cast<std::size_t>(id) >= model.tokens.size()) model.tokens.resize(static_cast<std::size_t>(id) + 1);
    std::string& slot = model.tokens[static_cast<std::size_t>(id)];
    // A token with characters outside the alphabet is its own UTF-8 and is never the result of a merge.
    if (!slot.empty()) reader.fail(key, fmt::format("id {} belongs to another token as well", id));
    slot = byte_level ? printable_to_bytes(text).value_or(text) : text;
    ids.emplace(text, id);
  }
}

/// Whether valid UTF-8 may contain this byte.
bool may_be_in_utf8(int byte) { return byte < 0xF5 && byte != 0xC0 && byte != 0xC1; }

/// Bytes without a token become the unknown one, else nothing, as in the package.
void check_bytes(const TokenizerJson& reader, const BpeModel& model, const std::string& unknown) {
  std::vector<int> missing;
  const auto ids = tokens_of_bytes(model);
  for (int byte = 0; byte < 256; ++byte) {
    if (ids[static_cast<std::size_t>(byte)] < 0) missing.push_back(byte);
  }
  if (missing.size() == 256)
    reader.fail("model.vocab", "no token for any byte (byte-level BPE): expected their tokens");
  const bool of_text = std::ranges::any_of(missing, may_be_in_utf8);
  if (!unknown.empty() && !model.unknown && of_text) {
    reader.fail("model.unk_token",
                fmt::format("'{}' is not in model.vocab, which has no token for {} bytes such as 0x{:02X}", unknown,
                            missing.size(), missing.front()));
  }
  if (!of_text) return;
  log::warn_once(fmt::format(
      "{}: no token for {} of 256 bytes, such as 0x{:02X}: in a text they {}, as in the `tokenizers` package",
      reader.name(), missing.size(), missing.front(),
      model.unknown ? fmt::format("become '{}'", unknown) : std::string("are left out")));
}

void read_merges(const TokenizerJson& reader, const json& merges, const std::unordered_map<std::string, TokenId>& ids,
                 BpeModel& model) {
  model.merges.reserve(merges.size());
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const auto key = [&] { return fmt::format("model.merges[{}]", i); };
    const json& entry = merges[i];
    std::string left, right;
    if (entry.is_string()) {
      const auto& line = entry.get_ref<const std::string&>();
      const std::size_t space = line.find(' ');
      if (space == std::string::npos || line.find(' ', space + 1) != std::string::npos) {
        reader.fail(key(),
                    fmt::format("expected two tokens and one space between them, found '{}'", line.substr(0, 60)));
      }
      left = line.substr(0, space), right = line.substr(space + 1);
    } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
      left = entry[0].get<std::string>(), right = entry[1].get<std::string>();
    } else {
      reader.fail(key(), "expected \"left right\" or [\"left\", \"right\"]");
    }
    const auto id_of = [&](const std::string& token) {
      const auto found = ids.find(token);
      if (found == ids.end()) reader.fail(key(), fmt::format("token '{}' is not in model.vocab", token.substr(0, 60)));
      return found->second;
    };
    model.merges.push_back({id_of(left), id_of(right), id_of(left + right)});
  }
}

/// Returns the unknown token's text.
std::string read_model(const TokenizerJson& reader, const json& root, std::int64_t limit, BpeModel& model) {
  const json& object = reader.member(root, "", "model");
  reader.expect_object(object, "model");
  // Files that predate the field have a vocabulary and merges and mean BPE.
  const json* type = TokenizerJson::optional(object, "type");
  if (type && reader.text(*type, "model.type") != "BPE") {
    reader.unsupported("model.type", reader.text(*type, "model.type"), "BPE");
  }
  if (const json* dropout = TokenizerJson::optional(object, "dropout")) {
    if (!dropout->is_number() || dropout->get<double>() != 0.0)
      reader.unsupported("model.dropout", dropout->dump(), "null and 0");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json* value = TokenizerJson::optional(object, key);
    if (value && *value != json("")) reader.unsupported(fmt::format("model.{}", key), value->dump(), "null and \"\"");
  }
  model.byte_fallback = reader.flag(object, "model.", "byte_fallback", false);
  if (model.byte_fallback && model.is_byte_level()) {
    reader.unsupported("model.byte_fallback", "true", "false (byte-level BPE has a token for each byte)");
  }
  model.fuse_unknown = reader.flag(object, "model.", "fuse_unk", false);
  model.ignore_merges = reader.flag(object, "model.", "ignore_merges", false);
  const json& vocab = reader.member(object, "model.", "vocab");
  reader.expect_object(vocab, "model.vocab");
  const json& merges = reader.member(object, "model.", "merges");
  reader.expect_array(merges, "model.merges");
  std::unordered_map<std::string, TokenId> ids;
  read_vocabulary(reader, vocab, limit, model, ids);
  read_merges(reader, merges, ids, model);
  const json* unknown = TokenizerJson::optional(object, "unk_token");
  std::string token = unknown ? reader.text(*unknown, "model.unk_token") : std::string();
  if (!unknown) return token;
  const auto found = ids.find(token);
  if (found != ids.end()) model.unknown = found->second;
  if (found == ids.end() && !model.is_byte_level()) {
    reader.fail("model.unk_token", fmt::format("'{}' is not in model.vocab", token));
  }
  return token;
}

void read_added_tokens(const TokenizerJson& reader, const json& entries, std::int64_t limit, BpeModel& model) {
  std::unordered_map<std::string, TokenId> seen;
  std::unordered_map<TokenId, std::size_t> by_id;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::string path = fmt::format("added_tokens[{}].", i);
    const json& entry = entries[i];
    reader.expect_object(entry, fmt::format("added_tokens[{}]", i));
    AddedToken token;
    token.id = reader.id(reader.member(entry, path, "id"), path + "id", limit);
    token.content = reader.text(reader.member(entry, path, "content"), path + "content");
    token.special = reader.flag(entry, path, "special", false);
    token.normalized = reader.flag(entry, path, "normalized", !token.special);
    if (token.content.empty()) reader.fail(path + "content", "expected text, found an empty string");
    token.single_word = reader.flag(entry, path, "single_word", false);
    token.lstrip = reader.flag(entry, path, "lstrip", false);
    token.rstrip = reader.flag(entry, path, "rstrip", false);
    if (!seen.emplace(token.content, token.id).second) {
      reader.fail(path + "content", fmt::format("'{}' appears twice", token.content));
    }
    if (!by_id.emplace(token.id, i).second) reader.fail(path + "id", fmt::format("id {} appears twice", token.id));
    const auto index = static_cast<std::size_t>(token.id);
    if (index < model.tokens.size() && !model.tokens[index].empty() && model.tokens[index] != token.content &&
        bytes_to_printable(model.tokens[index]) != token.content) {
      reader.fail(path + "id", fmt::format("id {} of '{}' is that of '{}' in model.vocab", token.id, token.content,
                                           bytes_to_printable(model.tokens[index])));
    }
    model.added_tokens.push_back(std::move(token));
  }
}

/// The package ignores the id of an added token: it uses the vocabulary's id, or else the next free one.
void number_added_tokens(const TokenizerJson& reader, const json& vocab, BpeModel& model) {
  auto next = static_cast<TokenId>(vocab.size());
  for (std::size_t i = 0; i < model.added_tokens.size(); ++i) {
    AddedToken& token = model.added_tokens[i];
    const std::string key = fmt::format("added_tokens[{}].id", i);
    const auto in_vocab = vocab.find(token.content);
    const bool is_in_vocab = in_vocab != vocab.end();
    const TokenId id = is_in_vocab ? in_vocab->get<TokenId>() : next;
    const auto index = static_cast<std::size_t>(id);
    if (!is_in_vocab && index < model.tokens.size() && !model.tokens[index].empty()) {
      reader.fail(key, fmt::format("'{}' has id {}, but the `tokenizers` package gives it {}, which is that of '{}' in "
                                   "model.vocab: number model.vocab without gaps and added tokens behind it",
                                   token.content, token.id, id, bytes_to_printable(model.tokens[index])));
    }
    if (id != token.id) {
      log::warn_once(fmt::format("{}: {}: '{}' has id {}, and is given {}, {}, as in the `tokenizers` package",
                                 reader.name(), key, token.content, token.id, id,
                                 is_in_vocab ? "which model.vocab has for it" : "the next that is free"));
    }
    token.id = id;
    next = std::max(next, id + 1);
  }
}

}  // namespace

BpeModel parse_tokenizer_json(std::string_view text, const std::string& name) {
  const TokenizerJson reader(name);
  const json root = parse_json_object<DataError>(text, name);
  try {
    if (const json* version = TokenizerJson::optional(root, "version"); version && *version != "1.0") {
      reader.unsupported("version", version->dump(), "\"1.0\"");
    }
    BpeModel model;
    const json* added = TokenizerJson::optional(root, "added_tokens");
    if (added) reader.expect_array(*added, "added_tokens");
    const json* vocab =
        root.contains("model") && root["model"].is_object() ? TokenizerJson::optional(root["model"], "vocab") : nullptr;
    const std::int64_t limit = id_limit((vocab ? vocab->size() : 0) + (added ? added->size() : 0));
    read_pre_tokenizer(reader, root, model);  // decides whether the vocabulary is byte-level
    const std::string unknown = read_model(reader, root, limit, model);
    if (added) read_added_tokens(reader, *added, limit, model);
    if (model.is_byte_level()) check_bytes(reader, model, unknown);
    number_added_tokens(reader, *vocab, model);
    read_normalizer(reader, root, model);
    read_post_processor(reader, root, limit, model);
    read_decoder(reader, root, model);
    return model;
  } catch (const json::exception& error) {  // a value that no check above names
    throw DataError(fmt::format("{}: malformed: {}", name, json_value_fault(error)));
  }
}

}  // namespace phalanx::data
