#include "cli/parse_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "phalanx/base/dtype_names.h"
#include "phalanx/base/error.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/base/nearest.h"
#include "phalanx/config/config_reader.h"
#include "phalanx/config/config_schema.h"

namespace phalanx::cli {
namespace {

bool is_number_type(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type == "INT" || type == "UINT" || type == "FLOAT";
}

/// Throws a UsageError if the option, written as `name`, cannot take this text.
void check_value(const CLI::Option& option, const std::string& name, const std::string& value) {
  if (value.empty() && option.get_type_name() != "TEXT") throw UsageError(fmt::format("{} needs a value", name));
  if (!is_number_type(option)) return;
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
  if (*end != '\0' || is_octal) {
    throw UsageError(fmt::format("{} is '{}': expected a {}number", name, value, is_whole ? "whole " : ""));
  }
  if (is_whole && errno == ERANGE) throw UsageError(fmt::format("{} is '{}': the number is too large", name, value));
}

/// A negative number is none.
bool looks_like_option(const std::string& word) {
  return word.size() > 1 && word[0] == '-' && (word[1] < '0' || word[1] > '9');
}

/// Whether the word overrides a configuration key whose value may be the next word.
bool is_bare_key(const std::string& word) {
  return word.starts_with("--") && word.find('.') != std::string::npos && word.find('=') == std::string::npos;
}

/// The option that a word is, and its value if that is in the word: --name, --name=value, -n, -n4, -n=4.
struct WrittenOption {
  std::string name;
  const CLI::Option* option = nullptr;  // null: unknown
  std::optional<std::string> value = {};
};

/// The option of this name, which may have _ for -. Null if there is none.
const CLI::Option* option_named(const CLI::App& app, const std::string& name) {
  if (const CLI::Option* option = app.get_option_no_throw(name)) return option;
  std::string dashed = name;
  if (dashed.starts_with("--")) std::ranges::replace(dashed, '_', '-');
  return app.get_option_no_throw(dashed);
}

WrittenOption read_option(const CLI::App& app, const std::string& word) {
  const std::size_t equals = word.find('=');
  WrittenOption written{.name = word.substr(0, equals)};
  if (!looks_like_option(word)) return written;
  written.option = option_named(app, written.name);
  if (written.option != nullptr) {
    if (equals != std::string::npos) written.value = word.substr(equals + 1);
  } else if (word[1] != '-' && app.get_option_no_throw(word.substr(0, 2)) != nullptr) {
    return {.name = word.substr(0, 2), .option = app.get_option_no_throw(word.substr(0, 2)), .value = word.substr(2)};
  }
  return written;
}

/// The words of a command line, checked and sorted by who takes them.
class SortedWords {
 public:
  SortedWords(const CLI::App& app, const Arguments& words) : app_(app) {
    const bool starts_program = app.get_prefix_command();
    auto word = words.begin();
    for (; word != words.end() && *word != "--" && (looks_like_option(*word) || !starts_program); ++word) {
      const WrittenOption written = read_option(app, *word);
      if (written.option == nullptr || is_value_of_key(*word)) {
        take_other(*word);
      } else if (take_option(written, *word, word + 1 == words.end() ? nullptr : &word[1])) {
        ++word;
      }
    }
    if (starts_program && word != words.end() && *word == "--") ++word;
    Arguments& last = starts_program || app.get_allow_extras() ? rest : for_parser;
    last.insert(last.end(), word, words.end());
  }

  Arguments for_parser;  // a value is a word of its own, which CLI11 takes whatever it is
  Arguments rest;

 private:
  /// The name of an option is no value of a key: --training.steps --json FILE. Nor are words but true and false values
  /// of a boolean key: --checkpoint.enable -n2.
  bool is_value_of_key(const std::string& word) const {
    if (rest.empty() || !is_bare_key(rest.back())) return false;
    if (config::is_boolean_flag(rest.back())) return config::is_boolean_text(word);
    return option_named(app_, word.substr(0, word.find('='))) == nullptr;
  }

  /// Returns whether `next`, which may be null, was its value.
  bool take_option(const WrittenOption& written, const std::string& word, const std::string* next) {
    const CLI::Option& option = *written.option;
    if (&option == app_.get_help_ptr()) throw CLI::CallForHelp();
    const std::string name = written.name.size() > 2 ? option.get_name() : written.name;
    const bool is_flag = option.get_items_expected_max() == 0;
    if (is_flag || option.get_expected_min() == 0) {
      if (written.value && option.get_disable_flag_override()) {
        throw UsageError(fmt::format("{} takes no value", written.name));
      }
      for_parser.push_back(name + word.substr(written.name.size()));
      return false;
    }
    if (!written.value && next == nullptr) throw UsageError(fmt::format("{} needs a value", written.name));
    const std::string& value = written.value ? *written.value : *next;
    check_value(option, written.name, value);
    const bool is_new = seen_.insert(&option).second;
    if (!is_new && option.get_multi_option_policy() == CLI::MultiOptionPolicy::Throw) {
      throw UsageError(fmt::format("{} is given twice: expected it once", written.name));
    }
    for_parser.insert(for_parser.end(), {name, value});
    return !written.value;
  }

