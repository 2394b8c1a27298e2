#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/data/bpe_model.h"
#include "phalanx/data/byte_level.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

/// Reads keys of one tokenizer.json; every failure names the file and the key's path.
class JsonReader {
 public:
  explicit JsonReader(std::string name) : name_(std::move(name)) {}

  [[noreturn]] void fail(const std::string& key, const std::string& message) const {
    throw DataError(fmt::format("{}: {}: {}", name_, key, message));
  }

  const json& member(const json& object, const std::string& path, const char* key) const {
    const auto found = object.find(key);
    if (found == object.end()) fail(path + key, "missing");
    return *found;
  }

  /// Null where the key is missing or null.
  static const json* optional(const json& object, const char* key) {
    const auto found = object.find(key);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }

  std::string text(const json& value, const std::string& key) const {
    if (!value.is_string()) fail(key, fmt::format("expected a string, found {}", brief(value)));
    return value.get<std::string>();
  }

  bool flag(const json& object, const std::string& path, const char* key, bool standard) const {
    const json* value = optional(object, key);
    if (!value) return standard;
    if (!value->is_boolean()) fail(path + key, fmt::format("expected true or false, found {}", brief(*value)));
    return value->get<bool>();
  }

  TokenId id(const json& value, const std::string& key, std::int64_t limit) const {
    if (!value.is_number_integer() || value.is_number_float()) {
      fail(key, fmt::format("expected a token id, found {}", brief(value)));
    }
    const bool huge = value.is_number_unsigned() && value.get<std::uint64_t>() >= static_cast<std::uint64_t>(limit);
    if (huge || value.get<std::int64_t>() < 0) {
      fail(key, fmt::format("id {} is outside 0 to {}, the most that this number of tokens may use", value.dump(),
                            limit - 1));
    }
    return static_cast<TokenId>(value.get<std::int64_t>());
  }

  void expect_object(const json& value, const std::string& key) const {
    if (!value.is_object()) fail(key, fmt::format("expected an object, found {}", brief(value)));
  }

  void expect_array(const json& value, const std::string& key) const {
    if (!value.is_array()) fail(key, fmt::format("expected an array, found {}", brief(value)));
  }

  std::string type_of(const json& component, const std::string& key) const {
    expect_object(component, key);
    return text(member(component, key + ".", "type"), key + ".type");
  }

  [[noreturn]] void unsupported(const std::string& key, const std::string& what, const char* supported) const {
    fail(key, fmt::format("'{}' is not supported: supported are {}", what, supported));
  }

 private:
  static std::string brief(const json& value) {
    std::string text = value.is_object() ? "an object" : value.is_array() ? "an array" : value.dump(-1, ' ', true);
    if (text.size() > 40) text = text.substr(0, 40) + "...";
    return text;
  }

  std::string name_;
};

/// Limit of ids: room for gaps, none for a table of gigabytes.
std::int64_t id_limit(std::size_t tokens) { return 2 * static_cast<std::int64_t>(tokens) + 65536; }

void read_vocabulary(const JsonReader& reader, const json& vocab, std::int64_t limit, BpeModel& model,
                     std::unordered_map<std::string, TokenId>& ids) {
  ids.reserve(vocab.size());
  for (const auto& [text, value] : vocab.items()) {
    const std::string key = fmt::format("model.vocab['{}']", text);
    const TokenId id = reader.id(value, key, limit);
    if (text.empty()) reader.fail("model.vocab", "holds an empty token");
    if (static_cast<std::size_t>(id) >= model.tokens.size()) model.tokens.resize(static_cast<std::size_t>(id) + 1);
    std::string& slot = model.tokens[static_cast<std::size_t>(id)];
    // A token with characters outside the alphabet stands for its own UTF-8 and is never reached by merging.
    if (!slot.empty()) reader.fail(key, fmt::format("id {} belongs to another token as well", id));
    slot = printable_to_bytes(text).value_or(text);
    ids.emplace(text, id);
  }
  std::array<bool, 256> present{};
  for (const std::string& token : model.tokens) {
    if (token.size() == 1) present[static_cast<unsigned char>(token[0])] = true;
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (!present[byte]) {
      reader.fail("model.vocab",
                  fmt::format("no token for byte 0x{:02X}, written '{}': expected one for each of the 256 "
                              "bytes (byte-level BPE)",
                              byte, bytes_to_printable(std::string(1, static_cast<char>(byte)))));
    }
  }
}

