#include "phalanx/parallel/fsdp/sharded_units.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/parallel/end_of_backward.h"
#include "phalanx/parallel/missing_gradients.h"

namespace phalanx::fsdp {
namespace {

// Beside the unit in use, and those that are used around it: of parameters one that is on its way, of gradients one
// that is being averaged.
constexpr int kUnitsOnTheirWay = 1;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The host reads what copies to it have brought.
void wait_for_device(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

std::size_t place_of(std::size_t unit, const std::vector<std::size_t>& order) {
  return static_cast<std::size_t>(std::ranges::find(order, unit) - order.begin());
}

void append_once(std::vector<std::size_t>& order, std::size_t unit) {
  if (std::ranges::find(order, unit) == order.end()) order.push_back(unit);
}

}  // namespace

std::shared_ptr<ShardedUnits> ShardedUnits::make(std::vector<std::unique_ptr<Unit>> units,
                                                 std::shared_ptr<Communicator> comm,
                                                 std::shared_ptr<Communicator> replicas,
                                                 std::shared_ptr<Communicator> keepers, bool prefetch, int levels,
                                                 AttachedParameters attached) {
  const std::shared_ptr<ShardedUnits> made(new ShardedUnits(std::move(units), std::move(comm), std::move(replicas),
                                                            std::move(keepers), prefetch, levels, std::move(attached)));
  made->subscribe();
  return made;
}

ShardedUnits::ShardedUnits(std::vector<std::unique_ptr<Unit>> units, std::shared_ptr<Communicator> comm,
                           std::shared_ptr<Communicator> replicas, std::shared_ptr<Communicator> keepers, bool prefetch,
                           int levels, AttachedParameters attached)
    : units_(std::move(units)),
      states_(units_.size()),
      comm_(std::move(comm)),
      replicas_(std::move(replicas)),
      keepers_(std::move(keepers)),
      prefetches_(prefetch),
      levels_(levels),
      attached_(std::move(attached)) {
  order_.resize(units_.size());
  std::iota(order_.begin(), order_.end(), 0);
  ends_ = order_;
  for (State& state : states_) state.inner.resize(units_.size());
  std::int64_t largest = 0;
  int pooled = 0;
  for (const auto& unit : units_) {
    if (unit->resident()) continue;
    largest = std::max(largest, unit->bytes());
    ++pooled;
  }
  parameter_pool_ = MemoryPool(std::min(pooled, levels_ + kUnitsOnTheirWay), largest,
                               [&](std::int64_t bytes) { return allocate(bytes); });
  statistics_.gathered_bytes = parameter_pool_.bytes();
}

void ShardedUnits::subscribe() {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    for (std::size_t i = 0; i < units_[u]->size(); ++i) {
      if (!units_[u]->is_trained(i)) continue;
      subscriptions_.push_back(
          on_grad_ready(units_[u]->parameter(i).tensor, [this, u, i](const at::Tensor&) { on_ready(u, i); }));
    }
    units_[u]->offer_grad_buffers();
  }
  for (auto& one : attached_.watch_frozen([this](const std::string& changes) { fail_changed(changes); })) {
    subscriptions_.push_back(std::move(one));
  }
}

void ShardedUnits::detach() {
  for (const auto& unit : units_) unit->withdraw_grad_buffers();
  subscriptions_.clear();
}

// Collective, as whoever calls it is.
at::Tensor ShardedUnits::allocate(std::int64_t bytes, observe::MemoryCategory what_for) const {
  const observe::MemoryScope scope(what_for);
  const at::Device device = units_.front()->parameter(0).tensor.device();
  return comm_->symmetric_empty({bytes}, at::TensorOptions(at::kByte).device(device), {.keeps_peers_mapped = false});
}

// Before the first forward pass that is trained on: not in a backward pass, where other operations are under way.
void ShardedUnits::make_pools() {
  if (grad_pool_) return;
  std::int64_t largest = 0;
  int pooled = 0;
  for (const auto& unit : units_) {
    if (!unit->has_trained()) continue;
    const bool keeps = unit->own_grads() || keeps_all_grads_;
    if (keeps && !unit->has_grad_memory()) {
      // Between micro-batches whole gradients are a rank's own only until they are averaged.
      unit->keep_grads(allocate(unit->grad_bytes(), unit->own_grads() ? observe::MemoryCategory::gradients
                                                                      : observe::MemoryCategory::buffers));
      statistics_.gradient_bytes += unit->grad_bytes();
    }
    if (keeps) continue;
    largest = std::max(largest, unit->grad_bytes());
    ++pooled;
  }
  grad_pool_.emplace(std::min(pooled, levels_ + kUnitsOnTheirWay), largest,
                     [&](std::int64_t bytes) { return allocate(bytes); });
  statistics_.gradient_bytes += grad_pool_->bytes();
}

void ShardedUnits::hold() {
  ++holds_;
  keep_all_grads();
}

void ShardedUnits::keep_all_grads() {
  if (keeps_all_grads_) return;
  keeps_all_grads_ = true;
  grad_pool_.reset();
  statistics_.gradient_bytes = 0;
  for (const auto& unit : units_) {
    if (unit->has_grad_memory() && !unit->own_grads()) unit->detach_grads();
    if (unit->own_grads() && unit->has_grad_memory()) statistics_.gradient_bytes += unit->grad_bytes();
  }
  make_pools();
}

void ShardedUnits::forget_values() {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    let_go(u);
    units_[u]->forget_values();
  }
}

