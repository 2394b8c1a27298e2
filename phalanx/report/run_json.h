// Values of run.json, which may be of any version or damaged: of another type counts as missing.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace phalanx::report {

std::optional<double> json_number(const nlohmann::json& object, const char* key);
/// A string as it is, any other value as JSON; "" for null and for a missing key.
std::string json_text(const nlohmann::json& object, const char* key);

}  // namespace phalanx::report
