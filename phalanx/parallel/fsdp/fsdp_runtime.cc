#include "phalanx/parallel/fsdp/fsdp_runtime.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"
#include "phalanx/parallel/end_of_backward.h"
#include "phalanx/parallel/missing_gradients.h"

namespace phalanx::fsdp {
namespace {

// Beyond the unit in use and the units around it: one unit of parameters in flight, one unit of gradients being
// averaged.
constexpr int kGroupsInFlight = 1;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Streams are made only where shards are on the host.
at::Device copy_device(const ParamGroup& group) {
  return group.offloads() ? group.parameter(0).tensor.device() : at::Device(at::kCPU);
}

std::size_t place_of(std::size_t group, const std::vector<std::size_t>& order) {
  return static_cast<std::size_t>(std::ranges::find(order, group) - order.begin());
}

}  // namespace

void FsdpRuntime::append_once(std::vector<std::size_t>& order, std::size_t group) {
  if (std::ranges::find(order, group) == order.end()) order.push_back(group);
}

std::shared_ptr<FsdpRuntime> FsdpRuntime::make(std::vector<std::unique_ptr<ParamGroup>> units,
                                               std::shared_ptr<Communicator> comm,
                                               std::shared_ptr<Communicator> replicas,
                                               std::shared_ptr<Communicator> post_forward_group, bool prefetch,
                                               int levels, AttachedParameters attached) {
  std::shared_ptr<FsdpRuntime> made(new FsdpRuntime(std::move(units), std::move(comm), std::move(replicas),
                                                    std::move(post_forward_group), prefetch, levels,
                                                    std::move(attached)));
  made->subscribe();
  return made;
}

FsdpRuntime::FsdpRuntime(std::vector<std::unique_ptr<ParamGroup>> units, std::shared_ptr<Communicator> comm,
                         std::shared_ptr<Communicator> replicas, std::shared_ptr<Communicator> post_forward_group,
                         bool prefetch, int levels, AttachedParameters attached)
    : param_groups_(std::move(units)),
      states_(param_groups_.size()),
      comm_(std::move(comm)),
      replicas_(std::move(replicas)),
      post_forward_group_(std::move(post_forward_group)),
      prefetches_(prefetch),
      levels_(levels),
      to_host_(copy_device(*param_groups_.front())),
      from_host_(copy_device(*param_groups_.front())),
      attached_(std::move(attached)) {
  pre_forward_order_.resize(param_groups_.size());
  std::iota(pre_forward_order_.begin(), pre_forward_order_.end(), 0);
  post_forward_order_ = pre_forward_order_;
  for (State& state : states_) state.inner.resize(param_groups_.size());
  std::int64_t largest = 0;
  int pooled = 0;
  for (const auto& group : param_groups_) {
    if (group->resident()) continue;
    largest = std::max(largest, group->bytes());
    ++pooled;
  }
  parameter_pool_ = MemoryPool(std::min(pooled, levels_ + kGroupsInFlight), largest,
                               [&](std::int64_t bytes) { return allocate(bytes); });
  statistics_.unsharded_bytes = parameter_pool_.bytes();
}

void FsdpRuntime::subscribe() {
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    for (std::size_t i = 0; i < param_groups_[u]->size(); ++i) {
      if (!param_groups_[u]->is_trained(i)) continue;
      subscriptions_.push_back(on_grad_ready(param_groups_[u]->parameter(i).tensor,
                                             [this, u, i](const at::Tensor&) { post_accumulate_grad_hook(u, i); }));
    }
    param_groups_[u]->offer_grad_buffers();
    param_groups_[u]->watch(weak_from_this(), u);
  }
  for (auto& one : attached_.hook_frozen([this](const std::string& changes) { fail_changed(changes); })) {
    subscriptions_.push_back(std::move(one));
  }
}

void FsdpRuntime::detach() {
  for (const auto& group : param_groups_) group->withdraw_grad_buffers();
  subscriptions_.clear();
}

