#include "cli/front/launch_command.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>

namespace phalanx::cli {
namespace {

// Ranks that need longer announce it (announce_graceful_stop()).
constexpr std::chrono::milliseconds kPatienceWithOurOwn{3'000};

}  // namespace

int launch_ranks(const std::string& name, const SupervisorOptions& options) {
  const SupervisorResult result = supervise(options);
  if (!result.error.empty()) print_error(name, result.error);
  return result.exit_status;
}

int launch_ranks(const std::string& name, const std::vector<std::string>& program, int ranks,
                 const std::vector<int>& stop_signals) {
  SupervisorOptions options;
  options.stop_signals = stop_signals;
  options.terminate_grace = kPatienceWithOurOwn;
  options.command = program;
  options.ranks = ranks;
  return launch_ranks(name, options);
}

int launch_command(const Arguments& arguments) {
  const LaunchArguments parsed = parse_launch_arguments(arguments);
  if (parsed.help) {
    fmt::print("{}", kLaunchHelp);
    return 0;
  }
  return launch_ranks("launch", parsed.options);
}

}  // namespace phalanx::cli