void read_merges(const JsonReader& reader, const json& merges, const std::unordered_map<std::string, TokenId>& ids,
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

void read_model(const JsonReader& reader, const json& root, std::int64_t limit, BpeModel& model) {
  const json& object = reader.member(root, "", "model");
  reader.expect_object(object, "model");
  // Files from before the field existed have a vocabulary and merges and mean BPE.
  const json* type = JsonReader::optional(object, "type");
  if (type && reader.text(*type, "model.type") != "BPE") {
    reader.unsupported("model.type", reader.text(*type, "model.type"), "BPE");
  }
  if (const json* dropout = JsonReader::optional(object, "dropout")) {
    if (!dropout->is_number() || dropout->get<double>() != 0.0)
      reader.unsupported("model.dropout", dropout->dump(), "null and 0");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json* value = JsonReader::optional(object, key);
    if (value && *value != json("")) reader.unsupported(fmt::format("model.{}", key), value->dump(), "null and \"\"");
  }
  if (reader.flag(object, "model.", "byte_fallback", false)) {
    reader.unsupported("model.byte_fallback", "true", "false (byte-level BPE has a token for each byte)");
  }
  model.ignore_merges = reader.flag(object, "model.", "ignore_merges", false);
  const json& vocab = reader.member(object, "model.", "vocab");
  reader.expect_object(vocab, "model.vocab");
  const json& merges = reader.member(object, "model.", "merges");
  reader.expect_array(merges, "model.merges");
  std::unordered_map<std::string, TokenId> ids;
  read_vocabulary(reader, vocab, limit, model, ids);
  read_merges(reader, merges, ids, model);
}

void read_added_tokens(const JsonReader& reader, const json& entries, std::int64_t limit, BpeModel& model) {
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
    for (const char* key : {"single_word", "lstrip", "rstrip"}) {
      if (reader.flag(entry, path, key, false)) reader.unsupported(path + key, "true", "false");
    }
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

void read_byte_level(const JsonReader& reader, const json& component, const std::string& key, BpeModel& model) {
  model.add_prefix_space = reader.flag(component, key + ".", "add_prefix_space", true);
  if (reader.flag(component, key + ".", "use_regex", true)) model.split_patterns.emplace_back(kGpt2Pattern);
}

void read_split(const JsonReader& reader, const json& component, const std::string& key, BpeModel& model) {
  const json& pattern = reader.member(component, key + ".", "pattern");
  reader.expect_object(pattern, key + ".pattern");
  if (!pattern.contains("Regex"))
    reader.unsupported(key + ".pattern", pattern.dump().substr(0, 60), "{\"Regex\": ...}");
  const std::string behavior = reader.text(reader.member(component, key + ".", "behavior"), key + ".behavior");
  if (behavior != "Isolated") reader.unsupported(key + ".behavior", behavior, "Isolated");
  if (reader.flag(component, key + ".", "invert", false)) reader.unsupported(key + ".invert", "true", "false");
  const std::string regex = reader.text(pattern["Regex"], key + ".pattern.Regex");
  if (regex.size() > 65536) reader.fail(key + ".pattern.Regex", "longer than 65,536 characters");
  try {
    const SplitRegex compiled(regex);
  } catch (const DataError& error) {
    reader.fail(key + ".pattern.Regex", error.what());
  }
  model.split_patterns.push_back(regex);
}

constexpr const char* kPreTokenizers = "ByteLevel, and Sequence of Split (Regex, Isolated) and a last ByteLevel";

void read_pre_tokenizer(const JsonReader& reader, const json& root, BpeModel& model) {
  model.split_patterns.clear();
  const json* component = JsonReader::optional(root, "pre_tokenizer");
  if (!component) reader.unsupported("pre_tokenizer", "null", kPreTokenizers);
  const std::string type = reader.type_of(*component, "pre_tokenizer");
  if (type == "ByteLevel") return read_byte_level(reader, *component, "pre_tokenizer", model);
  if (type != "Sequence") reader.unsupported("pre_tokenizer", type, kPreTokenizers);
  const json& parts = reader.member(*component, "pre_tokenizer.", "pretokenizers");
  reader.expect_array(parts, "pre_tokenizer.pretokenizers");
  bool byte_level = false;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::string key = fmt::format("pre_tokenizer.pretokenizers[{}]", i);
    const std::string part = reader.type_of(parts[i], key);
    if (part == "Split" && !byte_level) {
      read_split(reader, parts[i], key, model);
    } else if (part == "ByteLevel" && !byte_level) {
      byte_level = true;
      read_byte_level(reader, parts[i], key, model);
      if (model.add_prefix_space && i > 0) reader.unsupported(key + ".add_prefix_space", "true", "false after a Split");
    } else {
      reader.unsupported(key, part, kPreTokenizers);
    }
  }
  if (!byte_level)
    reader.fail("pre_tokenizer.pretokenizers", "has no ByteLevel: expected it as the last of the sequence");
}

}  // namespace

