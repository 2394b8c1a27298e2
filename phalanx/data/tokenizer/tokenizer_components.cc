#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "phalanx/base/utf8.h"
#include "phalanx/data/tokenizer/normalizer.h"
#include "phalanx/data/tokenizer/pre_tokenizer.h"
#include "phalanx/data/tokenizer/token_decoder.h"
#include "phalanx/data/tokenizer/tokenizer_json.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

constexpr const char* kNormalizers = "NFC, NFD, NFKC, NFKD, Prepend, Replace, Lowercase, Strip and Sequence of these";
constexpr const char* kPreTokenizers =
    "ByteLevel, Metaspace, Split, Digits, Punctuation, Whitespace, WhitespaceSplit, CharDelimiterSplit and Sequence of "
    "these";
constexpr const char* kPostProcessors = "TemplateProcessing, ByteLevel and Sequence of these";
constexpr const char* kDecoders = "ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip and Sequence of these";

/// Calls `read(component, key, type)` for the component, or for each part of a Sequence of them, to any depth.
template <typename F>
void for_each_part(const TokenizerJson& reader, const json& component, const std::string& key, const char* parts_key,
                   const F& read) {
  const std::string type = reader.type_of(component, key);
  if (type != "Sequence") return read(component, key, type);
  const json& parts = reader.member(component, key + ".", parts_key);
  reader.expect_array(parts, fmt::format("{}.{}", key, parts_key));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for_each_part(reader, parts[i], fmt::format("{}.{}[{}]", key, parts_key, i), parts_key, read);
  }
}

/// The value of `names` for the text under `key`.
template <typename E>
E one_of(const TokenizerJson& reader, const json& component, const std::string& path, const char* key,
         std::initializer_list<std::pair<std::string_view, E>> names) {
  const std::string found = reader.text(reader.member(component, path, key), path + key);
  std::string known;
  for (const auto& [name, value] : names) {
    if (name == found) return value;
    known.append(known.empty() ? "" : ", ").append(name);
  }
  reader.unsupported(path + key, found, known.c_str());
}

/// Returns the result of `make`; its errors name the key.
template <typename F>
auto checked(const TokenizerJson& reader, const std::string& key, const F& make) {
  try {
    return make();
  } catch (const DataError& error) {
    reader.fail(key, error.what());
  }
}

TextPattern read_pattern(const TokenizerJson& reader, const json& component, const std::string& path) {
  const std::string key = path + "pattern";
  const json& object = reader.member(component, path, "pattern");
  reader.expect_object(object, key);
  TextPattern pattern{.is_regex = object.contains("Regex")};
  const char* kind = pattern.is_regex ? "Regex" : "String";
  if (!object.contains(kind)) {
    reader.unsupported(key, object.dump().substr(0, 60), "{\"Regex\": ...} and {\"String\": ...}");
  }
  const std::string text_key = fmt::format("{}.{}", key, kind);
  pattern.text = reader.text(object[kind], text_key);
  if (pattern.text.size() > 65536) reader.fail(text_key, "longer than 65,536 characters");
  checked(reader, text_key, [&] { return PatternFinder(pattern); });
  return pattern;
}

SplitBehavior read_behavior(const TokenizerJson& reader, const json& component, const std::string& path) {
  return one_of<SplitBehavior>(reader, component, path, "behavior",
                               {{"Isolated", SplitBehavior::isolated},
                                {"Removed", SplitBehavior::removed},
                                {"MergedWithPrevious", SplitBehavior::merged_with_previous},
                                {"MergedWithNext", SplitBehavior::merged_with_next},
                                {"Contiguous", SplitBehavior::contiguous}});
}

/// A string of exactly one character.
std::string read_character(const TokenizerJson& reader, const json& component, const std::string& path,
                           const char* key) {
  std::string text = reader.text(reader.member(component, path, key), path + key);
  if (text.empty() || static_cast<std::size_t>(first_char(text).length) != text.size()) {
    reader.fail(path + key, fmt::format("expected one character, found '{}'", text.substr(0, 40)));
  }
  return text;
}

PrependScheme read_prepend_scheme(const TokenizerJson& reader, const json& component, const std::string& path) {
  // Files that predate the schemes say whether there is a prefix.
  if (!TokenizerJson::optional(component, "prepend_scheme")) {
    return reader.flag(component, path, "add_prefix_space", true) ? PrependScheme::always : PrependScheme::never;
  }
  return one_of<PrependScheme>(
      reader, component, path, "prepend_scheme",
      {{"always", PrependScheme::always}, {"first", PrependScheme::first}, {"never", PrependScheme::never}});
}

