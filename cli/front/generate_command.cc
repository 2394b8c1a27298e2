#include "cli/front/generate_command.h"

#include <fmt/format.h>

#include <cstdio>

#include "cli/front/rank_launch.h"
#include "cli/generate_arguments.h"
#include "phalanx/base/error.h"

namespace phalanx::cli {

int generate_command(const Arguments& arguments) {
  if (arguments.empty()) {
    fmt::print(stderr, "{}", kGenerateHelp);
    return 2;
  }
  Arguments rest = arguments;
  const RankCount count = take_rank_count(rest);
  const GenerateArguments parsed = parse_generate_arguments(rest);
  check_copies(parsed.tp, parsed.pp, count);
  if (const std::int64_t copies = count.world / (parsed.tp * parsed.pp); copies > 1 && parsed.output.empty()) {
    throw UsageError(
        fmt::format("{} ranks have {} copies of the model, whose results need a folder: expected --output DIR",
                    count.world, copies));
  }
  return run_ranks("generate", rest, count);
}

}  // namespace phalanx::cli
