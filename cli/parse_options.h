// CLI11's parser in this program's words: a UsageError that names the option, what was expected, and the nearest
// option.
//
//   CLI::App app;
//   app.add_option("--top-k", top_k);
//   parse_options(app, arguments);
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"
#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"

namespace phalanx::cli {

inline void parse_options(CLI::App& app, const Arguments& arguments) {
  app.set_help_flag();
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));  // CLI11 takes them from the back
  } catch (const CLI::ExtrasError&) {
    std::vector<std::string> known;
    for (const CLI::Option* option : app.get_options()) {
      for (const auto& name : option->get_lnames()) known.push_back("--" + name);
    }
    for (const std::string& argument : arguments) {
      const std::string name = argument.substr(0, argument.find('='));
      if (name.size() < 2 || name[0] != '-' || app.get_option_no_throw(name) != nullptr) continue;
      throw UsageError(fmt::format("unknown option '{}'{}", name, did_you_mean(name, known)));
    }
    throw UsageError(fmt::format("unexpected argument '{}'", app.remaining().at(0)));
  } catch (const CLI::ConversionError& error) {
    constexpr std::string_view kOpening = "Could not convert: ";
    const std::string_view text = error.what();
    throw UsageError(
        fmt::format("{}: expected a number", text.starts_with(kOpening) ? text.substr(kOpening.size()) : text));
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
}

}  // namespace phalanx::cli