NormalizerStep normalizer_step(const TokenizerJson& reader, const json& component, const std::string& key,
                               const std::string& type) {
  const std::string path = key + ".";
  if (type == "NFC") return NormalFormStep{NormalForm::nfc};
  if (type == "NFD") return NormalFormStep{NormalForm::nfd};
  if (type == "NFKC") return NormalFormStep{NormalForm::nfkc};
  if (type == "NFKD") return NormalFormStep{NormalForm::nfkd};
  if (type == "Lowercase") return LowercaseStep{};
  if (type == "Prepend") {
    return PrependStep{reader.text(reader.member(component, path, "prepend"), path + "prepend")};
  }
  if (type == "Replace") {
    return ReplaceStep{read_pattern(reader, component, path),
                       reader.text(reader.member(component, path, "content"), path + "content")};
  }
  if (type == "Strip") {
    return StripSpacesStep{reader.flag(component, path, "strip_left", true),
                           reader.flag(component, path, "strip_right", true)};
  }
  reader.unsupported(key, type, kNormalizers);
}

PreTokenizerStep pre_tokenizer_step(const TokenizerJson& reader, const json& component, const std::string& key,
                                    const std::string& type) {
  const std::string path = key + ".";
  const auto by_regex = [](const char* regex, SplitBehavior behavior) {
    return SplitStep{{.text = regex, .is_regex = true}, behavior};
  };
  if (type == "ByteLevel") {
    return ByteLevelStep{reader.flag(component, path, "add_prefix_space", true),
                         reader.flag(component, path, "use_regex", true)};
  }
  if (type == "Metaspace") {
    return MetaspaceStep{read_character(reader, component, path, "replacement"),
                         read_prepend_scheme(reader, component, path), reader.flag(component, path, "split", true)};
  }
  if (type == "Split") {
    return SplitStep{read_pattern(reader, component, path), read_behavior(reader, component, path),
                     reader.flag(component, path, "invert", false)};
  }
  if (type == "Digits") {
    const bool individual = reader.flag(component, path, "individual_digits", false);
    return by_regex(R"(\p{N})", individual ? SplitBehavior::isolated : SplitBehavior::contiguous);
  }
  if (type == "Punctuation") {
    const bool given = TokenizerJson::optional(component, "behavior");
    return by_regex(R"([\p{P}$+<=>^`|~])", given ? read_behavior(reader, component, path) : SplitBehavior::isolated);
  }
  if (type == "Whitespace") {
    // `\w` as in the package's other regular expression engine, which it uses for this step.
    SplitStep step = by_regex(
        R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d}]+|[^\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d}\s]+)",
        SplitBehavior::removed);
    step.invert = true;
    return step;
  }
  if (type == "WhitespaceSplit") return by_regex(R"(\s)", SplitBehavior::removed);
  if (type == "CharDelimiterSplit") {
    return SplitStep{{.text = read_character(reader, component, path, "delimiter")}, SplitBehavior::removed};
  }
  reader.unsupported(key, type, kPreTokenizers);
}

DecoderStep decoder_step(const TokenizerJson& reader, const json& component, const std::string& key,
                         const std::string& type) {
  const std::string path = key + ".";
  if (type == "ByteLevel") return ByteLevelDecode{};
  if (type == "ByteFallback") return ByteFallbackDecode{};
  if (type == "Fuse") return FuseDecode{};
  if (type == "Metaspace") {
    return MetaspaceDecode{read_character(reader, component, path, "replacement"),
                           read_prepend_scheme(reader, component, path) != PrependScheme::never};
  }
  if (type == "Replace") {
    return ReplaceStep{read_pattern(reader, component, path),
                       reader.text(reader.member(component, path, "content"), path + "content")};
  }
  if (type == "Strip") {
    return StripDecode{read_character(reader, component, path, "content"), reader.count(component, path, "start", 0),
                       reader.count(component, path, "stop", 0)};
  }
  reader.unsupported(key, type, kDecoders);
}

bool is_token(const BpeModel& model, TokenId id) {
  const auto index = static_cast<std::size_t>(id);
  return (index < model.tokens.size() && !model.tokens[index].empty()) ||
         std::any_of(model.added_tokens.begin(), model.added_tokens.end(),
                     [&](const AddedToken& token) { return token.id == id; });
}

