#include "phalanx/parallel/ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/parallel/end_of_backward.h"
#include "phalanx/parallel/missing_gradients.h"
#include "phalanx/parallel/replicate.h"
#include "phalanx/tensor/counting_allocator.h"

namespace phalanx {
namespace {

constexpr std::int64_t kGradientAlignment = 64;  // bytes: a cache line, so that no two gradients share one

std::int64_t padded_elements(const at::Tensor& tensor) {
  const auto size = static_cast<std::int64_t>(tensor.element_size());
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  return (bytes + kGradientAlignment - 1) / kGradientAlignment * kGradientAlignment / size;
}

// The members of a bucket in the order of their memory. Rows of one length lie together, so that gradients of weights
// that are multiplied with one input are adjacent, as one product needs them (kernels/fused_linear.h).
std::vector<std::size_t> places_in_bucket(std::vector<std::size_t> members,
                                          const std::vector<NamedTensor>& parameters) {
  const auto row = [&](std::size_t i) {
    const at::Tensor& p = parameters[i].tensor;
    return p.dim() > 1 && p.size(0) > 0 ? p.numel() / p.size(0) : 1;
  };
  std::ranges::sort(members, [&](std::size_t a, std::size_t b) { return std::pair(row(a), a) < std::pair(row(b), b); });
  return members;
}

// FNV-1a over names, shapes and dtypes: tells whether a bucket order belongs to this model. It uses whole shapes, so an
// order that was saved with another tensor-parallel split also fits. `type`: as if all parameters had it.
std::int64_t fingerprint_of(const std::vector<NamedTensor>& parameters,
                            std::optional<at::ScalarType> type = std::nullopt) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const NamedTensor& parameter : parameters) {
    std::string described = describe_global(parameter);
    if (type) described = c10::toString(*type) + described.substr(described.find(' '));
    for (const char c : parameter.name + ' ' + described + '\n') {
      hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
    }
  }
  return static_cast<std::int64_t>(hash);
}

double seconds(std::chrono::steady_clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

std::shared_ptr<Reducer> Reducer::attach(std::vector<NamedTensor> parameters, AttachedParameters attached,
                                         std::shared_ptr<Communicator> comm, DdpOptions options) {
  return std::shared_ptr<Reducer>(new Reducer(std::move(parameters), std::move(attached), std::move(comm), options));
}

void Reducer::detach() {
  for (const auto& [name, parameter, shard] : parameters_) set_grad_buffer(parameter, at::Tensor());
  subscriptions_.clear();
}

Reducer::Reducer(std::vector<NamedTensor> parameters, AttachedParameters attached, std::shared_ptr<Communicator> comm,
                 DdpOptions options)
    : parameters_(std::move(parameters)), attached_(std::move(attached)), comm_(std::move(comm)), options_(options) {
  const at::Device device = parameters_.front().tensor.device();
  for (const auto& [name, tensor, shard] : parameters_) {
    if (tensor.device() != device) {
      throw Error(fmt::format("DistributedDataParallel: parameter '{}' is on {}, '{}' is on {}; expected one device",
                              name, tensor.device().str(), parameters_.front().name, device.str()));
    }
    if (!tensor.is_floating_point()) {
      throw Error(fmt::format("DistributedDataParallel: parameter '{}' has dtype {}; expected a floating-point dtype",
                              name, c10::toString(tensor.scalar_type())));
    }
  }
  fingerprint_ = fingerprint_of(parameters_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    subscriptions_.push_back(on_grad_ready(parameters_[i].tensor, [this, i](const at::Tensor&) { autograd_hook(i); }));
  }
  for (auto& one : attached_.hook_frozen([this](const std::string& changes) { fail_changed(changes); })) {
    subscriptions_.push_back(std::move(one));
  }
  slots_.resize(parameters_.size());
  order_state_ = at::empty({static_cast<std::int64_t>(2 + 2 * parameters_.size())}, at::kLong);
  std::vector<std::size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);  // the last layers' gradients come first
  std::vector<BucketParameter> sizes;
  for (const auto& p : parameters_) sizes.push_back({p.tensor.nbytes(), static_cast<int>(p.tensor.scalar_type())});
  initialize_buckets(plan_buckets(sizes, order, {options_.first_bucket_bytes, options_.bucket_bytes}));
}