// Collective, like its callers.
at::Tensor FsdpRuntime::allocate(std::int64_t bytes, observe::MemoryCategory what_for) const {
  const observe::MemoryScope scope(what_for);
  const at::Device device = param_groups_.front()->parameter(0).tensor.device();
  return comm_->symmetric_empty({bytes}, at::TensorOptions(at::kByte).device(device), {.keeps_peers_mapped = false});
}

// Called before the first training forward pass: not in a backward pass, where other operations are in flight.
void FsdpRuntime::make_pools() {
  if (grad_pool_) return;
  std::int64_t largest = 0;
  int pooled = 0;
  for (const auto& group : param_groups_) {
    if (!group->has_trained()) continue;
    const bool keeps = group->own_grads() || keeps_unsharded_grads_;
    if (keeps && !group->has_grad_memory()) {
      // Between micro-batches, unsharded gradients belong to one rank only until they are averaged.
      group->keep_grads(allocate(group->grad_bytes(), group->own_grads() ? observe::MemoryCategory::gradients
                                                                         : observe::MemoryCategory::buffers));
      statistics_.gradient_bytes += group->grad_bytes();
    }
    if (keeps) continue;
    largest = std::max(largest, group->grad_bytes());
    ++pooled;
  }
  grad_pool_.emplace(std::min(pooled, levels_ + kGroupsInFlight), largest,
                     [&](std::int64_t bytes) { return allocate(bytes); });
  statistics_.gradient_bytes += grad_pool_->bytes();
}

void FsdpRuntime::hold() {
  ++holds_;
  keep_unsharded_grads();
}

void FsdpRuntime::keep_unsharded_grads() {
  if (keeps_unsharded_grads_) return;
  keeps_unsharded_grads_ = true;
  grad_pool_.reset();
  statistics_.gradient_bytes = 0;
  for (const auto& group : param_groups_) {
    if (group->has_grad_memory() && !group->own_grads()) group->detach_grads();
    if (group->own_grads() && group->has_grad_memory()) statistics_.gradient_bytes += group->grad_bytes();
  }
  make_pools();
}

void FsdpRuntime::invalidate_unsharded() {
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    reshard(u);
    param_groups_[u]->invalidate_unsharded();
  }
}

bool FsdpRuntime::is_idle(std::size_t group) const { return !states_[group].in_use && !states_[group].in_backward; }

at::Tensor FsdpRuntime::acquire_parameter_memory() {
  if (auto memory = parameter_pool_.acquire()) return *std::move(memory);
  // The order differs from the previous one: the prefetched unit is not the one that is needed.
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    if (param_groups_[u]->resident() || !param_groups_[u]->has_memory() || !is_idle(u)) continue;
    reshard(u);
    return *parameter_pool_.acquire();
  }
  // Units that are used inside other units although their modules are not nested: one more for each level.
  std::int64_t bytes = 0;
  for (const auto& group : param_groups_) bytes = std::max(bytes, group->resident() ? 0 : group->bytes());
  statistics_.unsharded_bytes += bytes;
  return allocate(bytes);
}

void FsdpRuntime::unshard(std::size_t group) {
  ParamGroup& u = *param_groups_[group];
  if (u.is_unsharded()) return;
  if (!u.has_memory()) u.attach(acquire_parameter_memory());
  u.unshard(from_host_);
  ++statistics_.gathers;
}

void FsdpRuntime::unshard_and_wait(std::size_t group) {
  const at::NoGradGuard no_grad;
  unshard(group);
  const auto begin = Clock::now();
  param_groups_[group]->wait_for_unshard();
  statistics_.exposed_seconds += seconds_since(begin);
}

void FsdpRuntime::reshard(std::size_t group) {
  ParamGroup& u = *param_groups_[group];
  if (!u.resident() && u.has_memory()) parameter_pool_.release(u.detach());
}

// Prefetches only into free memory: never more than the units in use and one ahead.
void FsdpRuntime::prefetch(std::size_t group, int direction) {
  if (!prefetches_) return;
  const auto& order = direction > 0 ? pre_forward_order_ : post_forward_order_;
  const std::size_t place = place_of(group, order);
  const bool at_end = direction > 0 ? place + 1 == order.size() : place == 0;
  if (at_end) return;
  try_unshard(order[direction > 0 ? place + 1 : place - 1]);
}

