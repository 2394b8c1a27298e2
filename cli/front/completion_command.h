// phalanx completion SHELL: prints the script that makes a shell complete commands, options and configuration keys.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"

namespace phalanx::cli {

/// What the words after `phalanx NAME` may be.
struct CompletedCommand {
  std::string name;
  std::vector<std::string> words;    // of `phalanx checkpoint WORD`
  std::vector<std::string> options;  // "--top-k"
};

/// Reads words and options out of what `phalanx NAME --help` prints. `takes_keys`: every configuration key is an
/// option.
CompletedCommand completed_command(std::string_view name, std::string_view help, bool takes_keys);

/// `shell`: bash, zsh or fish. UsageError for another one.
std::string completion_script(std::string_view shell, const std::vector<CompletedCommand>& commands);

/// Prints the script of the shell that the arguments name. A command without a help text is run with --help.
int completion_command(const Arguments& arguments, const std::vector<Command>& commands);
extern const std::string_view kCompletionHelp;

}  // namespace phalanx::cli