// Makes the buckets of a plan, moves existing gradients into them, and publishes the plan as state.
void Reducer::initialize_buckets(BucketPlan plan) {
  const at::NoGradGuard no_grad;
  const observe::MemoryScope scope(observe::MemoryCategory::gradients);
  const bool same_buckets = plan.buckets == plan_.buckets;
  std::vector<Bucket> buckets(same_buckets ? 0 : plan.buckets.size());
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (const std::size_t i : plan.buckets[b]) slots_[i].bucket = b;
    if (alone()) continue;  // nothing to send: gradients stay where autograd puts them
    std::int64_t elements = 0;
    const std::vector<std::size_t> members = places_in_bucket(plan.buckets[b], parameters_);
    for (const std::size_t i : members) elements += padded_elements(parameters_[i].tensor);
    // Zeroed once: the padding between gradients is sent, too, and must stay finite. All ranks lay out the same plan.
    buckets[b].flat =
        comm_->symmetric_empty({elements}, parameters_[members.front()].tensor.options().requires_grad(false)).zero_();
    std::int64_t offset = 0;
    for (const std::size_t i : members) {
      const at::Tensor& parameter = parameters_[i].tensor;
      // The parameter's own strides if it is dense: then autograd adds into the view without a copy.
      const bool dense = parameter.is_non_overlapping_and_dense();
      at::Tensor view = dense ? buckets[b].flat.as_strided(parameter.sizes(), parameter.strides(), offset)
                              : buckets[b].flat.narrow(0, offset, parameter.numel()).view(parameter.sizes());
      // The same memory, but not a view for autograd: torch::optim's zero_grad() detaches in place, which views refuse.
      view = view.variable_data();
      at::Tensor& grad = parameter.mutable_grad();
      if (grad.defined() && grad.is_same(slots_[i].view)) {
        view.copy_(grad);
        grad = view;
      }
      set_grad_buffer(parameter, view);  // Phalanx layers add their part there directly
      slots_[i].view = std::move(view);
      offset += padded_elements(parameter);
    }
  }
  if (!same_buckets) buckets_ = std::move(buckets);
  plan_ = std::move(plan);
  adopted_order_ = encode_bucket_plan(plan_, fingerprint_);
  std::memcpy(order_state_.data_ptr<std::int64_t>(), adopted_order_.data(),
              adopted_order_.size() * sizeof(std::int64_t));
}

void Reducer::autograd_hook(std::size_t index) {
  const at::NoGradGuard no_grad;
  if (holds_ > 0) {
    copy_to_bucket_view(index);
    return;
  }
  if (!pass_) prepare_for_backward();
  const bool in_backward = inside_backward();
  if (!pass_->callback_queued && in_backward) queue_final_callback();
  copy_to_bucket_view(index);
  mark_variable_ready(index);
  // Fired manually: there is no end of a backward pass to wait for.
  if (!in_backward && !pass_->callback_queued && ready_ == slots_.size()) finalize_backward(pass_);
}

// A parameter that was frozen or added later has no slot in a bucket: its gradient would stay local to this rank.
void Reducer::require_as_attached() {
  if (const std::string changes = attached_.changes(); !changes.empty()) fail_changed(changes);
}

void Reducer::fail_changed(const std::string& changes) {
  const std::string message = fmt::format(
      "DistributedDataParallel: on rank {} {} since it was attached. Change requires_grad before, alike on all ranks: "
      "destroy the DistributedDataParallel, freeze or unfreeze, and attach a new one, on every rank",
      comm_->rank(), changes);
  abort_with(*comm_, message);
  throw Error(message);
}

void Reducer::prepare_for_backward() {
  require_as_attached();
  const auto* loaded = order_state_.const_data_ptr<std::int64_t>();
  if (!std::equal(adopted_order_.begin(), adopted_order_.end(), loaded)) adopt_loaded_order();
  for (std::size_t b = 0; b < buckets_.size(); ++b) buckets_[b].pending = plan_.buckets[b].size();
  for (auto& slot : slots_) slot.ready = false;
  ready_ = next_ = finished_ = 0;
  ready_order_.clear();
  local_used_map_.clear();
  pass_ = std::make_shared<Pass>();
}

void Reducer::queue_final_callback() {
  at_end_of_backward(
      [self = weak_from_this(), pass = pass_] {
        if (const auto alive = self.lock()) alive->finalize_backward(pass);
      },
      [self = weak_from_this(), pass = pass_] {
        if (const auto alive = self.lock()) alive->abandon(pass);
      });
  pass_->callback_queued = true;
}

