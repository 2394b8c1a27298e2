// FsdpRuntime as the sharding of a pipeline stage (parallel/stage_sharding.h).
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/parallel/fsdp/fsdp_runtime.h"

namespace phalanx::fsdp {

void FsdpRuntime::begin_step() {
  if (step_ || pass_) {
    throw Error(
        "fully_shard: a pipeline's step began inside another one, or inside a backward pass of the same module; run a "
        "sharded stage by one pipeline only");
  }
  require_as_attached();
  const at::NoGradGuard no_grad;
  keep_unsharded_grads();
  make_pools();
  invalidate_unsharded();
  step_ = std::make_shared<Pass>();
  step_->no_sync = holds_ > 0;
  expect_gradients();
  unshard();
}

void FsdpRuntime::unshard() {
  const at::NoGradGuard no_grad;
  for (const std::size_t u : pre_forward_order_) {
    if (param_groups_[u]->resident() || prefetches_) try_unshard(u);
  }
}

void FsdpRuntime::reshard() {
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    if (is_idle(u)) reshard(u);
  }
}

void FsdpRuntime::begin_backward() { pass_ = step_; }

void FsdpRuntime::end_backward() {
  pass_.reset();
  const at::NoGradGuard no_grad;
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    states_[u].in_backward = false;
    reshard(u);
  }
}

// If gradients and parameters differ in dtype, autograd would accumulate in the parameters' dtype.
void FsdpRuntime::collect_gradients() {
  const at::NoGradGuard no_grad;
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    if (states_[u].pending > 0) param_groups_[u]->to_accumulated_grads();
  }
}

void FsdpRuntime::show_gradients() {
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    if (states_[u].pending > 0) param_groups_[u]->show_grads();
  }
}

void FsdpRuntime::end_step() {
  const at::NoGradGuard no_grad;
  if (!step_->no_sync) {
    for (const State& state : states_) {
      if (state.pending > 0) fail_unused(*step_);
    }
    publish();
    invalidate_unsharded();
  }
  adopt_seen_order();
  step_.reset();
}

void FsdpRuntime::abandon_step() noexcept {
  if (!std::exchange(step_, nullptr)) return;
  for (State& state : states_) state.in_use = state.in_backward = false;
  abort_backward();
}

}  // namespace phalanx::fsdp
