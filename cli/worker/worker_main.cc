// phalanx-worker: the subcommands that need libtorch. `phalanx` starts it, not the user.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/standard_streams.h"
#include "cli/worker/bench_worker.h"
#include "cli/worker/chat_worker.h"
#include "cli/worker/doctor_command.h"
#include "cli/worker/eval_worker.h"
#include "cli/worker/generate_worker.h"
#include "cli/worker/lecture_command.h"
#include "cli/worker/merge_worker.h"
#include "cli/worker/train_worker.h"
#include "cli/worker/verify_worker.h"
#include "phalanx/base/quick_exit.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/launch/supervisor/worker_report.h"

int main(int argc, char** argv) {
  phalanx::skip_earlier_static_destructors();
  using namespace phalanx::cli;
  open_standard_streams();
  // If the system refuses libtorch's own threads, they end the program without advice. So check before.
  const auto with_threads = [](int (*run)(const Arguments&)) {
    return [run](const Arguments& arguments) {
      constexpr int kBesideTorch = 8;  // communication, heartbeats, flight recorder, saving
      const char* threads = std::getenv("OMP_NUM_THREADS");
      phalanx::check_threads(kBesideTorch + std::clamp(threads != nullptr ? std::atoi(threads) : 1, 1, 1024));
      return run(arguments);
    };
  };
  const std::vector<Command> commands = {
      {"train", "", "", with_threads(train_worker)},
      {"verify", "", "", with_threads(verify_worker)},
      {"doctor", "", kDoctorHelp, doctor_command},
      {"lecture", "", kLectureHelp, with_threads(lecture_command)},
      {"bench", "", "", [](const Arguments& arguments) { return bench_worker(arguments); }},
      {"generate", "", "", with_threads(generate_worker)},
      {"chat", "", "", with_threads(chat_worker)},
      {"eval", "", "", with_threads(eval_worker)},
      {"merge", "", "", with_threads(merge_worker)},
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