bool ShardedUnits::is_idle(std::size_t unit) const { return !states_[unit].in_use && !states_[unit].in_backward; }

at::Tensor ShardedUnits::parameter_memory() {
  if (auto memory = parameter_pool_.take()) return *std::move(memory);
  // Another order than the one before: what was fetched ahead is not what is needed.
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (units_[u]->resident() || !units_[u]->has_memory() || !is_idle(u)) continue;
    let_go(u);
    return *parameter_pool_.take();
  }
  // Units used inside units although their modules are not inside each other: one more for each level.
  std::int64_t bytes = 0;
  for (const auto& unit : units_) bytes = std::max(bytes, unit->resident() ? 0 : unit->bytes());
  statistics_.gathered_bytes += bytes;
  return allocate(bytes);
}

void ShardedUnits::start_gather(std::size_t unit) {
  Unit& u = *units_[unit];
  if (u.is_gathered()) return;
  if (!u.has_memory()) u.attach(parameter_memory());
  u.start_gather();
  ++statistics_.gathers;
}

void ShardedUnits::gather(std::size_t unit) {
  const at::NoGradGuard no_grad;
  start_gather(unit);
  const auto begin = Clock::now();
  units_[unit]->finish_gather();
  statistics_.exposed_seconds += seconds_since(begin);
}

void ShardedUnits::let_go(std::size_t unit) {
  Unit& u = *units_[unit];
  if (!u.resident() && u.has_memory()) parameter_pool_.give(u.detach());
}

// Only into memory that is free: never more than those in use and one ahead.
void ShardedUnits::prefetch(std::size_t unit, int direction) {
  if (!prefetches_) return;
  const auto& order = direction > 0 ? order_ : ends_;
  const std::size_t place = place_of(unit, order);
  const bool at_end = direction > 0 ? place + 1 == order.size() : place == 0;
  if (at_end) return;
  gather_ahead_if_room(order[direction > 0 ? place + 1 : place - 1]);
}

void ShardedUnits::gather_ahead_if_room(std::size_t unit) {
  Unit& u = *units_[unit];
  if (u.is_gathered()) return;
  if (!u.has_memory()) {
    auto memory = parameter_pool_.take();
    if (!memory) return;
    u.attach(*memory);
  }
  u.start_gather();
  ++statistics_.gathers;
  ++statistics_.gathers_ahead;
}

