#include "phalanx/report/run_json.h"

#include <nlohmann/json.hpp>

namespace phalanx::report {

std::optional<double> json_number(const nlohmann::json& object, const char* key) {
  const auto at = object.find(key);
  if (at == object.end() || !at->is_number()) return std::nullopt;
  return at->get<double>();
}

std::string json_text(const nlohmann::json& object, const char* key) {
  const auto at = object.find(key);
  if (at == object.end() || at->is_null()) return "";
  if (at->is_string()) return at->get<std::string>();
  return at->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace phalanx::report
