// Collects what is wrong with a configuration, all of it, so that one report tells it.
//
//   ConfigProblems problems;
//   problems.collect([&] { check_one_thing(config); });
//   problems.throw_if_any("llama.toml");
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx::train {

class ConfigProblems {
 public:
  /// Runs what may throw a ConfigError, and keeps its text. Whether it threw.
  template <class Check>
  bool collect(Check&& check) {
    try {
      check();
      return false;
    } catch (const ConfigError& error) {
      texts_.emplace_back(error.what());
      return true;
    }
  }
  void throw_if_any(const std::string& source) const {
    if (texts_.empty()) return;
    if (texts_.size() == 1) throw ConfigError(texts_[0]);
    throw ConfigError(fmt::format("{}: {} problems\n  {}", source, texts_.size(), fmt::join(texts_, "\n  ")));
  }

 private:
  std::vector<std::string> texts_;
};

}  // namespace phalanx::train