void Reducer::copy_to_bucket_view(std::size_t index) {
  at::Tensor& grad = parameters_[index].tensor.mutable_grad();
  Slot& slot = slots_[index];
  if (grad.defined() && grad.is_same(slot.view)) return;  // autograd has added into the bucket
  if (!grad.defined()) {
    throw Error(fmt::format("DistributedDataParallel: grad_ready of '{}' was fired without a gradient",
                            parameters_[index].name));
  }
  if (grad.is_sparse()) {
    throw Error(
        fmt::format("DistributedDataParallel: the gradient of '{}' is sparse; expected a dense one (an "
                    "embedding must be made with sparse(false))",
                    parameters_[index].name));
  }
  if (alone()) {
    count_as(grad, observe::MemoryCategory::gradients);
    return;
  }
  reclaim_grad_buffer(parameters_[index].tensor);
  slot.view.copy_(grad);
  grad = slot.view;
}

void Reducer::mark_variable_ready(std::size_t index) {
  Slot& slot = slots_[index];
  if (slot.ready) {
    throw Error(fmt::format(
        "DistributedDataParallel: '{}' received a second gradient before its backward pass was complete. Either the "
        "graph is run backward inside itself, or the pass before left parameters without a gradient ({})",
        parameters_[index].name, ready_ == slots_.size() ? "none" : names_of_unready()));
  }
  slot.ready = true;
  ++ready_;
  if (!plan_.in_ready_order) ready_order_.push_back(index);
  --buckets_[slot.bucket].pending;
  while (next_ < buckets_.size() && buckets_[next_].pending == 0) all_reduce_bucket(next_++);
  record_finished_buckets(/*all=*/false);
}

void Reducer::all_reduce_bucket(std::size_t bucket) {
  if (alone()) return;
  Bucket& b = buckets_[bucket];
  b.launched = Clock::now();
  b.work = comm_->all_reduce(b.flat, {.op = options_.gradient_reduction, .async = true});
  statistics_.bytes += static_cast<std::int64_t>(b.flat.nbytes());
}

// Buckets complete in order. The clock is read only when this rank checks, so the sum is an upper bound.
void Reducer::record_finished_buckets(bool all) {
  if (alone()) return;
  while (finished_ < next_ && (all || buckets_[finished_].work.is_done())) {
    const auto now = Clock::now();
    statistics_.communication_seconds += seconds(now - std::max(buckets_[finished_].launched, busy_until_));
    busy_until_ = now;
    ++finished_;
  }
}

DdpStatistics Reducer::statistics() {
  if (pass_) record_finished_buckets(/*all=*/false);
  return statistics_;
}

void Reducer::finalize_backward(const std::shared_ptr<Pass>& pass) {
  if (pass_ != pass) return;  // an inner pass's callback after the last gradient has already finished this pass
  pass->callback_queued = false;
  const at::NoGradGuard no_grad;
  try {
    if (ready_ < slots_.size()) {
      if (inside_an_outer_backward() || expects_more()) return;
      if (!options_.find_unused_parameters) fail_unused();
    }
    if (options_.find_unused_parameters) contribute_zeros_for_unused();
    const auto start = Clock::now();
    for (auto& bucket : buckets_) {
      bucket.work.wait();
      bucket.work = Work();
      record_finished_buckets(/*all=*/false);
    }
    record_finished_buckets(/*all=*/true);
    statistics_.exposed_seconds += !alone() ? seconds(Clock::now() - start) : 0;
    if (options_.find_unused_parameters) drop_globally_unused_gradients(local_used_map_);
    ++statistics_.synchronisations;
    if (!plan_.in_ready_order) rebuild_buckets();
  } catch (...) {
    abandon(pass);
    throw;
  }
  pass_.reset();
}

// The pass ended with an exception: this rank will not issue the collectives that its peers wait for.
void Reducer::abandon(const std::shared_ptr<Pass>& pass) noexcept {
  if (pass_ != pass) return;
  pass_.reset();
  for (auto& bucket : buckets_) bucket.work = Work();
  abort_before_averaging(*comm_, "DistributedDataParallel");
}

// For parameters whose gradient is computed later (weight_gradient_queue.h): the last of them finishes the pass.
bool Reducer::expects_more() const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].ready && is_gradient_expected(parameters_[i].tensor)) return true;
  }
  return false;
}

