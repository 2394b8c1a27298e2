#include "cli/front/completion_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <regex>
#include <system_error>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/config/config_schema.h"

namespace phalanx::cli {

const std::string_view kCompletionHelp = R"(usage: phalanx completion bash|zsh|fish

Prints the script that makes a shell complete commands, options and configuration keys. Its words are those of the help
texts, so a script made by another version may lack some.

  source <(phalanx completion bash)                                          # in ~/.bashrc
  source <(phalanx completion zsh)                                           # in ~/.zshrc
  phalanx completion fish > ~/.config/fish/completions/phalanx.fish
)";

namespace {

const std::vector<std::string>& shells() {
  static const std::vector<std::string> names{"bash", "zsh", "fish"};
  return names;
}

/// What a command prints for --help; empty if it cannot be run.
std::string help_of(const Command& command) {
  if (!command.help.empty()) return std::string(command.help);
  std::error_code error;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe", error).string();
  if (error || self.find('\'') != std::string::npos) return "";
  const std::string line = fmt::format("'{}' {} --help 2>/dev/null </dev/null", self, command.name);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(popen(line.c_str(), "r"), pclose);
  std::string text;
  char buffer[4096];
  while (pipe) {
    const std::size_t got = std::fread(buffer, 1, sizeof buffer, pipe.get());
    if (got == 0) break;
    text.append(buffer, got);
  }
  return text;
}

void sort_once(std::vector<std::string>& words) {
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
}

std::vector<std::string> matches_of(const std::string& text, const std::regex& pattern) {
  std::vector<std::string> found;
  for (std::sregex_iterator at(text.begin(), text.end(), pattern), end; at != end; ++at) found.push_back((*at)[1]);
  return found;
}

std::string bash_script(const std::vector<CompletedCommand>& commands) {
  std::vector<std::string> names;
  std::string cases;
  for (const CompletedCommand& command : commands) {
    names.push_back(command.name);
    cases += fmt::format("    {}) words='{}' options='{}' ;;\n", command.name, fmt::join(command.words, " "),
                         fmt::join(command.options, " "));
  }
  return fmt::format(R"(_phalanx() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words='' options=''
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W '{}' -- "$current"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{}  esac
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
    if ((COMP_CWORD == 2)); then COMPREPLY+=($(compgen -W "$words" -- "$current")); fi
  fi
}}
complete -o filenames -F _phalanx phalanx
)",
                     fmt::join(names, " "), cases);
}

std::string fish_script(const std::vector<CompletedCommand>& commands) {
  std::string script;
  for (const CompletedCommand& command : commands) {
    script += fmt::format("complete -c phalanx -n __fish_use_subcommand -f -a {}\n", command.name);
    const std::string seen = fmt::format("complete -c phalanx -n '__fish_seen_subcommand_from {}'", command.name);
    if (!command.words.empty()) script += fmt::format("{} -a '{}'\n", seen, fmt::join(command.words, " "));
    for (const std::string& option : command.options) script += fmt::format("{} -l {}\n", seen, option.substr(2));
  }
  return script;
}

}  // namespace

CompletedCommand completed_command(std::string_view name, std::string_view help, bool takes_keys) {
  const std::string text(help);
  CompletedCommand command{.name = std::string(name)};
  command.options = matches_of(text, std::regex(R"((?:^|[\s\[|,/(])(--[a-z][a-z0-9-]*[a-z0-9])(?![\w.]))"));
  command.options.emplace_back("--help");
  command.words = matches_of(text, std::regex(fmt::format(R"((?:usage: | {{7}})phalanx {} ([a-z]+)\b)", name)));
  if (takes_keys)
    for (const config::Key& key : config::known_keys())
      command.options.push_back(fmt::format("--{}.{}", key.section, key.name));
  sort_once(command.options);
  sort_once(command.words);
  return command;
}

std::string completion_script(std::string_view shell, const std::vector<CompletedCommand>& commands) {
  if (shell == "bash") return bash_script(commands);
  if (shell == "zsh") return "autoload -U +X bashcompinit && bashcompinit\n" + bash_script(commands);
  if (shell == "fish") return fish_script(commands);
  throw UsageError(fmt::format("'{}' is no shell that can complete{}: expected {}", shell,
                               did_you_mean(std::string(shell), shells()), fmt::join(shells(), ", ")));
}

int completion_command(const Arguments& arguments, const std::vector<Command>& commands) {
  std::string shell;
  CLI::App app;
  app.add_option("shell", shell);
  parse_options(app, arguments);
  if (shell.empty()) throw UsageError(fmt::format("expected a shell: {}", fmt::join(shells(), ", ")));
  completion_script(shell, {});  // refuses before the help texts are read
  std::vector<CompletedCommand> completed;
  for (const Command& command : commands) {
    const bool takes_keys = command.name == "train" || command.name == "verify" || command.name == "plan";
    completed.push_back(completed_command(command.name, help_of(command), takes_keys));
  }
  fmt::print("{}", completion_script(shell, completed));
  return 0;
}

}  // namespace phalanx::cli
