// Collects all problems of a configuration, so that one report lists them.
//
//   ConfigProblems problems;
//   problems.collect([&] { check_one_thing(config); });
//   problems.throw_if_any("llama.toml");
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx::config {

class ConfigProblems {
 public:
  /// Runs `check` and stores the text of an error it throws, each text once. Returns whether it threw.
  template <class Check>
  bool collect(Check&& check) {
    try {
      check();
      return false;
    } catch (const ConfigError& error) {
      add(error);
    } catch (const DataError& error) {
      add(error);
    } catch (const FileError& error) {
      add(error);
    } catch (const CheckpointError& error) {
      add(error);
    }
    return true;
  }
  bool any() const { return !texts_.empty(); }
  /// A single problem is rethrown as it was.
  void throw_if_any(const std::string& source) const {
    if (texts_.size() > 1) {
      throw ConfigError(fmt::format("{}: {} problems\n  {}", source, texts_.size(), fmt::join(texts_, "\n  ")));
    }
    throw_first();
  }
  void throw_first() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  void add(const Error& error) {
    if (!first_) first_ = std::current_exception();
    if (std::ranges::find(texts_, error.what()) == texts_.end()) texts_.emplace_back(error.what());
  }

  std::vector<std::string> texts_;
  std::exception_ptr first_;
};

}  // namespace phalanx::config
