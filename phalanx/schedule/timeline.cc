#include "phalanx/schedule/timeline.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/draw.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/validate.h"

namespace phalanx::schedule {
namespace {

using Row = std::vector<Action>;
using ExecutedRow = std::vector<ExecutedPass>;

constexpr double kMilliseconds = 1e3;

Schedule passes_of(const Schedule& schedule) {
  Schedule passes = schedule;
  for (Row& row : passes.actions) {
    std::erase_if(row,
                  [](const Action& action) { return !is_pass(action.kind) && action.kind != ActionKind::overlap; });
  }
  return passes;
}

std::vector<Row> without_overlaps(const Schedule& schedule) {
  std::vector<Row> rows;
  for (const Row& row : schedule.actions) {
    rows.emplace_back();
    for (const Action& action : row)
      for_each_sub_action(action, [&](const Action& part) { rows.back().push_back(part); });
  }
  return rows;
}

std::vector<Row> actions_of(const std::vector<ExecutedRow>& ranks) {
  std::vector<Row> rows;
  for (const ExecutedRow& row : ranks) {
    rows.emplace_back();
    for (const ExecutedPass& pass : row) rows.back().push_back(pass.action);
  }
  return rows;
}

void check_passes(const Schedule& schedule, const std::vector<ExecutedRow>& ranks) {
  const std::vector<Row> expected = without_overlaps(schedule), found = actions_of(ranks);
  if (expected.size() != found.size()) {
    throw ConfigError(fmt::format("schedule {} is for {} ranks, and the passes are of {}", schedule.name,
                                  expected.size(), found.size()));
  }
  for (std::size_t rank = 0; rank < found.size(); ++rank) {
    const std::size_t both = std::min(expected[rank].size(), found[rank].size());
    std::size_t at = 0;
    while (at < both && expected[rank][at] == found[rank][at]) ++at;
    if (at == expected[rank].size() && at == found[rank].size()) continue;
    const auto text = [&](const Row& row) { return at < row.size() ? to_text(row[at]) : std::string("nothing more"); };
    throw ConfigError(fmt::format("what ran is not schedule {}: rank {}, pass {}: expected {}, found {}", schedule.name,
                                  rank, at, text(expected[rank]), text(found[rank])));
  }
}

constexpr std::array kKinds = {ActionKind::forward, ActionKind::backward, ActionKind::backward_input,
                               ActionKind::backward_weight};

std::vector<PassTimes> mean_times(const Schedule& schedule, const std::vector<ExecutedRow>& ranks) {
  const auto stages = static_cast<std::size_t>(schedule.stages());
  std::vector<PassTimes> sums(stages, PassTimes{0, 0, 0, 0}), counts = sums;
  for (const ExecutedRow& row : ranks) {
    for (const ExecutedPass& pass : row) {
      const auto stage = static_cast<std::size_t>(pass.action.stage);
      sums[stage].of(pass.action.kind) += pass.end - pass.start;
      counts[stage].of(pass.action.kind) += 1.0;
    }
  }
  for (std::size_t stage = 0; stage < stages; ++stage) {
    for (const ActionKind kind : kKinds) {
      sums[stage].of(kind) /= std::max(counts[stage].of(kind), 1.0);
    }
  }
  return sums;
}

// For every action: when it began and ended, and how long its passes took.
struct Executed {
  std::vector<std::vector<Span>> spans;
  std::vector<double> busy;                    // by rank
  std::vector<std::vector<double>> durations;  // as spans
};

Executed executed_spans(const Schedule& schedule, const std::vector<ExecutedRow>& ranks) {
  double first = std::numeric_limits<double>::infinity();
  for (const ExecutedRow& row : ranks)
    for (const ExecutedPass& pass : row) first = std::min(first, pass.start);
  Executed executed;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    executed.spans.emplace_back();
    executed.durations.emplace_back();
    executed.busy.push_back(0.0);
    std::size_t next = 0;
    for (const Action& action : schedule.actions[rank]) {
      Span span{ranks[rank][next].start - first, 0.0};
      double duration = 0.0;
      for_each_sub_action(action, [&](const Action&) {
        const ExecutedPass& pass = ranks[rank][next++];
        span.end = pass.end - first;
        duration += pass.end - pass.start;
      });
      executed.spans.back().push_back(span);
      executed.durations.back().push_back(duration);
      executed.busy.back() += duration;
    }
  }
  return executed;
}

struct HandOvers {
  std::vector<double> waited;  // from the end of the producing pass to the start of a pass that waited for it
  double earliest = std::numeric_limits<double>::infinity();
};

// Between ranks; the outputs of an overlap are sent after the whole overlap.
HandOvers hand_overs(const Schedule& schedule, const Executed& executed, const std::vector<ExecutedRow>& ranks) {
  std::map<std::pair<int, int>, double> outputs, gradients;  // (stage, micro-batch): when they were made
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      for_each_sub_action(schedule.actions[rank][i], [&](const Action& part) {
        const double end = executed.spans[rank][i].end;
        if (part.kind == ActionKind::forward) outputs[{part.stage, part.micro_batch}] = end;
        if (makes_gradient(part.kind)) gradients[{part.stage, part.micro_batch}] = end;
      });
    }
  }
  HandOvers found;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].empty()) continue;
    const double zero = ranks[rank].front().start - executed.spans[rank].front().start;
    std::optional<double> idle_since;
    for (const ExecutedPass& pass : ranks[rank]) {
      const Action& action = pass.action;
      const bool forward = action.kind == ActionKind::forward;
      const int from = action.stage + (forward ? -1 : 1);
      if ((forward || makes_gradient(action.kind)) && on_different_ranks(schedule, from, action.stage)) {
        const double made = (forward ? outputs : gradients).at({from, action.micro_batch});
        const double begun = pass.start - zero;
        found.earliest = std::min(found.earliest, begun - made);
        if (!idle_since || *idle_since < made) found.waited.push_back(begun - made);
      }
      idle_since = pass.end - zero;
    }
  }
  return found;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

