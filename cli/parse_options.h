// CLI11's parser in this program's words: a UsageError that names the option, what was expected and found, and the
// nearest option.
//
//   CLI::App app;
//   app.add_option("--top-k", top_k);
//   parse_options(app, arguments);
//
// CLI11 takes an integer that is too large for the largest one; here it is refused. Ranges and choices are checked
// by the caller, in words, not by CLI11's validators.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "cli/command.h"

namespace phalanx::cli {

void parse_options(CLI::App& app, const Arguments& arguments);

/// float32, bfloat16 or float16, of these and their other names; a UsageError for anything else.
std::string dtype_option(const std::string& name, const std::string& text);

/// Throws a UsageError unless `name` is a backend that [comm] backend takes.
void check_backend_option(const std::string& name);

/// Throws a UsageError unless --assets names a tokenizer.json or a directory that holds one.
void require_assets(const std::string& path);

/// Throws a UsageError if `output`, of option `name`, is the file that another option reads.
void refuse_same_file(const std::string& name, const std::string& output, const std::string& input);

}  // namespace phalanx::cli
