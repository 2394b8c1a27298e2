// Reads the keys of one tokenizer.json. Every failure is a DataError that names the file and the key's path.
//
//   const TokenizerJson reader("model/tokenizer.json");
//   const bool split = reader.flag(component, "pre_tokenizer.", "split", true);
//   // model/tokenizer.json: pre_tokenizer.split: expected true or false, found 3
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/data/tokenizer/bpe_model.h"

namespace phalanx::data {

class TokenizerJson {
 public:
  using json = nlohmann::json;

  explicit TokenizerJson(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }

  [[noreturn]] void fail(const std::string& key, const std::string& message) const {
    throw DataError(fmt::format("{}: {}: {}", name_, key, message));
  }

  const json& member(const json& object, const std::string& path, const char* key) const {
    const auto found = object.find(key);
    if (found == object.end()) fail(path + key, "missing");
    return *found;
  }

  /// Null if the key is missing or its value is null.
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

  std::int64_t count(const json& object, const std::string& path, const char* key, std::int64_t standard) const {
    const json* value = optional(object, key);
    if (!value) return standard;
    if (!value->is_number_unsigned() || value->get<std::uint64_t>() > 0xFFFF) {
      fail(path + key, fmt::format("expected a number from 0 to 65535, found {}", brief(*value)));
    }
    return value->get<std::int64_t>();
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

/// Read `normalizer`, `pre_tokenizer`, `post_processor` and `decoder`; all except the last may be missing or null.
/// REQUIRES: the tokens are read before the template, and the pre-tokenizer before the tokens and the decoder.
void read_normalizer(const TokenizerJson& reader, const nlohmann::json& root, BpeModel& model);
void read_pre_tokenizer(const TokenizerJson& reader, const nlohmann::json& root, BpeModel& model);
void read_post_processor(const TokenizerJson& reader, const nlohmann::json& root, std::int64_t id_limit,
                         BpeModel& model);
void read_decoder(const TokenizerJson& reader, const nlohmann::json& root, BpeModel& model);

}  // namespace phalanx::data