std::string Reducer::names_of_unready() const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].ready) names.push_back(parameters_[i].name);
  }
  return quoted_list(names);
}

void Reducer::fail_unused() {
  const std::string message = fmt::format(
      "DistributedDataParallel: on rank {} the backward pass gave no gradient to {} of {} parameters: {}. Use them in "
      "the loss, freeze them (requires_grad = false) before attaching, or set find_unused_parameters",
      comm_->rank(), slots_.size() - ready_, slots_.size(), names_of_unready());
  // The other ranks may have used them and be waiting: they fail with the same message.
  abort_with(*comm_, message);
  throw Error(message);
}

void Reducer::contribute_zeros_for_unused() {
  local_used_map_.assign(slots_.size(), 1);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].ready) continue;
    if (parameters_[i].tensor.grad().defined()) {
      copy_to_bucket_view(i);  // from an earlier backward pass: already an average, or not yet sent
    } else if (!alone()) {
      local_used_map_[i] = 0;
      reclaim_grad_buffer(parameters_[i].tensor);
      slots_[i].view.zero_();
      parameters_[i].tensor.mutable_grad() = slots_[i].view;
    }
    mark_variable_ready(i);
    if (!plan_.in_ready_order) ready_order_.pop_back();
  }
}

void Reducer::drop_globally_unused_gradients(const std::vector<std::uint8_t>& local_used_map) {
  if (alone()) return;
  const at::Tensor used = at::empty({static_cast<std::int64_t>(local_used_map.size())}, at::kByte);
  std::memcpy(used.data_ptr<std::uint8_t>(), local_used_map.data(), local_used_map.size());
  const at::Tensor on_device = used.to(parameters_.front().tensor.device());
  comm_->all_reduce(on_device, {.op = ReduceOp::max});
  const at::Tensor result = on_device.to(at::kCPU);
  for (std::size_t i = 0; i < local_used_map.size(); ++i) {
    if (result.const_data_ptr<std::uint8_t>()[i] == 0) parameters_[i].tensor.mutable_grad().reset();
  }
}

void Reducer::rebuild_buckets() {
  std::vector<std::size_t> order = ready_order_;
  std::vector<bool> has_place(slots_.size(), false);
  for (const std::size_t i : ready_order_) has_place[i] = true;
  for (std::size_t i = slots_.size(); i-- > 0;) {
    if (!has_place[i]) order.push_back(i);  // unused in this pass
  }
  std::vector<BucketParameter> sizes;
  for (const auto& p : parameters_) sizes.push_back({p.tensor.nbytes(), static_cast<int>(p.tensor.scalar_type())});
  BucketPlan plan = plan_buckets(sizes, order, {options_.first_bucket_bytes, options_.bucket_bytes});
  plan.in_ready_order = true;
  // Ranks may have seen different orders; rank 0's counts.
  auto code = encode_bucket_plan(plan, fingerprint_);
  std::string bytes(reinterpret_cast<const char*>(code.data()), code.size() * sizeof(code[0]));
  bytes = comm_->broadcast_bytes(bytes);
  std::memcpy(code.data(), bytes.data(), bytes.size());
  initialize_buckets(decode_bucket_plan(code, fingerprint_));
  ++statistics_.rebuilds;
}

void Reducer::adopt_loaded_order() {
  const auto* loaded = order_state_.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> code(loaded, loaded + order_state_.numel());
  const std::string mine(reinterpret_cast<const char*>(code.data()), code.size() * sizeof(code[0]));
  for (const std::string& theirs : comm_->all_gather_bytes(mine)) {
    if (theirs != mine) {
      throw CheckpointError("ddp.bucket_order: the ranks loaded different orders; load the same checkpoint everywhere");
    }
  }
  // The parameters may have been converted since.
  std::int64_t fingerprint = fingerprint_;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    if (const std::int64_t other = fingerprint_of(parameters_, type); !code.empty() && other == code[0]) {
      fingerprint = other;
    }
  }
  BucketPlan plan = decode_bucket_plan(code, fingerprint);
  for (const auto& bucket : plan.buckets) {
    for (const std::size_t i : bucket) {
      if (parameters_[i].tensor.scalar_type() != parameters_[bucket.front()].tensor.scalar_type()) {
        throw CheckpointError("ddp.bucket_order: a bucket holds parameters of several dtypes; the list is damaged");
      }
    }
  }
  initialize_buckets(std::move(plan));
  ++statistics_.rebuilds;
}

}  // namespace phalanx
