#include "phalanx/schedule/generators.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <iterator>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/v_schedules.h"

namespace phalanx::schedule {
namespace {

using Actions = std::vector<Action>;

// All forward passes, then all backward passes.
Actions gpipe(int rank, const ScheduleOptions& size) {
  Actions actions;
  for (int m = 0; m < size.micro_batches; ++m) actions.push_back(make_action(rank, ActionKind::forward, m));
  for (int m = 0; m < size.micro_batches; ++m) actions.push_back(make_action(rank, ActionKind::backward, m));
  return actions;
}

// As many forward passes as there are stages from this one to the last; then one backward and one forward in turn.
Actions one_forward_one_backward(int rank, const ScheduleOptions& size) {
  Actions actions;
  const int warm_up = std::min(size.micro_batches, size.ranks - rank);
  for (int m = 0; m < warm_up; ++m) actions.push_back(make_action(rank, ActionKind::forward, m));
  for (int m = 0; m < size.micro_batches; ++m) {
    actions.push_back(make_action(rank, ActionKind::backward, m));
    if (warm_up + m < size.micro_batches) actions.push_back(make_action(rank, ActionKind::forward, warm_up + m));
  }
  return actions;
}

// Each stage of the rank runs all its forward passes at once; backward, the order is reversed.
Actions looped_bfs(int rank, const ScheduleOptions& size) {
  Actions actions;
  for (int loop = 0; loop < size.stages_per_rank; ++loop) {
    for (int m = 0; m < size.micro_batches; ++m) {
      actions.push_back(make_action(loop * size.ranks + rank, ActionKind::forward, m));
    }
  }
  for (int loop = size.stages_per_rank - 1; loop >= 0; --loop) {
    for (int m = size.micro_batches - 1; m >= 0; --m) {
      actions.push_back(make_action(loop * size.ranks + rank, ActionKind::backward, m));
    }
  }
  return actions;
}

int rounds_of(int ranks, int micro_batches) { return std::max(1, micro_batches / ranks); }

// The n-th forward and the n-th backward pass of a rank. The rank runs a round of micro-batches on one of its stages,
// then the same round on the next stage. A round has about as many micro-batches as there are ranks.
class Rounds {
 public:
  Rounds(int rank, const ScheduleOptions& size)
      : rank_(rank), size_(size), round_(size.micro_batches / rounds_of(size.ranks, size.micro_batches)) {}

  int round() const { return round_; }
  Action forward(int n) const { return nth(n, local(n), ActionKind::forward); }
  // Backward the stages of a rank come in reverse order; the micro-batches do not.
  Action backward(int n, ActionKind kind) const { return nth(n, size_.stages_per_rank - 1 - local(n), kind); }

 private:
  int local(int n) const { return n / round_ % size_.stages_per_rank; }
  Action nth(int n, int local, ActionKind kind) const {
    const int turn = round_ * size_.stages_per_rank;
    return make_action(local * size_.ranks + rank_, kind, n / turn * round_ + n % round_);
  }