void FsdpRuntime::try_unshard(std::size_t group) {
  ParamGroup& u = *param_groups_[group];
  if (u.is_unsharded()) return;
  if (!u.has_memory()) {
    auto memory = parameter_pool_.acquire();
    if (!memory) return;
    u.attach(*memory);
  }
  u.unshard(from_host_);
  ++statistics_.gathers;
  ++statistics_.prefetches;
}

void FsdpRuntime::pre_forward(std::size_t group) {
  State& state = states_[group];
  const bool recomputing = pass_ != nullptr;
  if (!recomputing) {
    if (at::GradMode::is_enabled()) make_pools();
    // A forward pass begins: what an earlier one without a backward pass left unsharded may be out of date. Not within
    // a step.
    if (group == pre_forward_order_.front() && std::ranges::none_of(states_, [](const State& s) { return s.in_use; })) {
      for (std::size_t u = 0; u < param_groups_.size(); ++u) {
        if (param_groups_[u]->resident() || in_step()) continue;
        reshard(u);
        param_groups_[u]->invalidate_unsharded();
      }
      seen_pre_forward_.clear();
      seen_post_forward_.clear();
    }
    append_once(seen_pre_forward_, group);
  }
  state.in_recorded = at::GradMode::is_enabled();
  for (State& outer : states_) {
    if (!outer.in_use) continue;
    outer.inner[group] = true;
    state.in_recorded |= outer.in_recorded;
  }
  state.in_use = true;
  state.was_used = true;
  unshard_and_wait(group);
  if (recomputing) return;
  prefetch(group, +1);
  if (in_step() || group != pre_forward_order_.back() || !at::GradMode::is_enabled()) return;
  // The backward pass begins with this unit. A loss that is fused with its projection computes the gradient already in
  // the forward pass, in the offered memory. But it must not overwrite an average that is there and has not been used
  // yet.
  if (!param_groups_[group]->has_trained() || param_groups_[group]->gathered_on_use()) return;
  if (param_groups_[group]->own_grads() && param_groups_[group]->has_shard_grads()) {
    param_groups_[group]->withdraw_grad_buffers();
  } else if (holds_ == 0) {
    alloc_grads(group);
  }
}

at::Tensor FsdpRuntime::post_forward(std::size_t group, at::Tensor output) {
  State& state = states_[group];
  state.in_use = false;
  const bool recorded = at::GradMode::is_enabled() && output.requires_grad();
  if (recorded) {
    output.register_hook([self = weak_from_this(), group](const at::Tensor&) {
      if (const auto alive = self.lock()) alive->pre_backward(group);
    });
  }
  const bool recomputing = pass_ != nullptr;
  if (recomputing) return output;
  append_once(seen_post_forward_, group);
  // Inside a checkpointed layer nothing is recorded yet, but the backward pass will need it nevertheless.
  const bool comes_again = recorded || (state.in_recorded && !at::GradMode::is_enabled());
  const bool is_last = group == pre_forward_order_.back() || state.inner[pre_forward_order_.back()];
  if (comes_again && !in_step() && is_last) return output;
  if (comes_again) {
    const at::NoGradGuard no_grad;
    param_groups_[group]->to_sharded_post_forward();
  }
  reshard(group);
  return output;
}

void FsdpRuntime::prepare_for_backward() {
  require_as_attached();
  if (comm_->size() == 1) make_pools();  // nothing has announced the forward pass of what is whole anyway
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    if (!states_[u].in_use || !param_groups_[u]->gathered_on_use()) continue;
    states_[u].in_use = false;
    append_once(seen_post_forward_, u);
  }
  pass_ = std::make_shared<Pass>();
  pass_->no_sync = holds_ > 0;
  pass_->no_all_reduce = holds_ == 0 && all_reduce_holds_ > 0;
  expect_gradients();
}

bool FsdpRuntime::accumulates_unsharded(std::size_t group, const Pass& pass) const {
  return pass.no_sync || (pass.no_all_reduce && param_groups_[group]->own_grads());
}

