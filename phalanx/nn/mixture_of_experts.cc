#include "phalanx/nn/mixture_of_experts.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"
#include "phalanx/nn/expert_counts.h"
#include "phalanx/tensor/grad_ready.h"

namespace phalanx::nn {
namespace {

/// On a device the host waits for it.
std::vector<std::int64_t> on_host(const at::Tensor& counts) {
  const at::Tensor here = counts.to(at::kCPU);
  const auto* const first = here.const_data_ptr<std::int64_t>();
  return {first, first + here.numel()};
}

/// Throws unless x is [sequences, positions, dim].
void require_sequences(const at::Tensor& x, const char* what) {
  if (x.dim() == 3) return;
  throw Error(fmt::format("MixtureOfExperts: {}: expected an input [sequences, tokens, dim], found {} dimensions", what,
                          x.dim()));
}

}  // namespace

Experts::Experts(const MixtureOptions& options, TensorOptionsOfModule tensor) : Module("Experts") {
  for (std::int64_t e = 0; e < options.experts; ++e) {
    nets_[e] = register_module(std::to_string(e),
                               std::make_shared<FeedForward>(options.dim, options.hidden, tensor, options.net));
  }
  share_storage();
}

kernels::ExpertWeights Experts::weights() const {
  kernels::ExpertWeights all;
  for (const auto& [number, net] : nets_) {
    all.w1.push_back(net->w1->weight);
    all.w2.push_back(net->w2->weight);
    all.w3.push_back(net->w3->weight);
  }
  return all;
}

std::vector<std::vector<at::Tensor>> Experts::one_products() const {
  if (nets_.empty() || nets_.begin()->second->w1->weight.device().is_cpu()) return {};
  const kernels::ExpertWeights all = weights();
  return {all.gates_and_ups(), all.w2};
}

bool Experts::can_be_grouped(const at::Tensor& rows) const {
  const bool are_plain = std::ranges::all_of(nets_, [](const auto& one) { return one.second->is_plain_swiglu(); });
  return are_plain && kernels::can_group_experts(rows, weights());
}

at::Tensor Experts::forward(const at::Tensor& rows, const at::Tensor& ends, bool covers_all) {
  return kernels::grouped_feed_forward(rows, ends, weights(), covers_all);
}

at::Tensor Experts::forward(const at::Tensor& rows, const std::vector<std::int64_t>& counts) {
  PHALANX_ASSERT(counts.size() == nets_.size(), "a number of rows for each expert");
  if (can_be_grouped(rows)) {
    const at::Tensor ends = at::empty({std::ssize(counts)}, at::TensorOptions(at::kInt).pinned_memory(true));
    std::partial_sum(counts.begin(), counts.end(), ends.mutable_data_ptr<std::int32_t>());
    return forward(rows, ends.to(rows.device(), /*non_blocking=*/true), /*covers_all=*/true);
  }
  std::vector<at::Tensor> made;
  const std::vector<at::Tensor> parts = rows.split_with_sizes(counts);
  std::size_t place = 0;
  for (const auto& [number, net] : nets_) {
    const at::Tensor& part = parts[place++];
    // Without any row, the results still have the type that the experts make.
    if (part.size(0) == 0 && rows.size(0) > 0 && c10::InferenceMode::is_enabled()) continue;
    made.push_back(call(net, part));
  }
  return at::cat(made);
}

void Experts::keep(std::int64_t first, std::int64_t count) {
  std::erase_if(nets_, [&](const auto& one) {
    const bool goes = one.first < first || one.first >= first + count;
    if (goes) unregister_module(std::to_string(one.first));
    return goes;
  });
  const kernels::ExpertWeights all = weights();
  if (all.w1.empty() || all.w1[0].device().is_cpu() || !has_memory(all.w1[0])) return;
  // Out of the storage that the others share.
  for (const auto* set : {&all.w1, &all.w2, &all.w3}) {
    for (const at::Tensor& weight : *set) weight.set_data(weight.detach().clone());
  }
  share_storage();
}

MixtureOfExperts::MixtureOfExperts(const MixtureOptions& options, TensorOptionsOfModule tensor)
    : Positionwise("MixtureOfExperts"), options_(options) {
  gate = register_module("gate", std::make_shared<Linear>(LinearOptions{.in_features = options.dim,
                                                                        .out_features = options.experts,
                                                                        .bias = options.gate_bias,
                                                                        .in_float32 = options.float32_router},
                                                          tensor));
  experts = register_module("experts", std::make_shared<Experts>(options, tensor));
  if (options.shared_hidden == 0) return;
  shared_experts =
      register_module("shared_experts", std::make_shared<FeedForward>(options.dim, options.shared_hidden, tensor));
}

at::Tensor MixtureOfExperts::forward(const at::Tensor& x) {
  const std::int64_t k = options_.experts_per_token, dim = x.size(-1);
  const at::Tensor rows = x.reshape({-1, dim});
  const std::int64_t tokens = rows.size(0);
  at::Tensor seen = rows;  // by the router
  if (jitter_.eps != 0 && is_training()) {
    require_sequences(x, "jitter");
    seen = with_jitter(x, jitter_).reshape({-1, dim});
    if (!options_.float32_router) seen = seen.to(rows.scalar_type());
  }
  at::Tensor logits = call(gate, seen);
  // A block that will be computed again records no gradients the first time.
  const bool is_trained = is_training() && at::GradMode::is_enabled();
  if (losses_.z_weight != 0 && is_trained && logits.requires_grad()) logits = with_z_loss(logits, losses_);
  const RoutingOptions routing = options_.routing();
  at::Tensor scores = routing_scores(logits, routing.form);
  at::Tensor chosen = chosen_experts(scores, tensors_.bias, routing);  // [tokens, k]
  if (choose_) {
    chosen = choose_({.shape = x.sizes(), .logits = logits.detach(), .bias = tensors_.bias, .experts = chosen});
  }
  if (losses_.load_weight != 0 && is_trained && scores.requires_grad()) {
    require_sequences(x, "load balancing");
    scores = with_load_loss(scores, chosen, x.size(0), routing.form, losses_);
  }
  if (tensors_.counts.defined() && is_trained) {
    tensors_.counts.add_(count_choices(chosen.reshape({1, -1}), options_.experts).flatten());
  }
  const at::Tensor weights = routing_weights(scores, chosen, routing);
  at::Tensor expert_of = chosen.reshape({-1});
  if (capacity_.factor != 0 && is_training()) {
    require_sequences(x, "a capacity");
    const at::Tensor dropped = within_capacity(chosen, x.size(0), options_.experts, capacity_).logical_not().flatten();
    if (tensors_.dropped.defined() && is_trained) tensors_.dropped.add_(dropped.sum());
    // Behind all experts, so that they come last when sorted.
    expert_of = expert_of.masked_fill(dropped, options_.experts);
  }
  // A token's copies, sorted by expert: within an expert in the order of tokens.
  const auto [sorted_experts, order] = at::sort(expert_of, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  // Each copy is moved once, so that gradients are added in the same order in every run.
  at::Tensor copies = rows.unsqueeze(1).expand({tokens, k, dim}).reshape({tokens * k, dim});
  at::Tensor made;
  if (!exchange_ && experts->can_be_grouped(copies)) {
    const bool drops = capacity_.factor != 0 && is_training();
    const at::Tensor sorted = std::exchange(copies, {}).index_select(0, order);
    made = call(experts, sorted, end_of_each(sorted_experts, options_.experts), !drops);
  } else {
    const std::vector<std::int64_t> counts = on_host(count_each(sorted_experts, options_.experts));
    const std::int64_t sent = std::reduce(counts.begin(), counts.end());
    const at::Tensor sorted = std::exchange(copies, {}).index_select(0, order.narrow(0, 0, sent));
    made = exchange_ ? exchange_(sorted, counts) : call(experts, sorted, counts);
    if (sent < tokens * k) made = at::constant_pad_nd(made, {0, 0, 0, tokens * k - sent});
  }
  const at::Tensor returned = std::exchange(made, {}).index_select(0, at::argsort(order)).view({tokens, k, dim});
  // Under autocast rows may be narrower than what this sum is added to.
  const bool is_autocast = at::autocast::is_autocast_enabled(rows.device().type());
  const at::Tensor sum = (returned * weights.unsqueeze(-1)).sum(1);
  const at::Tensor y = sum.to(is_autocast ? weights.scalar_type() : rows.scalar_type()).view(x.sizes());
  return shared_experts ? y + call(shared_experts, x) : y;
}

std::vector<Linear*> MixtureOfExperts::last_projections() const {
  std::vector<Linear*> result;
  for (const auto& [number, net] : experts->nets()) result.push_back(net->w2.get());
  if (shared_experts) result.push_back(shared_experts->w2.get());
  return result;
}

}  // namespace phalanx::nn