double Timeline::ratio() const { return simulated.makespan > 0.0 ? executed.makespan / simulated.makespan : 1.0; }

double Timeline::rate_without_transfers() const {
  return executed.makespan > 0.0 ? without_transfers / executed.makespan : 1.0;
}

Timeline make_timeline(const Schedule& schedule, const std::vector<std::vector<ExecutedPass>>& ranks) {
  Timeline timeline{.schedule = passes_of(schedule)};
  check_passes(timeline.schedule, ranks);
  Executed executed = executed_spans(timeline.schedule, ranks);
  const HandOvers handed = hand_overs(timeline.schedule, executed, ranks);
  timeline.times.by_stage = mean_times(timeline.schedule, ranks);
  timeline.waited_transfers = static_cast<int>(handed.waited.size());
  timeline.times.transfer = std::max(median(handed.waited), 0.0);
  timeline.earliest_use = handed.earliest;

  timeline.executed = summarise(timeline.schedule, std::move(executed.spans));
  Simulation& ran = timeline.executed;
  ran.bubble = 0.0;  // only of the passes: an overlap may have waited between its parts
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    ran.busy[rank] = executed.busy[rank];
    ran.bubble_of_rank[rank] = ran.makespan > 0.0 ? 1.0 - ran.busy[rank] / ran.makespan : 0.0;
    ran.bubble += ran.bubble_of_rank[rank] / static_cast<double>(ranks.size());
  }
  timeline.simulated = simulate(timeline.schedule, timeline.times);
  timeline.without_transfers =
      simulate(timeline.schedule, {.common = {}, .by_stage = timeline.times.by_stage, .transfer = 0.0}).makespan;

  std::map<std::string, double> durations;  // of each action, by its text
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::size_t i = 0; i < timeline.schedule.actions[rank].size(); ++i) {
      durations[to_text(timeline.schedule.actions[rank][i])] = executed.durations[rank][i];
    }
  }
  timeline.replayed =
      summarise(timeline.schedule,
                walk(timeline.schedule, {.action = [&](const Action& action) { return durations.at(to_text(action)); },
                                         .transfer = timeline.times.transfer})
                    .spans)
          .makespan;
  return timeline;
}

