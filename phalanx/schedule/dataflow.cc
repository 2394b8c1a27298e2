#include "phalanx/schedule/dataflow.h"

#include <algorithm>
#include <limits>

#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/schedule_text.h"

namespace phalanx::schedule {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

class Walk {
 public:
  Walk(const Schedule& schedule, const Durations& durations)
      : schedule_(schedule),
        durations_(durations),
        transfers_(has_transfers(schedule)),
        micro_batches_(static_cast<std::size_t>(schedule.micro_batches)) {
    const std::size_t cells = static_cast<std::size_t>(schedule.stages()) * micro_batches_;
    for (auto* times :
         {&outputs_, &gradients_, &inputs_arrive_, &gradients_arrive_, &inputs_wanted_, &gradients_wanted_}) {
      times->assign(cells, kNever);
    }
  }

  Dataflow run() {
    const auto ranks = static_cast<std::size_t>(schedule_.ranks());
    Dataflow flow;
    flow.spans.resize(ranks);
    flow.ran.assign(ranks, 0);
    flow.waiting_for.resize(ranks);
    clocks_.assign(ranks, 0.0);
    for (bool progress = true; progress;) {
      progress = false;
      for (std::size_t rank = 0; rank < ranks; ++rank) progress = advance(rank, flow) || progress;
    }
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const auto& row = schedule_.actions[rank];
      for (std::size_t i = 0; i < flow.ran[rank]; ++i) {
        if (is_receive(row[i].kind)) flow.spans[rank][i].end = arrival(row[i]);
      }
      if (flow.ran[rank] < row.size()) flow.waiting_for[rank] = missing(row[flow.ran[rank]]);
    }
    return flow;
  }

 private:
  using Times = std::vector<double>;  // [stage, micro-batch]

