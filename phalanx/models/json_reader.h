// Reads keys of one JSON object; a missing or mistyped one is a CheckpointError that names file and key.
//
//   const JsonReader read(json, "config.json");
//   const auto layers = read.get<std::int64_t>("num_hidden_layers");
//   const auto theta = read.get_or<double>("rope_theta", 10000.0);      // also where it is null
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/json_number.h"

namespace phalanx::models {

class JsonReader {
 public:
  JsonReader(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {}

  template <class T>
  T get(const char* key) const {
    if (!object_.contains(key)) throw CheckpointError(fmt::format("{} has no \"{}\"", where_, key));
    try {
      const nlohmann::json& value = object_.at(key);
      if (!std::is_same_v<T, std::int64_t> || is_whole_number(value)) return value.get<T>();
    } catch (const nlohmann::json::exception&) {
      // Said below.
    }
    throw CheckpointError(fmt::format("{}: \"{}\" is {}: expected {}", where_, key,
                                      object_.at(key).dump(-1, ' ', /*ensure_ascii=*/true).substr(0, 80),
                                      name_of_type<T>()));
  }
  template <class T>
  T get_or(const char* key, T otherwise) const {
    return !object_.contains(key) || object_.at(key).is_null() ? otherwise : get<T>(key);
  }

 private:
  template <class T>
  static constexpr const char* name_of_type() {
    if (std::is_same_v<T, bool>) return "true or false";
    if (std::is_integral_v<T>) return "a whole number";
    if (std::is_floating_point_v<T>) return "a number";
    return std::is_same_v<T, std::string> ? "a string" : "a value of another type";
  }

  const nlohmann::json& object_;
  std::string where_;
};

}  // namespace phalanx::models
