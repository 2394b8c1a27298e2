// Shared by the tests of configuration keys.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/config/config.h"
#include "phalanx/config/config_reader.h"

namespace phalanx::config {

/// What a file "run.toml" with this text and these flags says.
inline TrainConfig parse(std::string_view text, const std::vector<std::string>& flags = {}) {
  return parse_config(text, "run.toml", flags);
}

/// The error of such a file.
template <class E = ConfigError>
std::string refusal(std::string_view text, const std::vector<std::string>& flags = {}) {
  return error_text<E>([&] { parse(text, flags); });
}

/// What is said about such a file that is no error.
inline std::vector<std::string> notes_of(std::string_view text, const std::vector<std::string>& flags = {}) {
  const ConfigReading reading = take_config(text, "run.toml", flags);
  reading.problems.throw_if_any("run.toml");
  return reading.notes;
}

}  // namespace phalanx::config
