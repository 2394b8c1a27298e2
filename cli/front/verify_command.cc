#include "cli/front/verify_command.h"

#include "cli/front/rank_launch.h"
#include "cli/verify_arguments.h"

namespace phalanx::cli {

const std::string_view kVerifyHelp =
    R"(usage: phalanx verify [-n N] CONFIG.toml [--steps K] [--layout L ... | --all] [--section.key value ...]

Trains the same model on the same data on one rank, in the same precision without recomputation, and as it is laid out
over N, side by side, and compares losses, gradients and weights after every step. Names the first parameter that is
wrong, with rank, element and likely cause.

  -n, --nproc-per-node N   start N ranks on this node
  --steps K                training steps to compare (3)
  --layout L               another layout than the configuration's, such as dp_shard=2,tp=2,zero=3; may be repeated.
                           Parts: pp, schedule=NAME, dp_replicate, dp_shard, cp, exchange=keys|heads|ring|auto,
                           balance=auto|headtail|ptrr, ep, tp, zero=1|2|3, sp=on|off, ac=none|full|op|N,
                           reshard=default|always|never, precision=float32|bfloat16|float16, batch=N
  --tolerance T            of gradients at equal weights, relative to their norm (1e-5 in float32); losses may be off
                           by twice as much, updates by 1e-5. Recomputation alone may change no bit
  --all                    every layout of 1 to N ranks whose degrees are powers of two, and recomputation and both
                           16-bit types on one rank and with every mix of degrees of 2
  --table                  all parameters at every step, also of several layouts
  --json FILE              write the figures there, too

  phalanx verify -n 2 run.toml                                     the layout that run.toml has on two ranks
  phalanx verify -n 4 run.toml --layout dp_shard=4 --layout dp_replicate=2,dp_shard=2
  phalanx verify -n 8 run.toml --all

Ends with status 0 if everything is within its tolerance, 1 if not, 2 for a wrong command line or configuration.
)";

int verify_command(const Arguments& arguments) {
  const VerifyArguments parsed = parse_verify_arguments(arguments);
  const RankCount count = rank_count(parsed.ranks);
  if (!count.launched) layouts_to_verify(parsed, count.world);
  return run_ranks("verify", arguments, count);
}

}  // namespace phalanx::cli
