// FsdpRuntime, where units have no hooks: the first operator that reads a unit gathers it, and the first that reads
// another unit ends its use.
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/parallel/end_of_backward.h"
#include "phalanx/parallel/fsdp/fsdp_runtime.h"

namespace phalanx::fsdp {

void FsdpRuntime::before_use(at::ArrayRef<std::size_t> groups) {
  const auto is_gathered = [&](std::size_t group) {
    const ParamGroup& u = *param_groups_[group];
    return u.is_unsharded() && ((states_[group].in_use && u.is_current()) || states_[group].in_backward);
  };
  if (std::ranges::all_of(groups, is_gathered)) {
    // The pass that began the use may have been one without gradients.
    if (!at::GradMode::is_enabled() || pass_) return;
    make_pools();
    for (const std::size_t group : groups) states_[group].in_recorded |= states_[group].in_use;
    return;
  }
  for (const std::size_t group : groups) {
    const ParamGroup& u = *param_groups_[group];
    if (u.gathered_on_use() || u.is_unsharded()) continue;
    throw Error(
        fmt::format("fully_shard: a parameter of unit {} ('{}', ...) is read without having been gathered: run the "
                    "module by FullyShardedDataParallel::run(), or shard it with FullyShardOptions::gather_on_use",
                    u.name(), u.parameter(0).name));
  }
  inside_backward() ? use_in_backward(groups) : use_in_forward(groups);
}

void FsdpRuntime::use_in_forward(at::ArrayRef<std::size_t> groups) {
  drop_outdated();
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    const bool goes_on = std::ranges::find(groups, u) != groups.end() && param_groups_[u]->is_unsharded();
    if (states_[u].in_use && param_groups_[u]->gathered_on_use() && !goes_on) end_use(u);
  }
  for (const std::size_t group : groups) {
    if (param_groups_[group]->gathered_on_use() && !states_[group].in_use) pre_forward(group);
  }
}

// Ends all uses of values that were gathered before the optimizer's step: a read between the backward pass and the step
// begins one.
void FsdpRuntime::drop_outdated() {
  const at::NoGradGuard no_grad;
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    ParamGroup& group = *param_groups_[u];
    if (!group.is_unsharded() || group.is_current()) continue;
    states_[u].in_use = false;
    reshard(u);
    group.invalidate_unsharded();
  }
}

void FsdpRuntime::end_use(std::size_t group) {
  states_[group].in_use = false;
  append_once(seen_post_forward_, group);
  const bool comes_again = states_[group].in_recorded;
  if (comes_again && group == pre_forward_order_.back()) return;
  const at::NoGradGuard no_grad;
  if (comes_again) param_groups_[group]->to_sharded_post_forward();
  reshard(group);
}

void FsdpRuntime::use_in_backward(at::ArrayRef<std::size_t> groups) {
  if (!pass_) prepare_for_backward();
  queue_final_callback();
  const at::NoGradGuard no_grad;
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    if (!states_[u].in_backward || !param_groups_[u]->gathered_on_use()) continue;
    if (std::ranges::find(groups, u) != groups.end()) continue;
    states_[u].in_backward = false;
    reshard(u);
  }
  for (const std::size_t group : groups) {
    if (!param_groups_[group]->gathered_on_use()) continue;
    states_[group].in_backward = true;
    unshard_and_wait(group);
  }
  prefetch(groups.front(), -1);
}

}  // namespace phalanx::fsdp
