// parse_options(): CLI11's parser with this program's error messages. A UsageError names the option, what was expected
// and found, and the nearest option.
//
//   CLI::App app;
//   app.add_option("--top-k", top_k);
//   parse_options(app, arguments);
//
// Values may follow their option in every way: --top-k 5, --top-k=5, -n 5, -n5, -n=5. Names may have _ for -. CLI11
// silently replaces an integer that is too large by the largest one; this function refuses it. The caller checks ranges
// and choices, with clear messages, instead of CLI11's validators.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"

namespace phalanx::cli {

/// Returns the words that are not the app's, which are of two kinds. An app with allow_extras() leaves a configuration
/// file and overrides of its keys (--section.key value); an option that is nearly one of the app's is refused. An app
/// with prefix_command() leaves a program and its arguments: all words after `--`, or from the first one on that is no
/// option; only it has a help flag, for which CLI::CallForHelp is thrown. Other apps leave none, and throw UsageError
/// for one too many.
Arguments parse_options(CLI::App& app, const Arguments& arguments);

/// Takes the first word, which names one of the app's subcommands. parse_options() of that subcommand reads the rest.
/// UsageError if there is no such subcommand.
CLI::App& take_subcommand(CLI::App& app, Arguments& words);

/// Takes the configuration file out of the words that parse_options() leaves: the first one named *.toml, else the
/// first. UsageError if there is none.
std::string take_config_path(Arguments& words, std::string_view command);

/// Adds an option that may be repeated, with one value each time.
CLI::Option* add_repeated_option(CLI::App& app, const std::string& names, std::vector<std::string>& values);

/// Adds -n, the number of ranks that the front program starts. The worker takes it too, and ignores it.
CLI::Option* add_ranks_option(CLI::App& app, std::string& ranks, const std::string& names = "-n,--nproc-per-node");

/// Throws a UsageError unless the value of option `name` is at least `least` and at most `most`.
void require_range(std::string_view name, std::int64_t value, std::int64_t least,
                   std::int64_t most = std::numeric_limits<std::int64_t>::max());

/// Returns float32, bfloat16 or float16 for these names and their aliases. Throws UsageError for any other text.
std::string dtype_option(const std::string& name, const std::string& text);

/// Throws a UsageError unless `name` is a backend that [comm] backend takes.
void check_backend_option(const std::string& name);

/// Throws a UsageError unless --assets names a tokenizer.json or a directory that holds one.
void require_assets(const std::string& path);

/// Throws a UsageError if `output`, the value of option `name`, is the file that another option reads.
void refuse_same_file(const std::string& name, const std::string& output, const std::string& input);

}  // namespace phalanx::cli
