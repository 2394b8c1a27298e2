// The subcommands of `phalanx`: how its two programs find and run them.
//
// `phalanx` is the front program. It is torch-free and starts in milliseconds. It does the work that needs no tensor,
// prepares the environment, and becomes (or spawns) `phalanx-worker`, which links libtorch. Every subcommand has one
// file, NAME_command.cc, that only parses and prints. run_command() prints an exception that leaves the subcommand
// once, and turns it into the exit status: 2 for usage and configuration errors, otherwise 1.
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
  bool needs_arguments = false;  // without any, run_command() prints the help on standard error and returns 2
};

/// Reports an error elsewhere, such as to the launcher. Returns true if the error will be printed there.
using ErrorReporter = bool (*)(const std::exception& error);

/// Runs `command` and returns the exit status. Prints its help on request, and its error unless `reporter` returns
/// true.
int run_command(const Command& command, const Arguments& arguments, ErrorReporter reporter = nullptr);

/// Prints "phalanx NAME: text" on standard error. A failed write (a closed terminal) is ignored.
void print_error(std::string_view name, std::string_view text);

}  // namespace phalanx::cli
