#include "cli/parse_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <vector>

#include "phalanx/base/dtype_names.h"
#include "phalanx/base/error.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/base/nearest.h"
#include "phalanx/config/config_schema.h"

namespace phalanx::cli {
namespace {

bool is_number_type(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type == "INT" || type == "UINT" || type == "FLOAT";
}

/// The error in one value of an option, or "".
std::string fault_of_value(const CLI::Option& option, const std::string& value) {
  if (!is_number_type(option)) return "";
  const bool is_whole = option.get_type_name() != "FLOAT";
  char* end = nullptr;
  errno = 0;
  bool is_octal = false;  // CLI11 reads 010 as octal
  if (is_whole) {
    const long long number = std::strtoll(value.c_str(), &end, 10);
    is_octal = number != std::strtoll(value.c_str(), nullptr, 0);
  } else {
    static_cast<void>(std::strtod(value.c_str(), &end));
  }
  if (value.empty() || *end != '\0' || is_octal) return is_whole ? "expected a whole number" : "expected a number";
  return is_whole && errno == ERANGE ? "the number is too large" : "";
}

const CLI::Option* option_named(const CLI::App& app, const std::string& name) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->check_name(name)) return option;
  }
  return nullptr;
}

/// Finds the option on the command line that the parser failed at, and throws a clear error.
[[noreturn]] void refuse_in_words(const CLI::App& app, const Arguments& arguments, const CLI::ParseError& error) {
  std::vector<const CLI::Option*> seen;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const std::size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    if (name.size() < 2 || name[0] != '-') continue;
    const CLI::Option* option = option_named(app, name);
    if (option == nullptr) continue;
    const bool takes_value = option->get_expected_max() > 0 && option->get_type_size_max() > 0;
    if (!takes_value) continue;
    const bool is_bare = equals == std::string::npos;
    const std::string value = !is_bare ? argument.substr(equals + 1) : i + 1 < arguments.size() ? arguments[i + 1] : "";
    if (const std::string fault = fault_of_value(*option, value); !fault.empty() && !value.empty()) {
      throw UsageError(fmt::format("{} is '{}': {}", name, value, fault));
    }
    if ((is_bare && i + 1 == arguments.size()) || (!is_bare && value.empty())) {
      throw UsageError(fmt::format("{} needs a value", name));
    }
    const bool repeats = option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
    if (!repeats && std::ranges::find(seen, option) != seen.end()) {
      throw UsageError(fmt::format("{} is given twice: expected it once", name));
    }
    seen.push_back(option);
    if (is_bare) ++i;
  }
  throw UsageError(error.what());
}

}  // namespace

void parse_options(CLI::App& app, const Arguments& arguments) {
  app.set_help_flag();
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));  // CLI11 reads them from the back
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
  } catch (const CLI::ParseError& error) {
    refuse_in_words(app, arguments, error);
  }
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& value : option->results()) {
      if (value.empty() && option->get_expected_min() == 0) continue;  // a flag with an optional value
      if (const std::string fault = fault_of_value(*option, value); !fault.empty()) {
        throw UsageError(fmt::format("{} is '{}': {}", option->get_name(), value, fault));
      }
    }
  }
}

std::string dtype_option(const std::string& name, const std::string& text) {
  const std::string dtype = canonical_dtype(text);
  if (dtype == "float32" || dtype == "bfloat16" || dtype == "float16") return dtype;
  throw UsageError(fmt::format("{} is '{}': expected float32, bfloat16 or float16", name, text));
}

void check_backend_option(const std::string& name) {
  for (const train::Key& key : train::known_keys()) {
    if (key.section != "comm" || key.name != "backend" || std::ranges::find(key.choices, name) != key.choices.end()) {
      continue;
    }
    const std::vector<std::string> known(key.choices.begin(), key.choices.end());
    throw UsageError(fmt::format("--backend is '{}'{}: expected one of {}", name, did_you_mean(name, known),
                                 fmt::join(known, ", ")));
  }
}

void require_assets(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::exists(path, error)) {
    throw UsageError(fmt::format("--assets {}: no such file or directory{}", path, hub_hint(path)));
  }
  if (fs::is_directory(path, error) && !fs::exists(fs::path(path) / "tokenizer.json", error)) {
    throw UsageError(
        fmt::format("--assets {}: expected the tokenizer's files in it, and there is no tokenizer.json", path));
  }
}

void refuse_same_file(const std::string& name, const std::string& output, const std::string& input) {
  std::error_code error;
  if (output.empty() || input.empty()) return;
  const bool is_same =
      std::filesystem::weakly_canonical(output, error) == std::filesystem::weakly_canonical(input, error) ||
      std::filesystem::equivalent(output, input, error);
  if (is_same) throw UsageError(fmt::format("{} {} is a file that is read: choose another name", name, output));
}

}  // namespace phalanx::cli
