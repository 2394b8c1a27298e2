// ShardedUnits as the sharding of a pipeline stage (parallel/stage_sharding.h).
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/parallel/fsdp/sharded_units.h"

namespace phalanx::fsdp {

void ShardedUnits::begin_step() {
  if (step_ || pass_) {
    throw Error(
        "fully_shard: a pipeline's step began inside another one, or inside a backward pass of the same module; run a "
        "sharded stage by one pipeline only");
  }
  require_as_attached();
  const at::NoGradGuard no_grad;
  keep_all_grads();
  make_pools();
  forget_values();
  step_ = std::make_shared<Pass>();
  step_->held = holds_ > 0;
  expect_gradients();
  gather_ahead();
}

void ShardedUnits::gather_ahead() {
  const at::NoGradGuard no_grad;
  for (const std::size_t u : order_) {
    if (units_[u]->resident() || prefetches_) gather_ahead_if_room(u);
  }
}

void ShardedUnits::let_go_of_all() {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (is_idle(u)) let_go(u);
  }
}

void ShardedUnits::begin_backward() { pass_ = step_; }

void ShardedUnits::end_backward() {
  pass_.reset();
  const at::NoGradGuard no_grad;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    states_[u].in_backward = false;
    let_go(u);
  }
}

// Where gradients are of another dtype than parameters autograd would add them up in the parameters' own.
void ShardedUnits::collect_gradients() {
  const at::NoGradGuard no_grad;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (states_[u].pending > 0) units_[u]->collect_grads();
  }
}

void ShardedUnits::show_gradients() {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (states_[u].pending > 0) units_[u]->show_grads();
  }
}

void ShardedUnits::end_step() {
  const at::NoGradGuard no_grad;
  if (!step_->held) {
    for (const State& state : states_) {
      if (state.pending > 0) fail_unused(*step_);
    }
    publish();
    forget_values();
  }
  take_order();
  step_.reset();
}

void ShardedUnits::abandon_step() noexcept {
  if (!std::exchange(step_, nullptr)) return;
  for (State& state : states_) state.in_use = state.in_backward = false;
  give_up();
}

}  // namespace phalanx::fsdp
