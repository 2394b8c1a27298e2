#include "phalanx/verify/routing_replay.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "phalanx/base/assert.h"
#include "phalanx/models/expert_bias.h"
#include "phalanx/parallel/context/packed_positions.h"

namespace phalanx::verify {
namespace {

using nlohmann::json;

constexpr std::int64_t kPadding = -1;  // the experts of positions behind the end of a sequence

/// The positions of `cut` of whole rows [rows, seq_len, n], with these documents; `fill` behind their end.
at::Tensor positions_of(const at::Tensor& whole, const ContextCut& cut, const DocumentBoundaries* documents,
                        double fill) {
  if (cut.ranks == 1) return whole;
  const std::int64_t seq_len = whole.size(1);
  const at::Tensor padded = at::constant_pad_nd(whole, {0, 0, 0, cut.padded(seq_len) - seq_len}, fill);
  if (cut.by_work && documents != nullptr) {
    return PackedPositions(cut, *documents->padded(cut.padded(seq_len))).own(padded);
  }
  const auto [head, tail] = cut.ranges(seq_len);
  return at::cat({padded.narrow(1, head.first, head.count), padded.narrow(1, tail.first, tail.count)}, 1);
}

/// For each token, whether its experts are others, in whatever order.
at::Tensor are_others(const at::Tensor& a, const at::Tensor& b) {
  return std::get<0>(a.sort(-1)).ne(std::get<0>(b.sort(-1))).any(-1);
}

/// Whether both have the same numbers, those that are none (NaN) in the same places.
bool are_same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::allclose(a, b, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true);
}

}  // namespace

double RoutingDifference::relative() const {
  if (!std::isfinite(squares)) return std::numeric_limits<double>::infinity();
  return squares == 0 ? 0.0 : std::sqrt(squares / std::max(reference_squares, 1e-30));
}

struct RoutingReplay::Layer {
  /// What a block that will be computed again has used.
  struct Pass {
    at::Tensor logits, experts;
  };

  std::int64_t number = 0;
  std::vector<nn::MixtureOfExperts*> mixtures;
  std::int64_t next_row = 0;                // of this rank's
  std::vector<Pass> to_compute_again;       // oldest first
  std::vector<at::Tensor> logits, experts;  // recorded, pass by pass
  RoutingDifference difference;
};

RoutingReplay::RoutingReplay(std::span<nn::Module* const> modules, std::int64_t first_row, const ContextCut& cut)
    : first_row_(first_row), cut_(cut) {
  for (nn::Module* const module : modules) {
    auto* const model = dynamic_cast<models::Llama*>(module);
    PHALANX_ASSERT(model != nullptr, "a model or a part of one");
    for (const models::MixtureOfLayer& one : models::mixtures_of(*model)) {
      auto found = std::ranges::find_if(layers_, [&](const auto& layer) { return layer->number == one.layer; });
      if (found == layers_.end()) {
        layers_.push_back(std::make_unique<Layer>());
        found = layers_.end() - 1;
        (*found)->number = one.layer;
      }
      (*found)->mixtures.push_back(one.mixture);
      one.mixture->set_choose(
          [this, layer = found->get()](const nn::RouterChoice& choice) { return choose(*layer, choice); });
    }
  }
}

RoutingReplay::~RoutingReplay() {
  for (const auto& layer : layers_) {
    for (nn::MixtureOfExperts* const mixture : layer->mixtures) mixture->set_choose(nullptr);
  }
}

void RoutingReplay::record() {
  records_ = true;
  table_ = nullptr;
}

void RoutingReplay::replay(std::shared_ptr<const RoutingTable> table) {
  records_ = false;
  table_ = std::move(table);
}

void RoutingReplay::begin_step(std::shared_ptr<const DocumentBoundaries> documents) {
  documents_ = std::move(documents);
  is_active_ = records_ || table_ != nullptr;
  for (const auto& layer : layers_) {
    layer->next_row = 0;
    layer->to_compute_again.clear();
    layer->difference = {};
    if (!records_) continue;
    layer->logits.clear();
    layer->experts.clear();
  }
}

void RoutingReplay::end_step() { is_active_ = false; }

