// phalanx-worker: the subcommands that need libtorch. Started by `phalanx`, not by hand.
#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <vector>

#include "cli/bench_worker.h"
#include "cli/command.h"
#include "cli/doctor_command.h"
#include "cli/eval_worker.h"
#include "cli/generate_worker.h"
#include "cli/train_worker.h"
#include "cli/verify_worker.h"
#include "phalanx/base/quick_exit.h"
#include "phalanx/launch/worker_report.h"

int main(int argc, char** argv) {
  phalanx::skip_earlier_static_destructors();
  using namespace phalanx::cli;
  const std::vector<Command> commands = {
      {"train", "", "", train_worker},
      {"verify", "", "", verify_worker},
      {"doctor", "", kDoctorHelp, doctor_command},
      {"bench", "", "", [](const Arguments& arguments) { return bench_worker(arguments); }},
      {"generate", "", "", generate_worker},
      {"eval", "", "", eval_worker},
  };
  const Arguments arguments(argv + 1, argv + argc);
  for (const Command& command : commands) {
    if (!arguments.empty() && command.name == arguments[0]) {
      return run_command(command, {arguments.begin() + 1, arguments.end()}, phalanx::report_error_to_launcher);
    }
  }
  fmt::print(stderr, "phalanx-worker is started by `phalanx`; see `phalanx --help`\n");
  return 2;
}