/// Reads the ids that the template of one text puts before and after it.
void read_template(const TokenizerJson& reader, const json& component, const std::string& key, std::int64_t id_limit,
                   BpeModel& model) {
  const std::string single_key = key + ".single";
  const json& single = reader.member(component, key + ".", "single");
  reader.expect_array(single, single_key);
  const json* specials = TokenizerJson::optional(component, "special_tokens");
  std::vector<TokenId> prefix, suffix;
  int texts = 0;
  for (std::size_t i = 0; i < single.size(); ++i) {
    const std::string part_key = fmt::format("{}[{}]", single_key, i);
    reader.expect_object(single[i], part_key);
    if (const json* sequence = TokenizerJson::optional(single[i], "Sequence")) {
      const std::string id_key = part_key + ".Sequence.id";
      reader.expect_object(*sequence, part_key + ".Sequence");
      const std::string name = reader.text(reader.member(*sequence, part_key + ".Sequence.", "id"), id_key);
      if (name != "A") reader.unsupported(id_key, name, "A: the template of one text holds that text");
      ++texts;
      continue;
    }
    const json& special = reader.member(single[i], part_key + ".", "SpecialToken");
    reader.expect_object(special, part_key + ".SpecialToken");
    const std::string name =
        reader.text(reader.member(special, part_key + ".SpecialToken.", "id"), part_key + ".SpecialToken.id");
    if (!specials || !specials->is_object() || !specials->contains(name)) {
      reader.fail(part_key + ".SpecialToken.id", fmt::format("'{}' is not in {}.special_tokens", name, key));
    }
    const std::string ids_key = fmt::format("{}.special_tokens['{}'].", key, name);
    reader.expect_object((*specials)[name], ids_key);
    const json& ids = reader.member((*specials)[name], ids_key, "ids");
    reader.expect_array(ids, ids_key + "ids");
    for (const json& entry : ids) {
      const TokenId id = reader.id(entry, ids_key + "ids", id_limit);
      if (!is_token(model, id)) reader.fail(ids_key + "ids", fmt::format("{} is the id of no token", id));
      (texts > 0 ? suffix : prefix).push_back(id);
    }
  }
  if (texts != 1) {
    reader.fail(single_key,
                fmt::format("holds the text {} times: expected one {{\"Sequence\": {{\"id\": \"A\"}}}}", texts));
  }
  // A later template encloses the result of an earlier one.
  model.prefix.insert(model.prefix.begin(), prefix.begin(), prefix.end());
  model.suffix.insert(model.suffix.end(), suffix.begin(), suffix.end());
}

}  // namespace

void read_normalizer(const TokenizerJson& reader, const json& root, BpeModel& model) {
  const json* component = TokenizerJson::optional(root, "normalizer");
  if (!component) return;
  for_each_part(reader, *component, "normalizer", "normalizers",
                [&](const json& part, const std::string& key, const std::string& type) {
                  model.normalizer.push_back(normalizer_step(reader, part, key, type));
                });
}

void read_pre_tokenizer(const TokenizerJson& reader, const json& root, BpeModel& model) {
  model.pre_tokenizer.clear();
  const json* component = TokenizerJson::optional(root, "pre_tokenizer");
  if (!component) return;
  for_each_part(reader, *component, "pre_tokenizer", "pretokenizers",
                [&](const json& part, const std::string& key, const std::string& type) {
                  if (model.is_byte_level())
                    reader.fail(key, fmt::format("'{}' after ByteLevel is not supported: "
                                                 "supported is ByteLevel as the last",
                                                 type));
                  model.pre_tokenizer.push_back(pre_tokenizer_step(reader, part, key, type));
                });
}

void read_post_processor(const TokenizerJson& reader, const json& root, std::int64_t id_limit, BpeModel& model) {
  const json* component = TokenizerJson::optional(root, "post_processor");
  if (!component) return;
  for_each_part(reader, *component, "post_processor", "processors",
                [&](const json& part, const std::string& key, const std::string& type) {
                  if (type == "TemplateProcessing") {
                    read_template(reader, part, key, id_limit, model);
                  } else if (type != "ByteLevel") {  // which only moves offsets
                    reader.unsupported(key, type, kPostProcessors);
                  }
                });
}

void read_decoder(const TokenizerJson& reader, const json& root, BpeModel& model) {
  model.decoder.clear();
  const json* component = TokenizerJson::optional(root, "decoder");
  if (!component) reader.unsupported("decoder", "null", kDecoders);
  bool byte_level = false;
  for_each_part(reader, *component, "decoder", "decoders",
                [&](const json& part, const std::string& key, const std::string& type) {
                  model.decoder.push_back(decoder_step(reader, part, key, type));
                  byte_level |= type == "ByteLevel";
                });
  if (byte_level != model.is_byte_level()) {
    reader.fail("decoder", model.is_byte_level()
                               ? "has no ByteLevel, but pre_tokenizer is ByteLevel: expected both or neither"
                               : "is ByteLevel, but pre_tokenizer does not end in ByteLevel: expected both or neither");
  }
  if (model.is_byte_level() && !std::holds_alternative<ByteLevelDecode>(model.decoder.front())) {
    reader.fail("decoder", "has steps before ByteLevel, which is not supported: expected ByteLevel first");
  }
  checked(reader, "decoder", [&] { return TokenDecoder(model.decoder); });
}

}  // namespace phalanx::data
