// parse_options(): CLI11's parser with this program's error messages. A UsageError names the option, what was expected
// and found, and the nearest option.
//
//   CLI::App app;
//   app.add_option("--top-k", top_k);
//   parse_options(app, arguments);
//
// CLI11 silently replaces an integer that is too large by the largest one; this function refuses it. The caller checks
// ranges and choices, with clear messages, instead of CLI11's validators.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "cli/command.h"

namespace phalanx::cli {

void parse_options(CLI::App& app, const Arguments& arguments);

/// Returns float32, bfloat16 or float16 for these names and their aliases. Throws UsageError for any other text.
std::string dtype_option(const std::string& name, const std::string& text);

/// Throws a UsageError unless `name` is a backend that [comm] backend takes.
void check_backend_option(const std::string& name);

/// Throws a UsageError unless --assets names a tokenizer.json or a directory that holds one.
void require_assets(const std::string& path);

/// Throws a UsageError if `output`, the value of option `name`, is the file that another option reads.
void refuse_same_file(const std::string& name, const std::string& output, const std::string& input);

}  // namespace phalanx::cli