BpeModel parse_tokenizer_json(std::string_view text, const std::string& name) {
  const JsonReader reader(name);
  json root;
  try {
    root = json::parse(text);
  } catch (const json::exception& error) {
    throw DataError(fmt::format("{}: not valid JSON: {}", name, std::string(error.what()).substr(0, 300)));
  }
  if (!root.is_object()) throw DataError(fmt::format("{}: expected an object, as tokenizer.json is", name));
  try {
    if (const json* version = JsonReader::optional(root, "version"); version && *version != "1.0") {
      reader.unsupported("version", version->dump(), "\"1.0\"");
    }
    if (const json* normalizer = JsonReader::optional(root, "normalizer")) {
      reader.unsupported("normalizer", reader.type_of(*normalizer, "normalizer"), "null");
    }
    if (const json* processor = JsonReader::optional(root, "post_processor")) {
      const std::string type = reader.type_of(*processor, "post_processor");
      if (type != "ByteLevel") reader.unsupported("post_processor", type, "null and ByteLevel");
    }
    const json* decoder = JsonReader::optional(root, "decoder");
    if (!decoder) reader.unsupported("decoder", "null", "ByteLevel");
    const std::string decoder_type = reader.type_of(*decoder, "decoder");
    if (decoder_type != "ByteLevel") reader.unsupported("decoder", decoder_type, "ByteLevel");

    BpeModel model;
    const json* added = JsonReader::optional(root, "added_tokens");
    if (added) reader.expect_array(*added, "added_tokens");
    const json* vocab =
        root.contains("model") && root["model"].is_object() ? JsonReader::optional(root["model"], "vocab") : nullptr;
    const std::int64_t limit = id_limit((vocab ? vocab->size() : 0) + (added ? added->size() : 0));
    read_model(reader, root, limit, model);
    if (added) read_added_tokens(reader, *added, limit, model);
    read_pre_tokenizer(reader, root, model);
    return model;
  } catch (const json::exception& error) {  // a value in a place that no check above names
    throw DataError(fmt::format("{}: malformed: {}", name, error.what()));
  }
}

std::string write_tokenizer_json(const BpeModel& model) {
  using ordered = nlohmann::ordered_json;
  ordered root;
  root["version"] = "1.0";
  root["truncation"] = nullptr;
  root["padding"] = nullptr;
  root["added_tokens"] = ordered::array();
  std::vector<AddedToken> added = model.added_tokens;
  std::sort(added.begin(), added.end(), [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
  for (const AddedToken& token : added) {
    root["added_tokens"].push_back({{"id", token.id},
                                    {"content", token.content},
                                    {"single_word", false},
                                    {"lstrip", false},
                                    {"rstrip", false},
                                    {"normalized", token.normalized},
                                    {"special", token.special}});
  }
  root["normalizer"] = nullptr;
  const bool gpt2 = model.split_patterns.size() == 1 && model.split_patterns[0] == kGpt2Pattern;
  const ordered byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", model.add_prefix_space}, {"trim_offsets", true}, {"use_regex", gpt2}};
  if (gpt2 || model.split_patterns.empty()) {
    root["pre_tokenizer"] = byte_level;
  } else {
    ordered parts = ordered::array();
    for (const std::string& pattern : model.split_patterns) {
      parts.push_back(
          {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}});
    }
    parts.push_back(byte_level);
    root["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", parts}};
  }
  root["post_processor"] = nullptr;
  root["decoder"] = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};

  ordered vocab = ordered::object();
  std::vector<std::string> names(model.tokens.size());
  for (std::size_t id = 0; id < model.tokens.size(); ++id) {
    if (model.tokens[id].empty()) continue;
    names[id] = bytes_to_printable(model.tokens[id]);
  }
  // A special token whose content is not of the byte alphabet is written as it is.
  for (const AddedToken& token : added) {
    const auto index = static_cast<std::size_t>(token.id);
    if (index < names.size() && !names[index].empty() && model.tokens[index] == token.content)
      names[index] = token.content;
  }
  // Pushed as pairs: ordered_json's [] looks through all keys for each one.
  auto& members = vocab.get_ref<ordered::object_t&>();
  members.reserve(names.size());
  for (std::size_t id = 0; id < names.size(); ++id) {
    if (!names[id].empty())
      static_cast<std::vector<std::pair<const std::string, ordered>>&>(members).emplace_back(names[id], id);
  }
  // "left right" rather than ["left", "right"]: every version of `tokenizers` reads it, and no token has a space in it.
  ordered merges = ordered::array();
  for (const BpeMerge& merge : model.merges) {
    merges.push_back(names[static_cast<std::size_t>(merge.left)] + " " + names[static_cast<std::size_t>(merge.right)]);
  }
  root["model"] = {{"type", "BPE"},
                   {"dropout", nullptr},
                   {"unk_token", nullptr},
                   {"continuing_subword_prefix", nullptr},
                   {"end_of_word_suffix", nullptr},
                   {"fuse_unk", false},
                   {"byte_fallback", false},
                   {"ignore_merges", model.ignore_merges},
                   {"vocab", std::move(vocab)},
                   {"merges", std::move(merges)}};
  return root.dump(1, ' ') + "\n";
}

}  // namespace phalanx::data
