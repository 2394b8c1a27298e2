#include "phalanx/parallel/expert/expert_parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/parallel/tensor/functional_collectives.h"

namespace phalanx {
namespace {

using Counts = std::vector<std::int64_t>;

/// Where rows are, and where they go.
struct Routes {
  Counts sent, received;  // rows for and from each rank
  Counts of_expert;       // rows for each expert of this rank
  at::Tensor order;       // of the received rows, so that they are sorted by expert and then by rank
  at::Tensor inverse;
};

at::Tensor as_tensor(const Counts& numbers, at::Device device) {
  return at::tensor(numbers, at::TensorOptions(at::kLong)).to(device);
}

/// `counts`: rows of this rank for each expert of the layer.
Counts exchange_counts(const Counts& counts, Communicator& group, at::Device device) {
  const at::Tensor sent = as_tensor(counts, device);
  const at::Tensor received = at::empty_like(sent);
  group.all_to_all(received, sent);
  const at::Tensor here = received.to(at::kCPU);
  const auto* const first = here.const_data_ptr<std::int64_t>();
  return {first, first + here.numel()};
}

Routes find_routes(const Counts& counts, Communicator& group, at::Device device) {
  const auto ranks = static_cast<std::size_t>(group.size());
  const std::size_t experts = counts.size() / ranks;  // of each rank
  const Counts from = exchange_counts(counts, group, device);
  Routes routes{.sent = Counts(ranks), .received = Counts(ranks), .of_expert = Counts(experts)};
  Counts begins;  // of the rows of each rank and expert
  std::int64_t rows = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t expert = 0; expert < experts; ++expert) {
      const std::int64_t count = from[rank * experts + expert];
      begins.push_back(rows);
      rows += count;
      routes.sent[rank] += counts[rank * experts + expert];
      routes.received[rank] += count;
      routes.of_expert[expert] += count;
    }
  }
  Counts order, inverse(static_cast<std::size_t>(rows));
  for (std::size_t expert = 0; expert < experts; ++expert) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const std::size_t at = rank * experts + expert;
      for (std::int64_t row = begins[at]; row < begins[at] + from[at]; ++row) {
        inverse[static_cast<std::size_t>(row)] = static_cast<std::int64_t>(order.size());
        order.push_back(row);
      }
    }
  }
  routes.order = as_tensor(order, device);
  routes.inverse = as_tensor(inverse, device);
  return routes;
}

}  // namespace

void distribute_experts(nn::MixtureOfExperts& mixture, const std::shared_ptr<Communicator>& group) {
  const std::int64_t experts = mixture.options().experts, ranks = group->size();
  if (experts % ranks != 0) {
    throw ConfigError(fmt::format(
        "expert parallelism: {} experts cannot be divided among {} ranks: expected a number of ranks that divides them",
        experts, ranks));
  }
  const auto parameters = mixture.experts->parameters();
  const bool is_trained = std::ranges::any_of(parameters, [](const at::Tensor& p) { return p.requires_grad(); });
  mixture.experts->keep(group->rank() * (experts / ranks), experts / ranks);
  mixture.set_exchange([group, is_trained, nets = mixture.experts](const at::Tensor& rows, const Counts& counts) {
    const Routes routes = find_routes(counts, *group, rows.device());
    const at::Tensor here = all_to_all_rows(rows, routes.sent, routes.received, group);
    at::Tensor made = nn::call(nets, here.index_select(0, routes.order), routes.of_expert);
    // Where other ranks train their experts, gradients come back to this one, too.
    if (is_trained && at::GradMode::is_enabled() && !made.requires_grad()) made = made.detach().requires_grad_();
    return all_to_all_rows(made.index_select(0, routes.inverse), routes.received, routes.sent, group);
  });
}

}  // namespace phalanx
