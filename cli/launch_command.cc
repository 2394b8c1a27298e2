#include "cli/launch_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <map>

#include "phalanx/base/cpu.h"
#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/launch/supervisor.h"

namespace phalanx::cli {

const std::string_view kLaunchHelp = R"(Usage: phalanx launch [options] [--] PROGRAM [ARGUMENTS...]

Runs PROGRAM as several ranks of this machine, with torchrun's environment variables. If a rank fails the others are
ended and its error is shown; Ctrl-C ends all of them.

  -n, --nproc-per-node N|auto|gpu|cpu   ranks: a number, one per GPU, one per core; auto (gpu where there is one, else
                                        cpu). Default 1
      --standalone, --nnodes 1          accepted: this command runs one machine
      --no-python                       accepted: PROGRAM is any program
  -h, --help                            this text

The lines of ranks other than 0 are prefixed with [rank]. See docs/launching.md.

  phalanx launch --nproc-per-node 2 ./my_program --its options
)";

namespace {

// What torchrun has and this command has not, with the reason.
const std::map<std::string, std::string>& flags_of_torchrun() {
  static const std::string machines = "phalanx launch runs the ranks of one machine";
  static const std::string output = "phalanx launch shows all output; redirect it in the shell";
  static const std::map<std::string, std::string> flags{
      {"--node-rank", machines},
      {"--master-addr", "the ranks meet on 127.0.0.1"},
      {"--master-port", "the system gives the port"},
      {"--local-addr", machines},
      {"--rdzv-backend", machines},
      {"--rdzv-endpoint", machines},
      {"--rdzv-id", machines},
      {"--rdzv-conf", machines},
      {"--max-restarts", "ranks are not restarted; a failure ends the run"},
      {"--monitor-interval", "ranks are watched without polling"},
      {"--start-method", "ranks are started by exec"},
      {"--role", "there is one role"},
      {"--log-dir", output},
      {"--redirects", output},
      {"-r", output},
      {"--tee", output},
      {"-t", output},
      {"--local-ranks-filter", output},
      {"--duplicate-stdout-filters", output},
      {"--duplicate-stderr-filters", output},
      {"--logs-specs", output},
      {"--event-log-handler", "no event log is written"},
      {"--module", "the program is any program: write `python -m NAME`"},
      {"-m", "the program is any program: write `python -m NAME`"},
      {"--run-path", "the program is any program: write `python PATH`"},
      {"--numa-binding", "ranks are not bound to cores; use taskset or numactl"},
      {"--signals-to-handle", "SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on"},
      {"--shutdown-timeout", "the ranks themselves say how long a graceful stop takes"},
      {"--virtual-local-rank", "every rank sees all GPUs and takes the one of its LOCAL_RANK"}};
  return flags;
}

int count_gpus() {
  int devices = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename().string();
    if (name.size() > 6 && name.starts_with("nvidia") &&
        std::all_of(name.begin() + 6, name.end(), [](unsigned char c) { return c >= '0' && c <= '9'; }))
      ++devices;
  }
  if (const auto visible = env_string("CUDA_VISIBLE_DEVICES"))
    devices = *visible == "-1"
                  ? 0
                  : std::min<int>(devices, 1 + static_cast<int>(std::count(visible->begin(), visible->end(), ',')));
  return devices;
}

}  // namespace

int parse_rank_count(const std::string& flag, const std::string& value) {
  if (value == "auto") {
    const int gpus = count_gpus();
    return gpus > 0 ? gpus : usable_cores();
  }
  if (value == "cpu") return usable_cores();
  if (value == "gpu") {
    const int gpus = count_gpus();
    if (gpus == 0) throw UsageError(fmt::format("{} gpu: this machine has no GPU that is visible", flag));
    return gpus;
  }
  int number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size() || number < 1 || number > 4096)
    throw UsageError(fmt::format("{} is '{}': expected a number from 1 to 4096, auto, gpu or cpu", flag, value));
  return number;
}

LaunchArguments parse_launch_arguments(const Arguments& arguments) {
  LaunchArguments result;
  std::size_t i = 0;
  for (; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--") {
      ++i;
      break;
    }
    if (argument.size() < 2 || argument[0] != '-') break;
    const std::size_t equals = argument.find('=');
    const std::string written = argument.substr(0, equals);
    std::string flag = written;
    if (flag.starts_with("--")) std::replace(flag.begin(), flag.end(), '_', '-');
    const auto value = [&]() -> std::string {
      if (equals != std::string::npos) return argument.substr(equals + 1);
      if (i + 1 == arguments.size()) throw UsageError(fmt::format("{} needs a value", written));
      return arguments[++i];
    };
    if (flag == "-n" || flag == "--nproc-per-node") {
      result.ranks = parse_rank_count(written, value());
    } else if (flag == "--nnodes") {
      const std::string nodes = value();
      if (nodes != "1" && nodes != "1:1")
        throw UsageError(
            fmt::format("{} is '{}': phalanx launch runs the ranks of one machine, so 1 is expected; for "
                        "more start the program under torchrun --no-python",
                        written, nodes));
    } else if (flag == "--standalone" || flag == "--no-python") {
      if (equals != std::string::npos) throw UsageError(fmt::format("{} takes no value", written));
    } else if (flag == "-h" || flag == "--help") {
      result.help = true;
      return result;
    } else if (const auto found = flags_of_torchrun().find(flag); found != flags_of_torchrun().end()) {
      throw UsageError(
          fmt::format("{} is an option of torchrun that phalanx launch does not take: {}", written, found->second));
    } else {
      throw UsageError(
          fmt::format("unknown option '{}'{}", written,
                      did_you_mean(flag, {"--nproc-per-node", "--nnodes", "--standalone", "--no-python", "--help"})));
    }
  }
  result.program.assign(arguments.begin() + static_cast<std::ptrdiff_t>(i), arguments.end());
  if (result.program.empty())
    throw UsageError("no program given; for example: phalanx launch --nproc-per-node 2 ./my_program");
  return result;
}

int launch_ranks(const std::string& name, const std::vector<std::string>& program, int ranks) {
  const SupervisorResult result = supervise({.command = program, .ranks = ranks});
  if (!result.error.empty()) fmt::print(stderr, "phalanx {}: {}\n", name, result.error);
  return result.exit_status;
}

int launch_command(const Arguments& arguments) {
  const LaunchArguments parsed = parse_launch_arguments(arguments);
  if (parsed.help) {
    fmt::print("{}", kLaunchHelp);
    return 0;
  }
  return launch_ranks("launch", parsed.program, parsed.ranks);
}

}  // namespace phalanx::cli