  int rank_;
  ScheduleOptions size_;
  int round_;
};

// Interleaved 1F1B: 1F1B in rounds. The zero-bubble form starts backward sooner: per rank before the last one, the
// warm-up has one more forward pass, not two. It also splits backward: rank r runs backward_weight r passes later,
// where it would wait otherwise.
Actions interleaved(int rank, const ScheduleOptions& size, bool zero_bubble) {
  const Rounds rounds(rank, size);
  const int passes = size.stages_per_rank * size.micro_batches;
  const int ranks_after = size.ranks - 1 - rank;
  const int warm_up =
      std::min(passes, (size.stages_per_rank - 1) * rounds.round() + (zero_bubble ? 1 : 2) * ranks_after);
  const int delay = zero_bubble ? rank : 0;
  Actions actions;
  for (int n = 0; n < warm_up; ++n) actions.push_back(rounds.forward(n));
  for (int n = 0; n < passes; ++n) {
    if (warm_up + n < passes) actions.push_back(rounds.forward(warm_up + n));
    actions.push_back(rounds.backward(n, zero_bubble ? ActionKind::backward_input : ActionKind::backward));
    if (zero_bubble && n >= delay) actions.push_back(rounds.backward(n - delay, ActionKind::backward_weight));
  }
  for (int n = std::max(0, passes - delay); zero_bubble && n < passes; ++n) {
    actions.push_back(rounds.backward(n, ActionKind::backward_weight));
  }
  return actions;
}

Actions interleaved_1f1b(int rank, const ScheduleOptions& size) { return interleaved(rank, size, false); }
Actions interleaved_zero_bubble(int rank, const ScheduleOptions& size) { return interleaved(rank, size, true); }

Actions zbv(int rank, const ScheduleOptions& size) {
  return zbv_actions({.rank = rank, .ranks = size.ranks, .micro_batches = size.micro_batches});
}
Actions dual_pipe_v(int rank, const ScheduleOptions& size) {
  return dual_pipe_v_actions({.rank = rank, .ranks = size.ranks, .micro_batches = size.micro_batches});
}

enum class Stages { one, any, two_in_a_v };
enum class MicroBatches { any, at_least_stages, multiple_of_rounds };

struct ScheduleKind {
  std::string_view name;
  Stages stages;
  MicroBatches micro_batches;
  Actions (*actions)(int rank, const ScheduleOptions& size);
};

constexpr std::array<ScheduleKind, 7> kScheduleKinds = {{
    {"GPipe", Stages::one, MicroBatches::any, gpipe},
    {"1F1B", Stages::one, MicroBatches::at_least_stages, one_forward_one_backward},
    {"Interleaved1F1B", Stages::any, MicroBatches::multiple_of_rounds, interleaved_1f1b},
    {"LoopedBFS", Stages::any, MicroBatches::any, looped_bfs},
    {"InterleavedZeroBubble", Stages::any, MicroBatches::multiple_of_rounds, interleaved_zero_bubble},
    {"ZBVZeroBubble", Stages::two_in_a_v, MicroBatches::any, zbv},
    {"DualPipeV", Stages::two_in_a_v, MicroBatches::at_least_stages, dual_pipe_v},
}};

constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kShortNames = {{
    {"afab", "GPipe"},
    {"interleaved", "Interleaved1F1B"},
    {"bfs", "LoopedBFS"},
    {"zb1p", "InterleavedZeroBubble"},
    {"zbh1", "InterleavedZeroBubble"},
    {"zbv", "ZBVZeroBubble"},
}};

std::string plain(std::string_view name) {
  std::string text;
  for (const char c : name) {
    if (c != '-' && c != '_' && c != ' ') text += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return text;
}

const ScheduleKind& schedule_kind_of(std::string_view name) {
  const std::string wanted = plain(name);
  std::string_view meant = name;
  for (const auto& [short_name, full] : kShortNames) {
    if (wanted == short_name) meant = full;
  }
  for (const ScheduleKind& kind : kScheduleKinds) {
    if (plain(kind.name) == plain(meant)) return kind;
  }
  std::vector<std::string> known = schedule_names();
  for (const auto& [short_name, full] : kShortNames) known.emplace_back(short_name);
  throw ConfigError(fmt::format("unknown pipeline schedule '{}'{}: expected one of {}, or for short {}", name,
                                did_you_mean(name, known), fmt::join(schedule_names(), ", "),
                                fmt::join(known.end() - std::ssize(kShortNames), known.end(), ", ")));
}

// "12 or 15": the nearest numbers of micro-batches that fill whole rounds.
std::string nearest_micro_batches(int ranks, int micro_batches) {
  const auto whole = [&](int m) { return m % rounds_of(ranks, m) == 0; };
  int below = micro_batches - 1, above = micro_batches + 1;
  while (below > 0 && !whole(below)) --below;
  while (!whole(above)) ++above;
  return below > 0 ? fmt::format("{} or {}", below, above) : std::to_string(above);
}

void check_numbers(const ScheduleKind& kind, const ScheduleOptions& size) {
  constexpr int kMost = 1 << 16;
  for (const auto& [what, value] : {std::pair("ranks", size.ranks), std::pair("micro-batches", size.micro_batches),
                                    std::pair("stages a rank", size.stages_per_rank)}) {
    if (value < 1 || value > kMost) {
      throw ConfigError(fmt::format("schedule {}: {} {}: expected 1 to {}", kind.name, value, what, kMost));
    }
  }
  if (kind.stages == Stages::one && size.stages_per_rank != 1) {
    throw ConfigError(fmt::format("schedule {}: {} stages a rank: expected 1 ({} have more)", kind.name,
                                  size.stages_per_rank,
                                  "Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble and DualPipeV"));
  }
  if (kind.stages == Stages::two_in_a_v && size.stages_per_rank != 2) {
    throw ConfigError(fmt::format("schedule {}: {} stages a rank: expected 2, as its stages lie in a V", kind.name,
                                  size.stages_per_rank));
  }
  const int stages = size.ranks * size.stages_per_rank;
  if (kind.micro_batches == MicroBatches::at_least_stages && size.micro_batches < stages) {
    throw ConfigError(fmt::format(
        "schedule {}: micro-batches >= stages does not hold: {} < {}, with stages = {} ranks x {}: expected {} "
        "micro-batches or more, or {} ranks at most",
        kind.name, size.micro_batches, stages, size.ranks, size.stages_per_rank, stages,
        std::max(1, size.micro_batches / size.stages_per_rank)));
  }
  const int rounds = rounds_of(size.ranks, size.micro_batches);
  if (kind.micro_batches == MicroBatches::multiple_of_rounds && size.micro_batches % rounds != 0) {
    throw ConfigError(
        fmt::format("schedule {}: micro-batches % rounds = 0 does not hold: {} % {} = {}, with rounds = {} "
                    "micro-batches / {} ranks "
                    "rounded down: expected {} micro-batches",
                    kind.name, size.micro_batches, rounds, size.micro_batches % rounds, size.micro_batches, size.ranks,
                    nearest_micro_batches(size.ranks, size.micro_batches)));
  }
}

std::vector<int> lay_out(const ScheduleKind& kind, const ScheduleOptions& size) {
  std::vector<int> rank_of_stage;
  for (int stage = 0; stage < size.ranks * size.stages_per_rank; ++stage) {
    const int place = stage % size.ranks;
    const bool back = kind.stages == Stages::two_in_a_v && stage >= size.ranks;
    rank_of_stage.push_back(back ? size.ranks - 1 - place : place);
  }
  return rank_of_stage;
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    list.reserve(kScheduleKinds.size());
    for (const ScheduleKind& kind : kScheduleKinds) list.emplace_back(kind.name);
    return list;
  }();
  return names;
}

std::string schedule_name(std::string_view name) { return std::string(schedule_kind_of(name).name); }

int usual_stages_per_rank(std::string_view name) { return schedule_kind_of(name).stages == Stages::one ? 1 : 2; }

Schedule make_schedule(const ScheduleOptions& options) {
  const ScheduleKind& kind = schedule_kind_of(options.name);
  ScheduleOptions size = options;
  if (size.stages_per_rank == 0) size.stages_per_rank = usual_stages_per_rank(kind.name);
  check_numbers(kind, size);
  Schedule schedule{.name = std::string(kind.name),
                    .micro_batches = size.micro_batches,
                    .rank_of_stage = lay_out(kind, size),
                    .actions = {}};
  for (int rank = 0; rank < size.ranks; ++rank) schedule.actions.push_back(kind.actions(rank, size));
  return schedule;
}

}  // namespace phalanx::schedule
