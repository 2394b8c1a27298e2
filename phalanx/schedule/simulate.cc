#include "phalanx/schedule/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/validate.h"

namespace phalanx::schedule {
namespace {

void check_times(const Schedule& schedule, const Times& times) {
  const auto check_one = [](std::string_view name, double value) {
    if (!(value >= 0.0) || std::isinf(value)) {
      throw ConfigError(fmt::format("the time of {} is {}: expected 0 or more", name, value));
    }
  };
  const auto check_pass = [&](const PassTimes& pass) {
    check_one("F", pass.forward);
    check_one("B", pass.backward);
    check_one("I", pass.backward_input);
    check_one("W", pass.backward_weight);
  };
  check_pass(times.common);
  for (const PassTimes& pass : times.by_stage) check_pass(pass);
  check_one("a transfer", times.transfer);
  if (!times.by_stage.empty() && times.by_stage.size() != static_cast<std::size_t>(schedule.stages())) {
    throw ConfigError(fmt::format("times are given for {} stages: expected one for each of the schedule's {}",
                                  times.by_stage.size(), schedule.stages()));
  }
}

}  // namespace

double& PassTimes::of(ActionKind kind) {
  switch (kind) {
    case ActionKind::forward:
      return forward;
    case ActionKind::backward:
      return backward;
    case ActionKind::backward_input:
      return backward_input;
    default:
      return backward_weight;
  }
}

Simulation simulate(const Schedule& schedule, const Times& times) {
  check_times(schedule, times);
  check(schedule);
  const auto duration = [&](const Action& action) {
    double sum = 0.0;
    for_each_sub_action(action, [&](const Action& part) {
      sum +=
          (times.by_stage.empty() ? times.common : times.by_stage[static_cast<std::size_t>(part.stage)]).of(part.kind);
    });
    return sum;
  };
  return summarise(schedule, walk(schedule, {.action = duration, .transfer = times.transfer}).spans);
}

Simulation summarise(const Schedule& schedule, std::vector<std::vector<Span>> spans) {
  Simulation result;
  result.spans = std::move(spans);
  result.peak_live_activations = peak_live_activations(schedule);

  double longest = 0.0, work_of_longest = 0.0, first_start = 0.0, last_end = 0.0;
  bool any = false;
  for (std::size_t rank = 0; rank < result.spans.size(); ++rank) {
    double busy = 0.0, start = 0.0, end = 0.0;
    bool begun = false;
    for (std::size_t i = 0; i < result.spans[rank].size(); ++i) {
      const Action& action = schedule.actions[rank][i];
      if (!is_pass(action.kind) && action.kind != ActionKind::overlap) continue;
      const Span& span = result.spans[rank][i];
      if (!std::exchange(begun, true)) start = span.start;
      end = span.end;
      busy += span.end - span.start;
    }
    result.busy.push_back(busy);
    if (!begun) continue;  // a rank without stages
    if (end - start > longest) {
      longest = end - start;
      work_of_longest = busy;
    }
    first_start = any ? std::min(first_start, start) : start;
    last_end = std::max(last_end, end);
    any = true;
  }
  result.makespan = last_end - first_start;
  for (const double busy : result.busy) {
    result.bubble_of_rank.push_back(result.makespan > 0.0 ? 1.0 - busy / result.makespan : 0.0);
    result.bubble += result.bubble_of_rank.back() / static_cast<double>(result.busy.size());
  }
  result.span_bubble = longest > 0.0 ? 1.0 - work_of_longest / longest : 0.0;
  return result;
}

std::vector<int> peak_live_activations(const Schedule& schedule) {
  std::vector<int> peaks;
  const bool training = any_action(schedule, ends_micro_batch);
  for (const auto& row : schedule.actions) {
    int alive = 0, peak = 0;
    for (const Action& action : row) {
      for_each_sub_action(action, [&](const Action& part) {
        if (training && part.kind == ActionKind::forward) peak = std::max(peak, ++alive);
      });
      for_each_sub_action(action, [&](const Action& part) {
        if (ends_micro_batch(part.kind)) --alive;
      });
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace phalanx::schedule