void ShardedUnits::before_use(std::size_t unit) {
  State& state = states_[unit];
  const bool recomputing = pass_ != nullptr;
  if (!recomputing) {
    if (at::GradMode::is_enabled()) make_pools();
    // A forward pass begins: what an earlier one without a backward pass left there may be out of date; not within a
    // step.
    if (unit == order_.front() && std::ranges::none_of(states_, [](const State& s) { return s.in_use; })) {
      for (std::size_t u = 0; u < units_.size(); ++u) {
        if (units_[u]->resident() || in_step()) continue;
        let_go(u);
        units_[u]->forget_values();
      }
      seen_.clear();
      seen_ends_.clear();
    }
    append_once(seen_, unit);
  }
  state.in_recorded = at::GradMode::is_enabled();
  for (State& outer : states_) {
    if (!outer.in_use) continue;
    outer.inner[unit] = true;
    state.in_recorded |= outer.in_recorded;
  }
  state.in_use = true;
  state.was_used = true;
  gather(unit);
  if (recomputing) return;
  prefetch(unit, +1);
  if (in_step() || unit != order_.back() || !at::GradMode::is_enabled()) return;
  // The backward pass begins with it: a loss that is fused with its projection makes the gradient in the forward pass,
  // in the memory that is offered; but not over an average that lies there and that nobody has used yet.
  if (!units_[unit]->has_trained()) return;
  if (units_[unit]->own_grads() && units_[unit]->has_shard_grads()) {
    units_[unit]->withdraw_grad_buffers();
  } else if (holds_ == 0) {
    give_grads_memory(unit);
  }
}

at::Tensor ShardedUnits::after_use(std::size_t unit, at::Tensor output) {
  State& state = states_[unit];
  state.in_use = false;
  const bool recorded = at::GradMode::is_enabled() && output.requires_grad();
  if (recorded) {
    output.register_hook([self = weak_from_this(), unit](const at::Tensor&) {
      if (const auto alive = self.lock()) alive->before_backward(unit);
    });
  }
  const bool recomputing = pass_ != nullptr;
  if (recomputing) return output;
  append_once(seen_ends_, unit);
  // Inside a checkpointed layer nothing is recorded yet, but the backward pass will need it all the same.
  const bool comes_again = recorded || (state.in_recorded && !at::GradMode::is_enabled());
  const bool is_last = unit == order_.back() || state.inner[order_.back()];
  if (comes_again && !in_step() && is_last) return output;
  if (comes_again) {
    const at::NoGradGuard no_grad;
    units_[unit]->keep_part();
  }
  let_go(unit);
  return output;
}

void ShardedUnits::begin_pass() {
  require_as_attached();
  pass_ = std::make_shared<Pass>();
  pass_->held = holds_ > 0;
  pass_->is_part = holds_ == 0 && parts_ > 0;
  expect_gradients();
}

bool ShardedUnits::adds_whole(std::size_t unit, const Pass& pass) const {
  return pass.held || (pass.is_part && units_[unit]->own_grads());
}

// Of a pass, or of a step of many.
void ShardedUnits::expect_gradients() {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    State& state = states_[u];
    state = State{.in_use = state.in_use,
                  .in_recorded = state.in_recorded,
                  .ready = std::vector<bool>(units_[u]->size(), false),
                  .inner = state.inner};
    for (std::size_t i = 0; i < units_[u]->size(); ++i) state.pending += units_[u]->is_trained(i) ? 1 : 0;
    units_[u]->carry_reduced();
    units_[u]->offer_grad_buffers();
  }
  take_order();
}

// The order of the pass that has just gone forward is the best guess for the next one.
void ShardedUnits::take_order() {
  for (const std::size_t u : order_) append_once(seen_, u);
  for (const std::size_t u : ends_) append_once(seen_ends_, u);
  order_ = std::exchange(seen_, {});
  ends_ = std::exchange(seen_ends_, {});
}

void ShardedUnits::ask_for_end() {
  if (in_step() || pass_->asked || !inside_backward()) return;
  at_end_of_backward(
      [self = weak_from_this(), pass = pass_] {
        if (const auto alive = self.lock()) alive->finish(pass);
      },
      [self = weak_from_this(), pass = pass_] {
        if (const auto alive = self.lock()) alive->abandon(pass);
      });
  pass_->asked = true;
}

at::Tensor ShardedUnits::grad_memory() {
  while (true) {
    if (auto memory = grad_pool_->take()) return *std::move(memory);
    if (reducing_.empty()) break;
    finish_oldest_reduce();
  }
  // Held by a unit whose backward pass has not come to its end, or never came: another one beside it.
  std::int64_t bytes = 0;
  for (const auto& unit : units_) bytes = std::max(bytes, unit->grad_bytes());
  statistics_.gradient_bytes += bytes;
  return allocate(bytes);
}