  std::size_t at(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage) * micro_batches_ + static_cast<std::size_t>(micro_batch);
  }

  // Runs the rank's actions up to the first one whose inputs are not there.
  bool advance(std::size_t rank, Dataflow& flow) {
    const auto& row = schedule_.actions[rank];
    std::size_t& next = flow.ran[rank];
    const std::size_t before = next;
    for (; next < row.size(); ++next) {
      double start = clocks_[rank];
      for_each_sub_action(row[next], [&](const Action& part) { start = std::max(start, inputs_at(part)); });
      if (start == kNever) break;
      flow.spans[rank].push_back(perform(row[next], start));
      if (is_pass(row[next].kind) || row[next].kind == ActionKind::overlap) {
        clocks_[rank] = flow.spans[rank].back().end;
      }
    }
    return next > before;
  }

  // When the pass's input from stage `from` (the previous stage forward, the next stage backward) is on its rank.
  double handed_over(const Action& pass, int from, const Times& made, const Times& arrive, const Times& wanted) const {
    if (from < 0 || from >= schedule_.stages()) return 0.0;
    const std::size_t there = at(from, pass.micro_batch);
    if (!on_different_ranks(schedule_, from, pass.stage)) return made[there];
    if (!transfers_) return made[there] + durations_.transfer;
    const std::size_t here = at(pass.stage, pass.micro_batch);
    return std::max(arrive[here], wanted[here]);
  }

  double inputs_at(const Action& action) const {
    switch (action.kind) {
      case ActionKind::forward:
        return handed_over(action, action.stage - 1, outputs_, inputs_arrive_, inputs_wanted_);
      case ActionKind::backward:
      case ActionKind::backward_input:
        return std::max(outputs_[at(action.stage, action.micro_batch)],
                        handed_over(action, action.stage + 1, gradients_, gradients_arrive_, gradients_wanted_));
      case ActionKind::backward_weight:
      case ActionKind::send_backward:
        return gradients_[at(action.stage, action.micro_batch)];
      case ActionKind::send_forward:
        return outputs_[at(action.stage, action.micro_batch)];
      default:
        return 0.0;
    }
  }

  Span perform(const Action& action, double start) {
    Span span{start, start};
    if (is_pass(action.kind) || action.kind == ActionKind::overlap) {
      span.end += durations_.action(action);
      for_each_sub_action(action, [&](const Action& part) {
        const std::size_t cell = at(part.stage, part.micro_batch);
        if (part.kind == ActionKind::forward) outputs_[cell] = std::min(outputs_[cell], span.end);
        if (makes_gradient(part.kind)) gradients_[cell] = std::min(gradients_[cell], span.end);
      });
    } else if (is_send(action.kind)) {
      span.end += durations_.transfer;
      const Action receive = other_end(action);
      (receive.kind == ActionKind::recv_forward ? inputs_arrive_
                                                : gradients_arrive_)[at(receive.stage, receive.micro_batch)] = span.end;
    } else if (is_receive(action.kind)) {
      (action.kind == ActionKind::recv_forward ? inputs_wanted_
                                               : gradients_wanted_)[at(action.stage, action.micro_batch)] = start;
    }
    return span;
  }

  double arrival(const Action& receive) const {
    const std::size_t cell = at(receive.stage, receive.micro_batch);
    const bool forward = receive.kind == ActionKind::recv_forward;
    const double arrived = (forward ? inputs_arrive_ : gradients_arrive_)[cell];
    return std::max(arrived, (forward ? inputs_wanted_ : gradients_wanted_)[cell]);
  }

  // The first action that the waiting action needs and that did not run.
  Action missing(const Action& waiting) const {
    Action lacks = waiting;
    bool found = false;
    for_each_sub_action(waiting, [&](const Action& part) {
      if (found || inputs_at(part) != kNever) return;
      found = true;
      lacks = missing_part(part);
    });
    return lacks;
  }
  Action missing_part(const Action& part) const {
    const auto made_by = [&](int stage, ActionKind kind) { return make_action(stage, kind, part.micro_batch); };
    if (part.kind == ActionKind::backward_weight) return made_by(part.stage, ActionKind::backward_input);
    if (part.kind == ActionKind::send_backward) return made_by(part.stage, ActionKind::backward);
    if (part.kind == ActionKind::send_forward) return made_by(part.stage, ActionKind::forward);
    const bool forward = part.kind == ActionKind::forward;
    if (!forward && outputs_[at(part.stage, part.micro_batch)] == kNever) {
      return made_by(part.stage, ActionKind::forward);
    }
    const int from = forward ? part.stage - 1 : part.stage + 1;
    if (!transfers_ || !on_different_ranks(schedule_, from, part.stage)) {
      return made_by(from, forward ? ActionKind::forward : ActionKind::backward);
    }
    const Action receive = made_by(part.stage, forward ? ActionKind::recv_forward : ActionKind::recv_backward);
    const Times& wanted = forward ? inputs_wanted_ : gradients_wanted_;
    return wanted[at(part.stage, part.micro_batch)] == kNever ? receive : other_end(receive);
  }

  const Schedule& schedule_;
  const Durations& durations_;
  bool transfers_;
  std::size_t micro_batches_;
  std::vector<double> clocks_;
  Times outputs_, gradients_;               // made by F; by B or I
  Times inputs_arrive_, gradients_arrive_;  // at the receiving stage
  Times inputs_wanted_, gradients_wanted_;  // the time at which the receiving stage asked for them
};

}  // namespace

Dataflow walk(const Schedule& schedule, const Durations& durations) { return Walk(schedule, durations).run(); }

std::string to_step_table(const Schedule& schedule) {
  const Dataflow flow = walk(schedule, {.action = [](const Action&) { return 1.0; }});
  std::vector<std::vector<std::string>> columns(flow.spans.size());
  for (std::size_t rank = 0; rank < columns.size(); ++rank) {
    for (std::size_t i = 0; i < flow.ran[rank]; ++i) {
      const Action& action = schedule.actions[rank][i];
      if (!is_pass(action.kind) && action.kind != ActionKind::overlap) continue;
      columns[rank].resize(static_cast<std::size_t>(flow.spans[rank][i].start));
      columns[rank].push_back(to_text(action));
    }
  }
  return to_table(columns);
}

}  // namespace phalanx::schedule
