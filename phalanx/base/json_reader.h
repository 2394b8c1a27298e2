// JsonReader: reads the keys of a JSON object that comes from outside. If a key is missing or has another type, it
// throws ErrorType. The error names the file, the key, what was expected and what was found, without the JSON library's
// wording.
//
//   const JsonReader<CheckpointError> read(json, "config.json");
//   const auto layers = read.get<std::int64_t>("num_hidden_layers");
//   const auto theta = read.get_or<double>("rope_theta", 10000.0);      // the default is also used for null
//   for (const auto& file : read.array("files")) ...
//
//   // config.json has no "num_hidden_layers"
//   // config.json: "rope_theta" is "big": expected a number
//
// A number that does not fit into T is an error too. Messages are printable ASCII, whatever the file contains.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <utility>

#include "phalanx/base/json_number.h"

namespace phalanx {

template <class ErrorType>
class JsonReader {
 public:
  /// Messages begin with `where`.
  /// REQUIRES: `object` outlives the reader.
  JsonReader(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object_.is_object()) {
      throw ErrorType(fmt::format("{}: expected a JSON object, found {}", where_, object_.type_name()));
    }
  }

  const std::string& where() const { return where_; }
  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }

  template <class T>
  T get(const char* key) const {
    const nlohmann::json& value = at(key);
    if constexpr (std::is_same_v<T, bool>) {
      if (value.is_boolean()) return value.get<T>();
    } else if constexpr (std::is_integral_v<T>) {
      if (is_whole_number(value) && std::in_range<T>(value.get<std::int64_t>())) return value.get<T>();
    } else if constexpr (std::is_floating_point_v<T>) {
      if (value.is_number()) return value.get<T>();
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (value.is_string()) return value.get<T>();
    } else {
      try {
        return value.get<T>();
      } catch (const nlohmann::json::exception&) {  // said below
      }
    }
    fail(key, name_of_type<T>());
  }
  template <class T>
  T get_or(const char* key, T otherwise) const {
    return has(key) ? get<T>(key) : otherwise;
  }
  const nlohmann::json& array(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_array()) fail(key, "a list");
    return value;
  }
  const nlohmann::json& object(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_object()) fail(key, "an object");
    return value;
  }

  /// Throws an error with the key's value and what was expected.
  [[noreturn]] void fail(const char* key, const std::string& expected) const {
    constexpr std::size_t kLongest = 80;
    std::string found = object_.at(key).dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
    if (found.size() > kLongest) found = found.substr(0, kLongest) + "...";
    throw ErrorType(fmt::format("{}: \"{}\" is {}: expected {}", where_, key, found, expected));
  }

 private:
  const nlohmann::json& at(const char* key) const {
    const auto found = object_.find(key);
    if (found == object_.end()) {
      throw ErrorType(fmt::format("{} has no \"{}\"", where_, key));
    }
    return *found;
  }
  template <class T>
  static constexpr const char* name_of_type() {
    if (std::is_same_v<T, bool>) return "true or false";
    if (std::is_unsigned_v<T>) return "a whole number of 0 or more";
    if (std::is_integral_v<T>) return "a whole number";
    if (std::is_floating_point_v<T>) return "a number";
    return std::is_same_v<T, std::string> ? "a string" : "a value of another type";
  }

  const nlohmann::json& object_;
  std::string where_;
};

}  // namespace phalanx
