#include "cli/front/bench_command.h"

#include <fmt/format.h>

#include <cstdio>

#include "cli/bench_arguments.h"
#include "cli/front/bench_train_command.h"
#include "cli/front/launch_command.h"
#include "cli/front/worker_program.h"
#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/launch/rendezvous/worker_environment.h"

namespace phalanx::cli {

int bench_command(const Arguments& arguments) {
  if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h") {
    fmt::print(arguments.empty() ? stderr : stdout, "{}\n{}", kBenchHelp, kBenchTrainHelp);
    return arguments.empty() ? 2 : 0;
  }
  CLI::App app;
  app.add_subcommand("comm");
  const CLI::App* const train = app.add_subcommand("train");
  Arguments rest = arguments;
  const bool trains = &take_subcommand(app, rest) == train;
  for (const std::string& word : rest) {
    if (word == "--help" || word == "-h") {
      fmt::print("{}", trains ? kBenchTrainHelp : kBenchHelp);
      return 0;
    }
  }
  if (trains) return bench_train_command(rest);
  const BenchArguments parsed = parse_bench_arguments(rest);
  const WorkerEnvironment environment = read_worker_environment();
  const bool launched = environment.rendezvous != WorkerEnvironment::Rendezvous::none || environment.world_size > 1;
  if (launched && !parsed.ranks.empty()) {
    throw UsageError("-n starts ranks, but this process is itself a rank of a launcher: leave -n out");
  }
  const int own = parsed.ranks.empty() ? 2 : parse_rank_count("-n", parsed.ranks);
  const int ranks = launched ? environment.world_size : own;
  measure::check_options(parsed.options, ranks);
  if (launched) become_worker("bench", rest);
  Arguments program = {worker_program(), "bench"};
  program.insert(program.end(), rest.begin(), rest.end());
  return launch_ranks("bench", program, ranks);
}

}  // namespace phalanx::cli
