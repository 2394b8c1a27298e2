// The subcommands of `phalanx`: how the two programs find and run them.
//
// `phalanx` is the front: torch-free, it starts in milliseconds, does what needs no tensor, prepares the environment
// and becomes (or spawns) `phalanx-worker`, which links libtorch. Every subcommand has one file, NAME_command.cc, that
// parses and prints only; an exception that leaves it is printed once by run_command() and becomes the exit status (2
// for usage and configuration, 1 otherwise).
//
//   int report_command(const Arguments& arguments);   // report_command.h; arguments without program and subcommand
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx::cli {

using Arguments = std::vector<std::string>;

struct Command {
  std::string_view name;
  std::string_view summary;  // one line, for `phalanx --help`
  std::string_view help;     // what `phalanx NAME --help` prints; empty: the command prints its own
  std::function<int(const Arguments&)> run;
};

/// Tells somebody else of an error; true if they will print it.
using ErrorReporter = bool (*)(const std::exception& error);

/// Runs `command`, printing its help when asked for and its error when it throws, unless `reporter` takes it.
int run_command(const Command& command, const Arguments& arguments, ErrorReporter reporter = nullptr);

/// "phalanx NAME: text" on standard error; nothing happens where that cannot be written (a terminal that has gone).
void print_error(std::string_view name, std::string_view text);

/// Takes `name VALUE` or `name=VALUE` out of the arguments; false if it is not there. A missing value is a UsageError.
bool take_option(Arguments& arguments, std::string_view name, std::string& value);
/// Takes the flag out of the arguments; false if it is not there.
bool take_flag(Arguments& arguments, std::string_view name);
/// Takes the configuration file out of the arguments: the first one named *.toml, else the first. UsageError if there
/// is none.
std::string take_config_path(Arguments& arguments, std::string_view command);
/// A UsageError naming the first argument, unless there is none.
void refuse_rest(const Arguments& arguments, std::string_view command);

}  // namespace phalanx::cli
