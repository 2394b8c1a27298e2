#include "cli/front/train_command.h"

#include <fmt/format.h>

#include <vector>

#include "cli/front/rank_launch.h"
#include "cli/front/worker_program.h"
#include "cli/train_arguments.h"
#include "phalanx/config/config.h"
#include "phalanx/train/inputs/run_check.h"

namespace phalanx::cli {

const std::string_view kTrainHelp = R"(usage: phalanx train [-n N] CONFIG.toml [--section.key value ...]

Trains a model as the configuration says; continues from the newest checkpoint in its folder if there is one.

  -n, --nproc-per-node N     start N ranks (or auto) on this node and train with data parallelism over them
  --section.key value        overrule a key of the file (--section.key=value; --section.key and --section.no-key
                             switch a boolean on and off)
  --like torchtitan          take torchtitan's defaults below the file's and the flags' values
  --print-config             print the effective configuration and end
  --print-config-reference   print the page that explains every key (docs/configuration.md) and end

  phalanx train configs/demo.toml                                  one rank
  phalanx train -n 2 configs/demo.toml --training.steps 100        two ranks
  torchrun --no-python --nproc-per-node 2 phalanx train configs/demo.toml

Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU or the end of the terminal (SIGHUP, unless nohup has it ignored) finishes the
step, saves a checkpoint and ends with status 0; the same command then goes on where it stopped. Before the first step,
or at a second signal, the run ends at once. checkpoint.stop_signals changes the list. A wrong command line or
configuration ends with status 2, any other failure with status 1.
)";

int train_command(const Arguments& arguments) {
  const TrainArguments parsed = parse_train_arguments(arguments);
  const RankCount count = rank_count(parsed.ranks);
  if (parsed.print_config_reference) {
    fmt::print("{}", config::config_reference());
    return 0;
  }
  std::vector<int> stop_signals;
  if (!count.launched) {
    std::vector<std::string> notes;  // the ranks print them
    const config::TrainConfig config =
        parsed.print_config ? config::read_config(parsed.config, parsed.overrides, &notes)
                            : train::read_run_config(parsed.config, parsed.overrides, {.ranks = count.world}, &notes);
    stop_signals = config::stop_signals(config);
  }
  if (parsed.print_config) become_worker("train", arguments);
  return run_ranks("train", arguments, count, stop_signals);
}

}  // namespace phalanx::cli