Schedule schedule_of(const std::vector<std::vector<ExecutedPass>>& ranks) {
  if (std::ranges::all_of(ranks, [](const ExecutedRow& row) { return row.empty(); })) {
    throw ConfigError("nothing has run: no rank has a pass");
  }
  Schedule found = parse_csv(to_csv({.name = "executed", .actions = actions_of(ranks)}), {.name = "executed"});
  check(found);
  for (const std::string& name : schedule_names()) {
    try {
      Schedule known = make_schedule({.name = name,
                                      .ranks = found.ranks(),
                                      .stages_per_rank = found.stages() / found.ranks(),
                                      .micro_batches = found.micro_batches});
      if (without_overlaps(known) == found.actions && known.rank_of_stage == found.rank_of_stage) return known;
    } catch (const ConfigError&) {
      // This size does not allow the schedule.
    }
  }
  return found;
}

std::string to_text(const Timeline& timeline) {
  const Schedule& schedule = timeline.schedule;
  const auto number = [](double seconds) { return fmt::format("{:.3f}", kMilliseconds * seconds); };
  std::string text = fmt::format("{}: {} ranks, {} stages, {} micro-batches; times in milliseconds\n\n", schedule.name,
                                 schedule.ranks(), schedule.stages(), schedule.micro_batches);
  text += fmt::format("stage  rank {:>10} {:>10} {:>10} {:>10}\n", "F", "B", "I", "W");
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    text += fmt::format("{:>5}  {:>4}", stage, rank_of(schedule, stage));
    PassTimes times = timeline.times.by_stage[static_cast<std::size_t>(stage)];
    for (const ActionKind kind : kKinds) {
      const double time = times.of(kind);
      text += fmt::format(" {:>10}", time > 0.0 ? number(time) : "-");
    }
    text += '\n';
  }
  text += timeline.waited_transfers == 0 ? std::string("no rank waited for a transfer\n")
                                         : fmt::format("a transfer {} (median of {} that a rank waited for)\n",
                                                       number(timeline.times.transfer), timeline.waited_transfers);
  text += "\nrank        busy     waits  simulated waits  live at most\n";
  for (std::size_t rank = 0; rank < timeline.executed.busy.size(); ++rank) {
    text += fmt::format("{:>4}  {:>10}  {:>6.1f} %  {:>13.1f} %  {:>12}\n", rank, number(timeline.executed.busy[rank]),
                        100 * timeline.executed.bubble_of_rank[rank], 100 * timeline.simulated.bubble_of_rank[rank],
                        timeline.executed.peak_live_activations[rank]);
  }
  const auto line = [&](const std::string& what, double makespan) {
    return fmt::format("{:<58} {:>10}   {:.3f}\n", what, number(makespan),
                       makespan > 0.0 ? timeline.executed.makespan / makespan : 1.0);
  };
  text += fmt::format("\n{:<58} {:>10}   executed / this\n", "makespan", "");
  text += line("executed", timeline.executed.makespan);
  text += line("simulated from the stages' times", timeline.simulated.makespan);
  text += line("  with transfers that take no time", timeline.without_transfers);
  text += line("  with each pass as long as it was", timeline.replayed);
  if (timeline.earliest_use < -1e-4) {
    text += fmt::format(
        "warning: something was used {} ms before it was made: the ranks' clocks differ, so the makespan is not "
        "exact\n",
        number(-timeline.earliest_use));
  }
  return text;
}

std::string to_svg(const Timeline& timeline) {
  const auto in_milliseconds = [](Simulation simulation) {
    simulation.makespan *= kMilliseconds;
    for (auto& row : simulation.spans) {
      for (Span& span : row) span = {span.start * kMilliseconds, span.end * kMilliseconds};
    }
    return simulation;
  };
  return to_svg(timeline.schedule,
                {{"executed", in_milliseconds(timeline.executed)}, {"simulated", in_milliseconds(timeline.simulated)}},
                "ms");
}

}  // namespace phalanx::schedule
