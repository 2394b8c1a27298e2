// phalanx: the program that the user runs. Torch-free; see command.h.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "cli/chat_arguments.h"
#include "cli/command.h"
#include "cli/eval_arguments.h"
#include "cli/front/bench_command.h"
#include "cli/front/chat_command.h"
#include "cli/front/checkpoint_command.h"
#include "cli/front/completion_command.h"
#include "cli/front/eval_command.h"
#include "cli/front/generate_command.h"
#include "cli/front/launch_command.h"
#include "cli/front/plan_command.h"
#include "cli/front/report_command.h"
#include "cli/front/schedule_command.h"
#include "cli/front/tokenize_command.h"
#include "cli/front/topology_command.h"
#include "cli/front/trace_command.h"
#include "cli/front/train_command.h"
#include "cli/front/verify_command.h"
#include "cli/front/worker_program.h"
#include "cli/generate_arguments.h"
#include "cli/parse_options.h"
#include "cli/standard_streams.h"
#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"

namespace phalanx::cli {
namespace {

std::vector<Command> commands() {
  // Commands without a help text here print their own.
  const auto in_worker = [](const char* name) {
    return [name](const Arguments& arguments) -> int { become_worker(name, arguments); };
  };
  // The topology needs no libtorch, so it works even if libtorch is missing.
  const auto doctor = [in_worker](const Arguments& arguments) {
    const bool topology = std::find(arguments.begin(), arguments.end(), "--topology") != arguments.end();
    const bool help = std::find(arguments.begin(), arguments.end(), "--help") != arguments.end();
    return topology && !help ? topology_command(arguments) : in_worker("doctor")(arguments);
  };
  return {
      {"train", "train a model as a configuration file says", kTrainHelp, train_command},
      {"plan", "say which layouts of a model fit devices, and which to take", kPlanHelp, plan_command},
      {"verify", "prove that a layout trains as one rank does", kVerifyHelp, verify_command},
      {"tokenize", "train a tokenizer, turn text into a token file", "", tokenize_command},
      {"generate", "continue texts with a trained model", kGenerateHelp, generate_command, true},
      {"chat", "talk with a model that was trained for chats", kChatHelp, chat_command, true},
      {"eval", "perplexity of a text, accuracy in multiple choice", kEvalHelp, eval_command, true},
      {"checkpoint", "look into checkpoints, check, compare and rewrite them", "", checkpoint_command},
      {"schedule", "show a pipeline schedule: table, bubble, memory, picture", kScheduleHelp, schedule_command},
      {"launch", "start the ranks of any program, on one node or many", "", launch_command},
      {"bench", "measure the collectives (comm), or training under several layouts (train)", "", bench_command},
      {"report", "write the HTML report of a run", kReportHelp, report_command},
      {"trace", "say from flight recorder files which rank a job is waiting for", kTraceHelp, trace_command},
      {"doctor", "say what this node and build have, and what is missing", "", doctor},
      {"lecture", "a lecture on distributed training whose sections run here", "", in_worker("lecture")},
      {"completion", "print the script by which a shell completes commands and options", kCompletionHelp,
       [](const Arguments& arguments) { return completion_command(arguments, commands()); }},
  };
}

std::string help_text() {
  std::string text =
      "Phalanx trains and runs large language models on libtorch, on one process or many.\n\n"
      "usage: phalanx COMMAND [arguments]\n\n";
  for (const Command& command : commands()) text += fmt::format("  {:<10} {}\n", command.name, command.summary);
  text +=
      "  version    print the version\n\n"
      "  phalanx tokenize docs --vocab-size 4096 --tokenizer data/tokenizer.json --output data/train\n"
      "  phalanx train -n 2 configs/demo.toml\n"
      "  phalanx doctor\n\n"
      "`phalanx COMMAND --help` explains a command.\n";
  return text;
}

constexpr std::string_view kVersionHelp =
    "usage: phalanx version [--json]\n\nPrints the version; with --json as {\"version\": \"...\"}.\n";

int version_command(const Arguments& arguments) {
  return run_command({"version", "print the version", kVersionHelp,
                      [](const Arguments& given) {
                        bool as_json = false;
                        CLI::App app;
                        app.add_flag("--json", as_json);
                        parse_options(app, given);
                        fmt::print("{}{}{}\n", as_json ? "{\"version\": \"" : "phalanx ", PHALANX_VERSION,
                                   as_json ? "\"}" : "");
                        return 0;
                      }},
                     arguments);
}

int run(const Arguments& arguments) {
  if (arguments.empty()) {
    fmt::print(stderr, "{}", help_text());
    return 2;
  }
  std::string name = arguments[0];
  Arguments rest(arguments.begin() + 1, arguments.end());
  if (name == "--help" || name == "-h" || name == "help") {
    if (rest.empty() || name != "help") {
      fmt::print("{}", help_text());
      return 0;
    }
    name = rest[0];  // phalanx help train
    rest = {"--help"};
  }
  if (name == "--version" || name == "version") return version_command(rest);
  const std::vector<Command> known = commands();
  std::vector<std::string> names = {"version", "help"};
  for (const Command& command : known) {
    if (command.name == name) return run_command(command, rest);
    names.emplace_back(command.name);
  }
  fmt::print(stderr, "phalanx: unknown command '{}'{}\nSee `phalanx --help`.\n", name, did_you_mean(name, names));
  return 2;
}

}  // namespace
}  // namespace phalanx::cli

int main(int argc, char** argv) {
  phalanx::cli::open_standard_streams();
  const phalanx::cli::Arguments arguments(argv + 1, argv + argc);
  return phalanx::cli::status_after_output(arguments.empty() ? "" : arguments[0], phalanx::cli::run(arguments));
}