// For one pass, or for a step of many passes.
void FsdpRuntime::expect_gradients() {
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    State& state = states_[u];
    state = State{.in_use = state.in_use,
                  .in_recorded = state.in_recorded,
                  .ready = std::vector<bool>(param_groups_[u]->size(), false),
                  .inner = state.inner};
    for (std::size_t i = 0; i < param_groups_[u]->size(); ++i) state.pending += param_groups_[u]->is_trained(i) ? 1 : 0;
    param_groups_[u]->carry_reduced();
    param_groups_[u]->offer_grad_buffers();
  }
  adopt_seen_order();
}

// The order of the last forward pass is the best guess for the next one.
void FsdpRuntime::adopt_seen_order() {
  for (const std::size_t u : pre_forward_order_) append_once(seen_pre_forward_, u);
  for (const std::size_t u : post_forward_order_) append_once(seen_post_forward_, u);
  pre_forward_order_ = std::exchange(seen_pre_forward_, {});
  post_forward_order_ = std::exchange(seen_post_forward_, {});
}

void FsdpRuntime::queue_final_callback() {
  if (in_step() || pass_->callback_queued || !inside_backward()) return;
  at_end_of_backward(
      [self = weak_from_this(), pass = pass_] {
        if (const auto alive = self.lock()) alive->finalize_backward(pass);
      },
      [self = weak_from_this(), pass = pass_] {
        if (const auto alive = self.lock()) alive->abandon(pass);
      });
  pass_->callback_queued = true;
}

at::Tensor FsdpRuntime::acquire_grad_memory() {
  while (true) {
    if (auto memory = grad_pool_->acquire()) return *std::move(memory);
    if (reducing_.empty()) break;
    finish_oldest_reduce_scatter();
  }
  // A unit whose backward pass has not ended, or never came, holds the memory: allocate another piece.
  std::int64_t bytes = 0;
  for (const auto& group : param_groups_) bytes = std::max(bytes, group->grad_bytes());
  statistics_.gradient_bytes += bytes;
  return allocate(bytes);
}

void FsdpRuntime::alloc_grads(std::size_t group) {
  if (!param_groups_[group]->has_grad_memory()) param_groups_[group]->attach_grads(acquire_grad_memory());
}

void FsdpRuntime::pre_backward(std::size_t group) {
  if (!pass_) prepare_for_backward();
  queue_final_callback();
  const at::NoGradGuard no_grad;
  // The gradient of this unit's output is complete, so all units that follow it in the forward pass are done. (They are
  // not yet done when the last of their parameters' gradients comes: if some parameters are frozen, computing the
  // input's gradient may still need them.) This excludes units that were used inside this unit. In a step, gradients
  // may come much later.
  State& state = states_[group];
  for (std::size_t place = place_of(group, pre_forward_order_) + 1; place < pre_forward_order_.size(); ++place) {
    const std::size_t later = pre_forward_order_[place];
    if (state.inner[later]) continue;
    if (states_[later].in_backward && (in_step() || states_[later].pending == 0)) {
      states_[later].in_backward = false;
      reshard(later);
    }
  }
  if (state.is_through && !in_step()) return;  // used twice: the second hook of a unit whose gradients are all there
  state.in_backward = true;
  unshard_and_wait(group);
  if (state.pending > 0 && !in_step()) alloc_grads(group);
  prefetch(group, -1);
}

