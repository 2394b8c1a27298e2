#include "phalanx/schedule/rendezvous.h"

#include <set>
#include <tuple>

#include "phalanx/schedule/actions.h"

namespace phalanx::schedule {

Rendezvous meet(const Schedule& schedule) {
  const std::size_t ranks = schedule.actions.size();
  Rendezvous result{.ran = std::vector<std::size_t>(ranks, 0), .waiting_for = {}};
  result.waiting_for.resize(ranks);
  std::set<std::tuple<ActionKind, int, int>> started;
  std::vector<std::size_t> started_up_to(ranks, 0);
  const auto key = [](const Action& action) { return std::tuple(action.kind, action.stage, action.micro_batch); };

  for (bool progress = true; progress;) {
    progress = false;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const auto& row = schedule.actions[rank];
      std::size_t& next = result.ran[rank];
      while (next < row.size()) {
        std::size_t end = next;
        for (; end < row.size() && is_transfer(row[end].kind); ++end) {
          if (end < started_up_to[rank]) continue;
          started.insert(key(row[end]));
          started_up_to[rank] = end + 1;
          progress = true;
        }
        result.waiting_for[rank].reset();
        for (std::size_t i = next; i < end && !result.waiting_for[rank]; ++i) {
          if (!started.contains(key(other_end(row[i])))) result.waiting_for[rank] = other_end(row[i]);
        }
        if (result.waiting_for[rank]) break;
        next = end > next ? end : next + 1;
        progress = true;
      }
    }
  }
  return result;
}

}  // namespace phalanx::schedule
