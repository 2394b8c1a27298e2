#include "phalanx/nn/mixture_of_experts.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <string>

namespace phalanx::nn {
namespace {

/// A list of nets, named by their numbers.
class Experts : public Module {
 public:
  Experts() : Module("Experts") {}
  std::shared_ptr<FeedForward> add(std::int64_t number, const std::shared_ptr<FeedForward>& expert) {
    return register_module(std::to_string(number), expert);
  }
};

}  // namespace

MixtureOfExperts::MixtureOfExperts(const MixtureOptions& options, TensorOptionsOfModule tensor)
    : Positionwise("MixtureOfExperts"), options_(options) {
  gate = register_module("gate", std::make_shared<Linear>(LinearOptions{options.dim, options.experts}, tensor));
  const auto list = register_module("experts", std::make_shared<Experts>());
  for (std::int64_t e = 0; e < options.experts; ++e) {
    experts.push_back(list->add(e, std::make_shared<FeedForward>(options.dim, options.hidden, tensor)));
  }
}

at::Tensor MixtureOfExperts::forward(const at::Tensor& x) {
  const at::Tensor rows = x.reshape({-1, x.size(-1)});  // [tokens, dim]
  const at::Tensor probabilities = at::softmax(call(gate, rows), -1, at::kFloat);
  const auto [largest, chosen] = at::topk(probabilities, options_.experts_per_token);  // [tokens, k]
  const at::Tensor weights = largest / largest.sum(-1, /*keepdim=*/true);
  // Under autocast rows may be narrower than what this sum is added to.
  const bool is_autocast = at::autocast::is_autocast_enabled(rows.device().type());
  at::Tensor y = at::zeros_like(rows, is_autocast ? weights.scalar_type() : rows.scalar_type());
  for (std::int64_t e = 0; e < options_.experts; ++e) {
    const auto found = at::where(chosen == e);
    const at::Tensor &token = found[0], &place = found[1];  // in token order
    if (token.numel() == 0 && c10::InferenceMode::is_enabled()) continue;
    const at::Tensor made = call(experts[static_cast<std::size_t>(e)], rows.index_select(0, token));
    y.index_add_(0, token, (made * weights.index({token, place}).unsqueeze(-1)).to(y.scalar_type()));
  }
  return y.view(x.sizes());
}

std::vector<Linear*> MixtureOfExperts::last_projections() const {
  std::vector<Linear*> result;
  for (const auto& expert : experts) result.push_back(expert->w2.get());
  return result;
}

}  // namespace phalanx::nn