void FsdpRuntime::post_accumulate_grad_hook(std::size_t group, std::size_t parameter) {
  const at::NoGradGuard no_grad;
  if (!in_step() && !inside_backward()) {
    throw Error(fmt::format(
        "fully_shard: '{}' received its gradient outside of any backward pass, as in a pipeline that does not "
        "know of the sharding: set PipelineStage::sharding to in_pipeline() of it",
        param_groups_[group]->parameter(parameter).name));
  }
  if (!pass_ && !in_step()) prepare_for_backward();
  queue_final_callback();
  State& state = states_[group];
  if (state.ready[parameter]) {
    throw Error(
        fmt::format("fully_shard: '{}' received a second gradient in one backward pass: its unit is used by two "
                    "checkpointed layers, or the graph is run backward inside itself",
                    param_groups_[group]->parameter(parameter).name));
  }
  const bool was_gathered = in_step() ? state.was_used : param_groups_[group]->is_unsharded();
  if (!was_gathered && !param_groups_[group]->gathered_on_use()) {
    throw Error(
        fmt::format("fully_shard: '{}' of unit {} was used without having been gathered: run its module by nn::call(), "
                    "or the whole "
                    "by FullyShardedDataParallel::run()",
                    param_groups_[group]->parameter(parameter).name, param_groups_[group]->name()));
  }
  alloc_grads(group);
  param_groups_[group]->place_grad(parameter);
  state.ready[parameter] = true;
  PHALANX_ASSERT(state.pending > 0, "only trained parameters receive gradients");
  if (--state.pending == 0) post_backward(group);
}

void FsdpRuntime::post_backward(std::size_t group) {
  states_[group].is_through = true;
  if (accumulates_unsharded(group, in_step() ? *step_ : *pass_)) return;
  PHALANX_ASSERT(
      std::ranges::find(reducing_, group) == reducing_.end() && std::ranges::find(reduced_, group) == reduced_.end(),
      "the gradients of a unit are reduced once in a pass");
  param_groups_[group]->start_reduce_scatter();
  if (in_step() || !pass_->no_all_reduce) param_groups_[group]->fetch_partial_reduce_output(from_host_);
  reducing_.push_back(group);
  statistics_.reduced_bytes += param_groups_[group]->grad_bytes();
}

void FsdpRuntime::finish_oldest_reduce_scatter() {
  PHALANX_ASSERT(!reducing_.empty(), "a reduce_scatter is finished after it was started");
  const std::size_t group = reducing_.front();
  reducing_.pop_front();
  const auto begin = Clock::now();
  param_groups_[group]->finish_reduce_scatter();
  statistics_.exposed_seconds += seconds_since(begin);
  const bool offloads = param_groups_[group]->offloads();
  if (!in_step() && pass_->no_all_reduce) {
    // With offload, the host adds the copies when they have arrived: at the end.
    offloads ? reduced_.push_back(group) : param_groups_[group]->add_to_partial_reduce_output();
  } else {
    param_groups_[group]->take_partial_reduce_output();
    reduced_.push_back(group);
    start_replica_reduction(group);
    if (offloads) finish_replica_reductions();  // what is copied next must be complete
  }
  const CopyStream::Mark copied = offloads ? param_groups_[group]->copy_to_host(to_host_) : nullptr;
  if (at::Tensor memory = param_groups_[group]->detach_grads(); memory.defined())
    grad_pool_->release(std::move(memory), copied);
}

void FsdpRuntime::start_replica_reduction(std::size_t group) {
  const bool replicated = replicas_ && replicas_->size() > 1;
  if (replicated) replica_reductions_.push_back(param_groups_[group]->reduce_over(*replicas_));
}

// Their memory is used for something else next, or is freed.
void FsdpRuntime::finish_copies() const noexcept {
  try {
    wait_for_copies();
  } catch (const std::exception&) {  // the device has failed
  }
}

// The host reads what the copies to it have brought, and the optimizer then overwrites the shards that others read.
void FsdpRuntime::wait_for_copies() const {
  to_host_.synchronize();
  from_host_.synchronize();
}

void FsdpRuntime::finish_replica_reductions() {
  const auto begin = Clock::now();
  for (const auto& work : std::exchange(replica_reductions_, {})) work.wait();
  statistics_.exposed_seconds += seconds_since(begin);
}

