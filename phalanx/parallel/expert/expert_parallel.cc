#include "phalanx/parallel/expert/expert_parallel.h"

#include <ATen/ops/cat.h>
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
  Counts arrived;         // rows of each rank for each expert of this rank: [rank, expert]
};

/// `counts`: rows of this rank for each expert of the layer.
Counts exchange_counts(const Counts& counts, Communicator& group, at::Device device) {
  const at::Tensor sent = at::tensor(counts, at::TensorOptions(at::kLong)).to(device);
  const at::Tensor received = at::empty_like(sent);
  group.all_to_all(received, sent);
  const at::Tensor here = received.to(at::kCPU);
  const auto* const first = here.const_data_ptr<std::int64_t>();
  return {first, first + here.numel()};
}

Routes find_routes(const Counts& counts, Communicator& group, at::Device device) {
  const auto ranks = static_cast<std::size_t>(group.size());
  const std::size_t experts = counts.size() / ranks;  // of each rank
  Routes routes{.sent = Counts(ranks),
                .received = Counts(ranks),
                .of_expert = Counts(experts),
                .arrived = exchange_counts(counts, group, device)};
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t expert = 0; expert < experts; ++expert) {
      const std::int64_t count = routes.arrived[rank * experts + expert];
      routes.sent[rank] += counts[rank * experts + expert];
      routes.received[rank] += count;
      routes.of_expert[expert] += count;
    }
  }
  return routes;
}

/// Of rows in groups [outer, inner] of these sizes: the groups in the order [inner, outer], and their sizes.
std::pair<at::Tensor, Counts> transposed(const at::Tensor& rows, const Counts& sizes, std::size_t inner) {
  const std::vector<at::Tensor> groups = rows.split_with_sizes(sizes);
  std::vector<at::Tensor> moved;
  Counts moved_sizes;
  for (std::size_t i = 0; i < inner; ++i) {
    for (std::size_t at = i; at < sizes.size(); at += inner) {
      moved.push_back(groups[at]);
      moved_sizes.push_back(sizes[at]);
    }
  }
  return {at::cat(moved), std::move(moved_sizes)};
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
  // What a step leaves behind is let go before the next one: it is as large as all rows.
  mixture.set_exchange([group, is_trained, nets = mixture.experts](const at::Tensor& rows, const Counts& counts) {
    const Routes routes = find_routes(counts, *group, rows.device());
    at::Tensor here = all_to_all_rows(rows, routes.sent, routes.received, group);
    const std::size_t experts_here = routes.of_expert.size(), ranks = routes.sent.size();
    const auto [by_expert, sizes] = transposed(std::exchange(here, {}), routes.arrived, experts_here);
    at::Tensor made = nn::call(nets, by_expert, routes.of_expert);
    // Where other ranks train their experts, gradients come back to this one, too.
    if (is_trained && at::GradMode::is_enabled() && !made.requires_grad()) made = made.detach().requires_grad_();
    const at::Tensor by_rank = transposed(std::exchange(made, {}), sizes, ranks).first;
    return all_to_all_rows(by_rank, routes.received, routes.sent, group);
  });
}

}  // namespace phalanx
