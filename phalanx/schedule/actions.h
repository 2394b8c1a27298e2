// Small predicates and helpers for actions, for all code that walks through a schedule.
#pragma once

#include <cstddef>

#include "phalanx/schedule/schedule.h"

namespace phalanx::schedule {

/// F, B, I or W.
constexpr bool is_pass(ActionKind kind) {
  return kind == ActionKind::forward || kind == ActionKind::backward || kind == ActionKind::backward_input ||
         kind == ActionKind::backward_weight;
}
/// B or I: computes the gradient of the stage's input.
constexpr bool makes_gradient(ActionKind kind) {
  return kind == ActionKind::backward || kind == ActionKind::backward_input;
}
/// B or W: after it the stage saves nothing of the micro-batch.
constexpr bool ends_micro_batch(ActionKind kind) {
  return kind == ActionKind::backward || kind == ActionKind::backward_weight;
}
constexpr bool is_send(ActionKind kind) {
  return kind == ActionKind::send_forward || kind == ActionKind::send_backward;
}
constexpr bool is_receive(ActionKind kind) {
  return kind == ActionKind::recv_forward || kind == ActionKind::recv_backward;
}
constexpr bool is_transfer(ActionKind kind) { return is_send(kind) || is_receive(kind); }

inline Action make_action(int stage, ActionKind kind, int micro_batch = -1) {
  return {.stage = stage, .kind = kind, .micro_batch = micro_batch, .sub_actions = {}};
}

/// The action at the other end of a transfer: 1SEND_F3 and 2RECV_F3 are each other's.
inline Action other_end(const Action& transfer) {
  const auto at = [&](int stage, ActionKind kind) { return make_action(stage, kind, transfer.micro_batch); };
  switch (transfer.kind) {
    case ActionKind::send_forward:
      return at(transfer.stage + 1, ActionKind::recv_forward);
    case ActionKind::recv_forward:
      return at(transfer.stage - 1, ActionKind::send_forward);
    case ActionKind::send_backward:
      return at(transfer.stage - 1, ActionKind::recv_backward);
    case ActionKind::recv_backward:
      return at(transfer.stage + 1, ActionKind::send_backward);
    default:
      return transfer;
  }
}

/// Calls visit(part) for each part of an overlap, in order, or visit(action) for any other action.
template <typename Visit>
void for_each_sub_action(const Action& action, const Visit& visit) {
  if (action.kind != ActionKind::overlap) {
    visit(action);
    return;
  }
  for (const Action& part : action.sub_actions) visit(part);
}

/// Whether any rank has an action, or a part of one, for which test(kind) holds.
template <typename Test>
bool any_action(const Schedule& schedule, const Test& test) {
  bool found = false;
  for (const auto& row : schedule.actions) {
    for (const Action& action : row)
      for_each_sub_action(action, [&](const Action& part) { found = found || test(part.kind); });
  }
  return found;
}

/// False for a compute schedule.
inline bool has_transfers(const Schedule& schedule) { return any_action(schedule, is_transfer); }

inline int rank_of(const Schedule& schedule, int stage) {
  return schedule.rank_of_stage[static_cast<std::size_t>(stage)];
}
/// Whether both stages exist and are on different ranks, so that data between them is sent.
inline bool on_different_ranks(const Schedule& schedule, int stage, int other) {
  return stage >= 0 && other >= 0 && stage < schedule.stages() && other < schedule.stages() &&
         rank_of(schedule, stage) != rank_of(schedule, other);
}

}  // namespace phalanx::schedule