void FsdpRuntime::finalize_backward(const std::shared_ptr<Pass>& pass) {
  if (pass_ != pass) return;
  pass->callback_queued = false;
  const at::NoGradGuard no_grad;
  try {
    const bool all_there = std::ranges::all_of(states_, [](const State& s) { return s.pending == 0; });
    if (!all_there && inside_an_outer_backward()) return;
    if (!pass->no_sync) {
      for (std::size_t u = 0; u < param_groups_.size(); ++u) {
        if (states_[u].pending > 0 && !accumulates_unsharded(u, *pass)) fail_unused(*pass);
      }
      pass->no_all_reduce ? accumulate_partial_reduce() : publish();
    }
    for (std::size_t u = 0; u < param_groups_.size(); ++u) {
      states_[u].in_backward = false;
      reshard(u);
      // The optimizer steps next: the unsharded values are out of date from then on.
      if (!pass->no_sync && !pass->no_all_reduce) param_groups_[u]->invalidate_unsharded();
    }
  } catch (...) {
    abandon(pass);
    throw;
  }
  PHALANX_ASSERT(reducing_.empty() && reduced_.empty() && replica_reductions_.empty(),
                 "a backward pass ends after its collectives");
  pass_.reset();
}

void FsdpRuntime::accumulate_partial_reduce() {
  while (!reducing_.empty()) finish_oldest_reduce_scatter();
  if (!reduced_.empty()) wait_for_copies();
  for (const std::size_t group : std::exchange(reduced_, {})) param_groups_[group]->add_to_partial_reduce_output();
}

void FsdpRuntime::publish() {
  while (!reducing_.empty()) finish_oldest_reduce_scatter();
  finish_replica_reductions();
  if (param_groups_.front()->offloads()) wait_for_copies();
  for (const std::size_t group : std::exchange(reduced_, {})) param_groups_[group]->publish_grads();
  ++statistics_.synchronisations;
}

// The pass ended with an exception: this rank will not issue the collectives that its peers wait for.
void FsdpRuntime::abandon(const std::shared_ptr<Pass>& pass) noexcept {
  if (pass_ == pass) abort_backward();
}

void FsdpRuntime::abort_backward() noexcept {
  pass_.reset();
  reducing_.clear();
  reduced_.clear();
  replica_reductions_.clear();
  abort_before_averaging(*comm_, "fully_shard");
  if (replicas_) abort_before_averaging(*replicas_, "fully_shard");
  if (post_forward_group_) abort_before_averaging(*post_forward_group_, "fully_shard");
  finish_copies();  // now that no collective holds them up
  for (const auto& group : param_groups_) {
    group->drop_full_grads();
    group->drop_partial_reduce_output();
  }
}

void FsdpRuntime::fail_unused(const Pass& pass) {
  std::vector<std::string> names;
  bool came = false;  // at least one
  for (std::size_t u = 0; u < param_groups_.size(); ++u) {
    for (std::size_t i = 0; i < param_groups_[u]->size(); ++i) {
      came |= states_[u].ready[i];
      if (!accumulates_unsharded(u, pass) && param_groups_[u]->is_trained(i) && !states_[u].ready[i])
        names.push_back(param_groups_[u]->parameter(i).name);
    }
  }
  const std::string message = fmt::format(
      "fully_shard: on rank {} the backward pass gave no gradient to {} parameter{}: {}. Use them in the loss, or "
      "freeze them (requires_grad = false) before sharding{}",
      comm_->rank(), names.size(), names.size() == 1 ? "" : "s", quoted_list(names),
      came ? "" : "; or, of a pipeline's stage, set PipelineStage::sharding to in_pipeline()");
  fail(message);
}

void FsdpRuntime::require_as_attached() {
  if (const std::string changes = attached_.changes(); !changes.empty()) fail_changed(changes);
}

void FsdpRuntime::fail_changed(const std::string& changes) {
  fail(
      fmt::format("fully_shard: on rank {} {} since the module was sharded. Set requires_grad before, alike on all "
                  "ranks; to train other parameters from here on save a checkpoint and shard a new module",
                  comm_->rank(), changes));
}

// The other ranks may be waiting: they fail with the same message.
void FsdpRuntime::fail(const std::string& message) {
  for (const auto& comm : {comm_, replicas_, post_forward_group_}) {
    if (comm) abort_with(*comm, message);
  }
  abort_backward();
  throw Error(message);
}

}  // namespace phalanx::fsdp
