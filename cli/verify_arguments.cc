#include "cli/verify_arguments.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstdlib>

#include "phalanx/base/error.h"

namespace phalanx::cli {

VerifyArguments parse_verify_arguments(Arguments arguments) {
  VerifyArguments parsed;
  std::string text;
  if (take_option(arguments, "--steps", text)) {
    const auto [stopped, error] = std::from_chars(text.data(), text.data() + text.size(), parsed.steps);
    if (error != std::errc() || stopped != text.data() + text.size() || parsed.steps < 1) {
      throw UsageError(fmt::format("--steps is '{}': expected a number of training steps, 1 or more", text));
    }
  }
  if (take_option(arguments, "--tolerance", text)) {
    char* end = nullptr;
    parsed.tolerance = std::strtod(text.c_str(), &end);
    if (end == text.c_str() || *end != '\0' || !(*parsed.tolerance > 0) || std::isinf(*parsed.tolerance)) {
      throw UsageError(fmt::format("--tolerance is '{}': expected a number above 0, such as 1e-5", text));
    }
  }
  while (take_option(arguments, "--layout", text)) parsed.layouts.push_back(text);
  parsed.all = take_flag(arguments, "--all");
  parsed.table = take_flag(arguments, "--table");
  take_option(arguments, "--json", parsed.json);
  if (parsed.all && !parsed.layouts.empty()) {
    throw UsageError("--all checks every layout: leave --layout out, or name some without --all");
  }
  parsed.config = take_config_path(arguments, "verify");
  parsed.overrides = std::move(arguments);
  return parsed;
}

std::vector<train::NamedLayout> layouts_to_verify(const VerifyArguments& arguments, std::int64_t ranks) {
  std::vector<std::string> notes;  // reported before
  const train::TrainConfig config = train::read_config(arguments.config, arguments.overrides, &notes);
  if (arguments.all) return train::all_layouts(config, ranks);
  std::vector<train::NamedLayout> layouts;
  for (const std::string& name : arguments.layouts) layouts.push_back(train::with_layout(config, name, ranks));
  if (layouts.empty()) {
    train::plan_run(config, ranks);
    layouts.push_back({.name = "the configuration's", .config = config, .ranks = ranks});
  }
  return layouts;
}

}  // namespace phalanx::cli