  void take_other(const std::string& word) {
    const std::string name = word.substr(0, word.find('='));
    std::vector<std::string> known;
    for (const CLI::Option* option : app_.get_options()) {
      for (const auto& long_name : option->get_lnames()) known.push_back("--" + long_name);
    }
    const bool may_be_key = app_.get_allow_extras() && (is_value_of_key(word) || name.find('.') != std::string::npos ||
                                                        nearest(name, known).empty());
    if (looks_like_option(word) && !may_be_key) {
      throw UsageError(fmt::format("unknown option '{}'{}", name, did_you_mean(name, known)));
    }
    (app_.get_allow_extras() ? rest : for_parser).push_back(word);
  }

  const CLI::App& app_;
  std::set<const CLI::Option*> seen_;
};

/// The error of CLI11 with a better text where a number does not fit its variable or is none.
[[noreturn]] void refuse_conversion(const CLI::App& app, const CLI::ConversionError& error) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_name();
    if (!is_number_type(*option) || std::string(error.what()).find(name + " = ") == std::string::npos) continue;
    check_value(*option, name, option->results().back());
    throw UsageError(fmt::format("{} is '{}': the number is too large", name, option->results().back()));
  }
  throw UsageError(error.what());
}

}  // namespace

Arguments parse_options(CLI::App& app, const Arguments& arguments) {
  if (!app.get_prefix_command()) app.set_help_flag();
  const SortedWords words(app, arguments);
  try {
    app.parse(Arguments(words.for_parser.rbegin(), words.for_parser.rend()));  // CLI11 reads them from the back
  } catch (const CLI::ExtrasError&) {
    const Arguments extra = app.remaining();
    throw UsageError(fmt::format("unexpected argument '{}'",
                                 *std::ranges::find_if(extra, [](const std::string& word) { return word != "--"; })));
  } catch (const CLI::ConversionError& error) {
    refuse_conversion(app, error);
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  return words.rest;
}

CLI::App& take_subcommand(CLI::App& app, Arguments& words) {
  std::vector<std::string> names;
  for (const CLI::App* subcommand : std::as_const(app).get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(subcommand->get_name());
  if (words.empty()) throw UsageError(fmt::format("expected a subcommand: {}", fmt::join(names, ", ")));
  try {
    CLI::App& subcommand = *app.get_subcommand(words.front());
    words.erase(words.begin());
    return subcommand;
  } catch (const CLI::OptionNotFound&) {
    throw UsageError(fmt::format("unknown subcommand '{}'{}: expected {}", words.front(),
                                 did_you_mean(words.front(), names), fmt::join(names, ", ")));
  }
}

std::string take_config_path(Arguments& words, std::string_view command) {
  auto config = std::ranges::find_if(
      words, [](const std::string& word) { return word.ends_with(".toml") && !word.starts_with("-"); });
  if (config == words.end() && !words.empty() && !words[0].starts_with("-")) config = words.begin();
  if (config == words.end()) {
    throw UsageError(fmt::format("expected a configuration file: phalanx {} CONFIG.toml", command));
  }
  std::string path = *config;
  words.erase(config);
  return path;
}

CLI::Option* add_repeated_option(CLI::App& app, const std::string& names, std::vector<std::string>& values) {
  return app.add_option(names, values)->expected(1)->take_all()->allow_extra_args(false);
}

CLI::Option* add_ranks_option(CLI::App& app, std::string& ranks, const std::string& names) {
  return app.add_option(names, ranks)->type_name("COUNT");  // no TEXT: it is not empty
}

void require_range(std::string_view name, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  const bool is_bounded = most < std::numeric_limits<std::int64_t>::max();
  throw UsageError(
      fmt::format("{} is {}: expected {} {}", name, value, least, is_bounded ? fmt::format("to {}", most) : "or more"));
}

std::string dtype_option(const std::string& name, const std::string& text) {
  std::string dtype = canonical_dtype(text);
  if (dtype == "float32" || dtype == "bfloat16" || dtype == "float16") return dtype;
  throw UsageError(fmt::format("{} is '{}': expected float32, bfloat16 or float16", name, text));
}

void check_backend_option(const std::string& name) {
  for (const config::Key& key : config::known_keys()) {
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
