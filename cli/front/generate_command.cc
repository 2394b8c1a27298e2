#include "cli/front/generate_command.h"

#include <fmt/format.h>

#include "cli/front/rank_launch.h"
#include "cli/generate_arguments.h"
#include "phalanx/base/error.h"

namespace phalanx::cli {

int generate_command(const Arguments& arguments) {
  const GenerateArguments parsed = parse_generate_arguments(arguments);
  const RankCount count = model_rank_count(parsed);
  if (const std::int64_t copies = count.world / (parsed.tp * parsed.pp); copies > 1 && parsed.output.empty()) {
    throw UsageError(
        fmt::format("{} ranks have {} copies of the model, whose results need a folder: expected --output DIR",
                    count.world, copies));
  }
  return run_ranks("generate", arguments, count);
}

}  // namespace phalanx::cli
