#include "phalanx/nn/mixture_of_experts.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>
#include <c10/core/InferenceMode.h>

#include <numeric>
#include <string>

#include "phalanx/base/assert.h"

namespace phalanx::nn {
namespace {

/// How often each of the numbers below `count` is in a sorted list. On a device this is the one wait of the layer.
std::vector<std::int64_t> count_each(const at::Tensor& sorted, std::int64_t count) {
  const at::Tensor numbers = at::arange(count, sorted.options());
  const at::Tensor ends = at::searchsorted(sorted, numbers, /*out_int32=*/false, /*right=*/true).to(at::kCPU);
  const auto* const end = ends.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> counts(end, end + count);
  std::adjacent_difference(counts.begin(), counts.end(), counts.begin());
  return counts;
}

}  // namespace

Experts::Experts(const MixtureOptions& options, TensorOptionsOfModule tensor) : Module("Experts") {
  for (std::int64_t e = 0; e < options.experts; ++e) {
    nets_[e] = register_module(std::to_string(e), std::make_shared<FeedForward>(options.dim, options.hidden, tensor));
  }
}

at::Tensor Experts::forward(const at::Tensor& rows, const std::vector<std::int64_t>& counts) {
  PHALANX_ASSERT(counts.size() == nets_.size(), "a number of rows for each expert");
  std::vector<at::Tensor> made;
  std::int64_t first = 0;
  std::size_t place = 0;
  for (const auto& [number, net] : nets_) {
    const std::int64_t count = counts[place++];
    if (count == 0 && c10::InferenceMode::is_enabled()) continue;
    made.push_back(call(net, rows.narrow(0, first, count)));
    first += count;
  }
  return made.empty() ? rows : at::cat(made);
}

void Experts::keep(std::int64_t first, std::int64_t count) {
  std::erase_if(nets_, [&](const auto& one) {
    const bool goes = one.first < first || one.first >= first + count;
    if (goes) unregister_module(std::to_string(one.first));
    return goes;
  });
}

MixtureOfExperts::MixtureOfExperts(const MixtureOptions& options, TensorOptionsOfModule tensor)
    : Positionwise("MixtureOfExperts"), options_(options) {
  gate = register_module("gate", std::make_shared<Linear>(LinearOptions{options.dim, options.experts}, tensor));
  experts = register_module("experts", std::make_shared<Experts>(options, tensor));
}

at::Tensor MixtureOfExperts::forward(const at::Tensor& x) {
  const std::int64_t k = options_.experts_per_token, dim = x.size(-1);
  const at::Tensor rows = x.reshape({-1, dim});
  const std::int64_t tokens = rows.size(0);
  const at::Tensor probabilities = at::softmax(call(gate, rows), -1, at::kFloat);
  const auto [largest, chosen] = at::topk(probabilities, k);  // [tokens, k]
  const at::Tensor weights = largest / largest.sum(-1, /*keepdim=*/true);
  // A token's copies, sorted by expert: within an expert in the order of tokens.
  const at::Tensor expert_of = chosen.reshape({-1});
  const auto [sorted_experts, order] = at::sort(expert_of, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const std::vector<std::int64_t> counts = count_each(sorted_experts, options_.experts);
  // Each copy is moved once, so that gradients are added in the same order in every run.
  const at::Tensor copies = rows.unsqueeze(1).expand({tokens, k, dim}).reshape({tokens * k, dim});
  const at::Tensor sorted = copies.index_select(0, order);
  const at::Tensor made = exchange_ ? exchange_(sorted, counts) : call(experts, sorted, counts);
  const at::Tensor returned = made.index_select(0, at::argsort(order)).view({tokens, k, dim});
  // Under autocast rows may be narrower than what this sum is added to.
  const bool is_autocast = at::autocast::is_autocast_enabled(rows.device().type());
  const at::Tensor y = (returned * weights.unsqueeze(-1)).sum(1);
  return y.to(is_autocast ? weights.scalar_type() : rows.scalar_type()).view(x.sizes());
}

std::vector<Linear*> MixtureOfExperts::last_projections() const {
  std::vector<Linear*> result;
  for (const auto& [number, net] : experts->nets()) result.push_back(net->w2.get());
  return result;
}

}  // namespace phalanx::nn
