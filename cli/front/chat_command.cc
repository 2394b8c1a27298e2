#include "cli/front/chat_command.h"

#include "cli/chat_arguments.h"
#include "cli/front/rank_launch.h"
#include "phalanx/base/error.h"

namespace phalanx::cli {

int chat_command(const Arguments& arguments) {
  parse_chat_arguments(arguments);
  const RankCount count = rank_count("");
  if (count.launched) throw UsageError("phalanx chat runs on one rank, but a launcher started this process");
  return run_ranks("chat", arguments, count);
}

}  // namespace phalanx::cli
