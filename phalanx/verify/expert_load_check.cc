#include "phalanx/verify/expert_load_check.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "phalanx/models/expert_bias.h"
#include "phalanx/verify/tensor_difference.h"

namespace phalanx::verify {
namespace {

using nlohmann::json;

struct LoadOfLayer {
  const std::int64_t* counts;
  const float* biases;
};

json different(const char* what, std::int64_t expert, double found, double expected, const char* cause) {
  const double largest = std::abs(found - expected), relative = largest / std::max(std::abs(expected), 1e-30);
  return {
      {"what", what},
      {"cause", cause},
      {"difference", to_text({.relative = std::isfinite(relative) ? relative : std::numeric_limits<double>::infinity(),
                              .largest = largest,
                              .found = found,
                              .expected = expected,
                              .index = {expert}})}};
}

/// Null: as expected.
json compare_layer(const LoadOfLayer& found, const LoadOfLayer& expected, std::int64_t experts) {
  const std::int64_t all = std::accumulate(expected.counts, expected.counts + experts, std::int64_t{0}),
                     mine = std::accumulate(found.counts, found.counts + experts, std::int64_t{0});
  if (mine != all) {
    return different("load of experts", 0, static_cast<double>(mine), static_cast<double>(all),
                     mine > 0 && all > 0 && mine % all == 0
                         ? "all tokens are counted more than once: where a block is computed again, or by every rank "
                           "that has them"
                         : "the tokens of some ranks or micro-batches are not counted, or more than once");
  }
  for (std::int64_t e = 0; e < experts; ++e) {
    if (found.counts[e] == expected.counts[e]) continue;
    return different("load of experts", e, static_cast<double>(found.counts[e]),
                     static_cast<double>(expected.counts[e]), "all tokens are counted, but some for another expert");
  }
  for (std::int64_t e = 0; e < experts; ++e) {
    if (found.biases[e] == expected.biases[e]) continue;
    return different("bias of experts", e, found.biases[e], expected.biases[e],
                     "tokens are counted as they should be: the bias is stale, moves more than once in a step, or in "
                     "the wrong direction");
  }
  return nullptr;
}

/// The first rank's values of the reference, on every rank.
at::Tensor from_reference(const at::Tensor& like, const at::Tensor& value, Communicator& world) {
  at::Tensor told = at::zeros_like(like);
  if (value.defined()) told.copy_(value);
  world.broadcast(told).wait();
  return told;
}

}  // namespace

std::optional<LayoutFinding> compare_expert_biases(train::ExpertLoad& layout, train::ExpertLoad* reference,
                                                   Communicator& world) {
  if (!layout.biases().defined()) return std::nullopt;
  layout.sum();
  if (reference != nullptr) reference->sum();
  const at::Tensor counts = layout.counts().to(at::kCPU).contiguous(), biases = layout.biases().to(at::kCPU);
  const at::Tensor expected_counts = from_reference(counts, reference ? reference->counts() : at::Tensor(), world),
                   expected_biases = from_reference(biases, reference ? reference->biases() : at::Tensor(), world);
  const std::int64_t experts = counts.size(1);
  json mine;
  for (std::int64_t layer = 0; layer < counts.size(0) && mine.is_null(); ++layer) {
    const auto of = [&](const at::Tensor& all_counts, const at::Tensor& all_biases) {
      return LoadOfLayer{all_counts.const_data_ptr<std::int64_t>() + layer * experts,
                         all_biases.const_data_ptr<float>() + layer * experts};
    };
    mine = compare_layer(of(counts, biases), of(expected_counts, expected_biases), experts);
    if (!mine.is_null()) mine["parameter"] = models::expert_bias_name(layer);
  }
  if (reference != nullptr) at::Tensor(reference->biases()).copy_(layout.biases());
  int rank = 0;
  for (const std::string& text : world.all_gather_bytes(mine.dump())) {
    const json told = json::parse(text);
    if (!told.is_null()) {
      return LayoutFinding{.what = told["what"],
                           .parameter = told["parameter"],
                           .rank = rank,
                           .difference = difference_from_text(told["difference"].get<std::string>()),
                           .cause = told["cause"]};
    }
    ++rank;
  }
  return std::nullopt;
}

}  // namespace phalanx::verify