void ShardedUnits::give_grads_memory(std::size_t unit) {
  if (!units_[unit]->has_grad_memory()) units_[unit]->attach_grads(grad_memory());
}

void ShardedUnits::before_backward(std::size_t unit) {
  if (!pass_) begin_pass();
  ask_for_end();
  const at::NoGradGuard no_grad;
  // The gradient of this unit's output is complete, so whatever came after it in the forward pass is through. (Not when
  // its parameters' last gradient came: where some are frozen, its input's gradient may still have needed them.)
  // But not what was used inside this unit. In a step gradients may come much later.
  State& state = states_[unit];
  for (std::size_t place = place_of(unit, order_) + 1; place < order_.size(); ++place) {
    const std::size_t later = order_[place];
    if (state.inner[later]) continue;
    if (states_[later].in_backward && (in_step() || states_[later].pending == 0)) {
      states_[later].in_backward = false;
      let_go(later);
    }
  }
  if (state.is_through && !in_step()) return;  // used twice: the second hook of a unit whose gradients are all there
  state.in_backward = true;
  gather(unit);
  if (state.pending > 0 && !in_step()) give_grads_memory(unit);
  prefetch(unit, -1);
}

void ShardedUnits::on_ready(std::size_t unit, std::size_t parameter) {
  const at::NoGradGuard no_grad;
  if (!in_step() && !inside_backward()) {
    throw Error(fmt::format(
        "fully_shard: '{}' received its gradient outside of any backward pass, as in a pipeline that does not "
        "know of the sharding: set PipelineStage::sharding to in_pipeline() of it",
        units_[unit]->parameter(parameter).name));
  }
  if (!pass_ && !in_step()) begin_pass();
  ask_for_end();
  State& state = states_[unit];
  if (state.ready[parameter]) {
    throw Error(
        fmt::format("fully_shard: '{}' received a second gradient in one backward pass: its unit is used by two "
                    "checkpointed layers, or the graph is run backward inside itself",
                    units_[unit]->parameter(parameter).name));
  }
  if (in_step() ? !state.was_used : !units_[unit]->is_gathered()) {
    throw Error(
        fmt::format("fully_shard: '{}' of unit {} was used without having been gathered: run its module by nn::call(), "
                    "or the whole "
                    "by FullyShardedDataParallel::run()",
                    units_[unit]->parameter(parameter).name, units_[unit]->name()));
  }
  give_grads_memory(unit);
  units_[unit]->place_grad(parameter);
  state.ready[parameter] = true;
  if (--state.pending == 0) complete(unit);
}

void ShardedUnits::complete(std::size_t unit) {
  states_[unit].is_through = true;
  if (adds_whole(unit, in_step() ? *step_ : *pass_)) return;
  units_[unit]->start_reduce();
  reducing_.push_back(unit);
  statistics_.reduced_bytes += units_[unit]->grad_bytes();
}

void ShardedUnits::finish_oldest_reduce() {
  const std::size_t unit = reducing_.front();
  reducing_.pop_front();
  const auto begin = Clock::now();
  units_[unit]->finish_reduce();
  statistics_.exposed_seconds += seconds_since(begin);
  if (!in_step() && pass_->is_part) {
    // The host adds when what is copied there has come: in the end.
    units_[unit]->offloads() ? units_[unit]->copy_to_host() : units_[unit]->add_to_sum();
    if (units_[unit]->offloads()) reduced_.push_back(unit);
  } else {
    units_[unit]->take_sum();
    reduced_.push_back(unit);
    start_averaging(unit);
  }
  if (at::Tensor memory = units_[unit]->detach_grads(); memory.defined()) grad_pool_->give(std::move(memory));
}

void ShardedUnits::start_averaging(std::size_t unit) {
  const bool replicated = replicas_ && replicas_->size() > 1;
  if (replicated) averaging_.push_back(units_[unit]->average_over(*replicas_));
  if (!units_[unit]->offloads()) return;
  finish_averaging();  // what is copied next has to be there, and its memory is another unit's then
  units_[unit]->copy_to_host();
}