at::Tensor RoutingReplay::choose(Layer& layer, const nn::RouterChoice& choice) {
  if (!is_active_) return choice.experts;
  PHALANX_ASSERT(choice.shape.size() == 3, "rows of tokens");
  const bool is_trained = at::GradMode::is_enabled();
  const at::NoGradGuard no_grad;
  auto& waiting = layer.to_compute_again;
  // Computing again gives the same bits. A block that is not computed again has nothing waiting.
  if (is_trained) {
    const auto again =
        std::ranges::find_if(waiting, [&](const Layer::Pass& pass) { return are_same(pass.logits, choice.logits); });
    if (again != waiting.end()) {
      at::Tensor experts = std::move(again->experts);
      waiting.erase(again);
      return experts;
    }
  }
  at::Tensor experts = choice.experts;
  if (records_) {
    const auto on_host = [&](const at::Tensor& of_tokens, at::ScalarType type) {
      return of_tokens.to(at::kCPU, type).view({choice.shape[0], choice.shape[1], -1}).clone();
    };
    layer.logits.push_back(on_host(choice.logits, at::kFloat));
    layer.experts.push_back(on_host(choice.experts, at::kLong));
  } else {
    experts = replayed(layer, choice);
  }
  if (!is_trained) waiting.push_back({choice.logits.clone(), experts});
  return experts;
}

at::Tensor RoutingReplay::replayed(Layer& layer, const nn::RouterChoice& choice) {
  const RoutingOfLayer& whole = table_->at(layer.number);
  const std::int64_t rows = choice.shape[0];
  const auto documents = documents_ ? documents_->narrow(layer.next_row, rows) : nullptr;
  const auto part_of = [&](const at::Tensor& tensor, double fill) {
    const at::Tensor part =
        positions_of(tensor.narrow(0, first_row_ + layer.next_row, rows), cut_, documents.get(), fill);
    PHALANX_ASSERT(part.size(1) == choice.shape[1], "this rank's positions");
    return part.flatten(0, 1).to(choice.experts.device());
  };
  const at::Tensor experts = part_of(whole.experts, static_cast<double>(kPadding));
  const at::Tensor expected = part_of(whole.logits, 0);
  layer.next_row += rows;

  const at::Tensor is_token = experts.ge(0).all(-1);
  at::Tensor used = at::where(is_token.unsqueeze(-1), experts, choice.experts);
  const nn::RoutingOptions routing = layer.mixtures.front()->options().routing();
  const at::Tensor from_expected = nn::chosen_experts(nn::routing_scores(expected, routing.form), choice.bias, routing);
  const at::Tensor off = (choice.logits.to(at::kFloat) - expected).masked_fill(is_token.logical_not().unsqueeze(-1), 0);
  const auto number_of = [&](const at::Tensor& tokens) {
    return tokens.logical_and(is_token).sum().item<std::int64_t>();
  };
  RoutingDifference& difference = layer.difference;
  difference.squares += off.to(at::kDouble).square().sum().item<double>();
  difference.reference_squares += expected.to(at::kDouble).square().sum().item<double>();
  difference.tokens += is_token.sum().item<std::int64_t>();
  difference.elsewhere += number_of(are_others(choice.experts, used));
  difference.wrong += number_of(are_others(from_expected, used));
  return used;
}

RoutingTable RoutingReplay::recorded() const {
  RoutingTable table;
  for (const auto& layer : layers_) table[layer->number] = {at::cat(layer->logits), at::cat(layer->experts)};
  return table;
}

std::map<std::int64_t, RoutingDifference> RoutingReplay::differences() const {
  std::map<std::int64_t, RoutingDifference> result;
  for (const auto& layer : layers_) result[layer->number] = layer->difference;
  return result;
}

std::shared_ptr<const RoutingTable> share_routing(const RoutingReplay* recorder, Communicator& world) {
  auto table = std::make_shared<RoutingTable>(recorder ? recorder->recorded() : RoutingTable());
  json shapes = json::array();
  for (const auto& [layer, routing] : *table) {
    shapes.push_back({{"layer", layer}, {"logits", routing.logits.sizes()}, {"experts", routing.experts.sizes()}});
  }
  shapes = json::parse(world.broadcast_bytes(shapes.dump()));
  for (const json& of_layer : shapes) {
    RoutingOfLayer& routing = (*table)[of_layer["layer"].get<std::int64_t>()];
    const auto receive = [&](at::Tensor& tensor, const char* name, at::ScalarType type) {
      if (!tensor.defined()) {
        tensor = at::empty(of_layer[name].get<std::vector<std::int64_t>>(), at::TensorOptions(at::kCPU).dtype(type));
      }
      world.broadcast(tensor).wait();
    };
    receive(routing.logits, "logits", at::kFloat);
    receive(routing.experts, "experts", at::kLong);
  }
  return table;
}

}  // namespace phalanx::verify
