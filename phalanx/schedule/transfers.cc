#include "phalanx/schedule/transfers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/validate.h"

namespace phalanx::schedule {
namespace {

using Row = std::vector<Action>;

// The next `count` different stages in use from action i on. An overlap's stages are taken together.
std::vector<int> next_stages(const Row& row, std::size_t i, std::size_t count) {
  std::vector<int> stages;
  for (; i < row.size() && stages.size() < count; ++i) {
    for_each_sub_action(row[i], [&](const Action& part) {
      if (std::find(stages.begin(), stages.end(), part.stage) == stages.end()) stages.push_back(part.stage);
    });
  }
  return stages;
}

Row with_unshards(const Row& row, std::size_t count) {
  count = std::min(count, next_stages(row, 0, row.size() + 1).size());  // no more than there are
  Row out;
  std::vector<int> whole;
  const auto contains = [](const std::vector<int>& list, int stage) {
    return std::find(list.begin(), list.end(), stage) != list.end();
  };
  for (std::size_t i = 0; i < row.size(); ++i) {
    const std::vector<int> wanted = next_stages(row, i, count);
    std::sort(whole.begin(), whole.end());
    for (const int stage : whole) {
      if (!contains(wanted, stage)) out.push_back(make_action(stage, ActionKind::reshard));
    }
    std::erase_if(whole, [&](int stage) { return !contains(wanted, stage); });
    for (const int stage : wanted) {
      if (contains(whole, stage)) continue;
      whole.push_back(stage);
      out.push_back(make_action(stage, ActionKind::unshard));
    }
    out.push_back(row[i]);
  }
  std::sort(whole.begin(), whole.end());
  for (const int stage : whole) out.push_back(make_action(stage, ActionKind::reshard));
  return out;
}

Row with_reductions(const Row& row, int stages, int micro_batches) {
  Row out;
  std::vector<int> ended(static_cast<std::size_t>(stages), 0);
  for (const Action& action : row) {
    out.push_back(action);
    for_each_sub_action(action, [&](const Action& part) {
      if (!ends_micro_batch(part.kind)) return;
      if (++ended[static_cast<std::size_t>(part.stage)] < micro_batches) return;
      out.push_back(make_action(part.stage, ActionKind::reduce_gradients));
    });
  }
  return out;
}

// All ranks take turns, one action each. A rank whose next action lacks an input skips its turn.
class Placement {
 public:
  explicit Placement(const Schedule& schedule) : in_(schedule), out_(schedule) {
    const std::size_t cells =
        static_cast<std::size_t>(schedule.stages()) * static_cast<std::size_t>(schedule.micro_batches);
    inputs_.assign(cells, false);
    gradients_.assign(cells, false);
  }

  Schedule run() {
    const std::size_t ranks = in_.actions.size();
    for (Row& row : out_.actions) row.clear();
    std::vector<std::size_t> next(ranks, 0);
    for (bool progress = true; progress;) {
      progress = false;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        if (next[rank] == in_.actions[rank].size()) continue;
        const Action& action = in_.actions[rank][next[rank]];
        if (!ready(action)) continue;
        ++next[rank];
        progress = true;
        out_.actions[rank].push_back(action);
        for_each_sub_action(action, [&](const Action& part) { hand_over(rank, part); });
      }
    }
    return std::move(out_);
  }

 private:
  std::vector<bool>::reference cell(std::vector<bool>& cells, int stage, int micro_batch) {
    return cells[static_cast<std::size_t>(stage) * static_cast<std::size_t>(in_.micro_batches) +
                 static_cast<std::size_t>(micro_batch)];
  }

  bool ready(const Action& action) {
    bool all = true;
    for_each_sub_action(action, [&](const Action& part) {
      if (part.kind == ActionKind::forward && part.stage > 0) {
        all = all && cell(inputs_, part.stage, part.micro_batch);
      } else if (makes_gradient(part.kind) && part.stage < in_.stages() - 1) {
        all = all && cell(gradients_, part.stage, part.micro_batch);
      }
    });
    return all;
  }

  void hand_over(std::size_t rank, const Action& pass) {
    const bool forward = pass.kind == ActionKind::forward;
    if (!forward && !makes_gradient(pass.kind)) return;
    const int to = forward ? pass.stage + 1 : pass.stage - 1;
    if (to < 0 || to >= in_.stages()) return;
    cell(forward ? inputs_ : gradients_, to, pass.micro_batch) = true;
    if (!on_different_ranks(in_, pass.stage, to)) return;
    const Action send =
        make_action(pass.stage, forward ? ActionKind::send_forward : ActionKind::send_backward, pass.micro_batch);
    out_.actions[rank].push_back(send);
    out_.actions[static_cast<std::size_t>(rank_of(in_, to))].push_back(other_end(send));
  }

  const Schedule& in_;
  Schedule out_;
  std::vector<bool> inputs_, gradients_;  // [stage, micro-batch]: of the stage, on its rank
};

void refuse_present(const Schedule& schedule, const TransferOptions& options) {
  const auto refuse = [&](std::string_view what) {
    throw ConfigError(
        fmt::format("schedule {} has {} actions already: expected one in which none are placed", schedule.name, what));
  };
  if (has_transfers(schedule)) refuse("SEND and RECV");
  const auto has = [&](ActionKind kind) { return any_action(schedule, [&](ActionKind k) { return k == kind; }); };
  if (options.unshard_stages > 0 && has(ActionKind::unshard)) refuse("UNSHARD");
  if (options.reduce_gradients && has(ActionKind::reduce_gradients)) refuse("REDUCE_GRAD");
}

}  // namespace

Schedule add_transfers(const Schedule& schedule, const TransferOptions& options) {
  if (options.unshard_stages < 0) {
    throw ConfigError(fmt::format("unshard_stages is {}: expected 0 (none) or more", options.unshard_stages));
  }
  refuse_present(schedule, options);
  check(schedule);
  Schedule passes = schedule;
  for (Row& row : passes.actions) {
    if (options.unshard_stages > 0) row = with_unshards(row, static_cast<std::size_t>(options.unshard_stages));
    if (options.reduce_gradients) row = with_reductions(row, schedule.stages(), schedule.micro_batches);
  }
  return Placement(passes).run();
}

}  // namespace phalanx::schedule