void ShardedUnits::finish_averaging() {
  const auto begin = Clock::now();
  for (const auto& work : std::exchange(averaging_, {})) work.wait();
  statistics_.exposed_seconds += seconds_since(begin);
}

void ShardedUnits::finish(const std::shared_ptr<Pass>& pass) {
  if (pass_ != pass) return;
  pass->asked = false;
  const at::NoGradGuard no_grad;
  try {
    const bool all_there = std::ranges::all_of(states_, [](const State& s) { return s.pending == 0; });
    if (!all_there && inside_an_outer_backward()) return;
    if (!pass->held) {
      for (std::size_t u = 0; u < units_.size(); ++u) {
        if (states_[u].pending > 0 && !adds_whole(u, *pass)) fail_unused(*pass);
      }
      pass->is_part ? add_up() : publish();
    }
    for (std::size_t u = 0; u < units_.size(); ++u) {
      states_[u].in_backward = false;
      let_go(u);
      // The optimizer steps now: what is kept is out of date from then on.
      if (!pass->held && !pass->is_part) units_[u]->forget_values();
    }
  } catch (...) {
    abandon(pass);
    throw;
  }
  pass_.reset();
}

void ShardedUnits::add_up() {
  while (!reducing_.empty()) finish_oldest_reduce();
  if (!reduced_.empty()) wait_for_device(units_.front()->parameter(0).tensor.device());
  for (const std::size_t unit : std::exchange(reduced_, {})) units_[unit]->add_to_sum();
}

void ShardedUnits::publish() {
  while (!reducing_.empty()) finish_oldest_reduce();
  finish_averaging();
  if (units_.front()->offloads()) wait_for_device(units_.front()->parameter(0).tensor.device());
  for (const std::size_t unit : std::exchange(reduced_, {})) units_[unit]->publish_grads();
  ++statistics_.synchronisations;
}

// The pass ended with an exception: this rank will not issue what its peers are waiting for.
void ShardedUnits::abandon(const std::shared_ptr<Pass>& pass) noexcept {
  if (pass_ == pass) give_up();
}

void ShardedUnits::give_up() noexcept {
  pass_.reset();
  reducing_.clear();
  reduced_.clear();
  averaging_.clear();
  abort_before_averaging(*comm_, "fully_shard");
  if (replicas_) abort_before_averaging(*replicas_, "fully_shard");
  if (keepers_) abort_before_averaging(*keepers_, "fully_shard");
  for (const auto& unit : units_) {
    unit->drop_full_grads();
    unit->drop_sum();
  }
}

void ShardedUnits::fail_unused(const Pass& pass) {
  std::vector<std::string> names;
  bool came = false;  // one at least
  for (std::size_t u = 0; u < units_.size(); ++u) {
    for (std::size_t i = 0; i < units_[u]->size(); ++i) {
      came |= states_[u].ready[i];
      if (!adds_whole(u, pass) && units_[u]->is_trained(i) && !states_[u].ready[i])
        names.push_back(units_[u]->parameter(i).name);
    }
  }
  const std::string message = fmt::format(
      "fully_shard: on rank {} the backward pass gave no gradient to {} parameter{}: {}. Use them in the loss, or "
      "freeze them (requires_grad = false) before sharding{}",
      comm_->rank(), names.size(), names.size() == 1 ? "" : "s", quoted_list(names),
      came ? "" : "; or, of a pipeline's stage, set PipelineStage::sharding to in_pipeline()");
  fail(message);
}

void ShardedUnits::require_as_attached() {
  if (const std::string changes = attached_.changes(); !changes.empty()) fail_changed(changes);
}

void ShardedUnits::fail_changed(const std::string& changes) {
  fail(
      fmt::format("fully_shard: on rank {} {} since the module was sharded. Set requires_grad before, alike on all "
                  "ranks; to train other parameters from here on save a checkpoint and shard a new module",
                  comm_->rank(), changes));
}

// The other ranks may be waiting: they fail with the same words.
void ShardedUnits::fail(const std::string& message) {
  for (const auto& comm : {comm_, replicas_, keepers_}) {
    if (comm) abort_with(*comm, message);
  }
  give_up();
  throw Error(message);
}

}  // namespace phalanx::fsdp
