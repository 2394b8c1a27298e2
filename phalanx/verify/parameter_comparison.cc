#include "phalanx/verify/parameter_comparison.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/verify/layout_cause.h"
#include "phalanx/verify/layout_side.h"

namespace phalanx::verify {
namespace {

using nlohmann::json;

const at::TensorOptions kHostFloat(at::kFloat);

at::Tensor or_zeros(const at::Tensor& value, at::IntArrayRef shape) {
  return value.defined() ? value : at::zeros(shape, kHostFloat);
}

std::vector<std::int64_t> offset_of(const NamedTensor& part) {
  return part.shard ? part.shard->box().offsets : std::vector<std::int64_t>();
}

}  // namespace

ParameterComparison::ParameterComparison(LayoutSide& parallelized, LayoutSide* reference, Communicator& world,
                                         std::function<void(const std::string&)> not_finite)
    : parallelized_(parallelized), reference_(reference), world_(world), not_finite_(std::move(not_finite)) {
  share_names();
  find_own_parts();
}

void ParameterComparison::share_names() {
  json told = json::array();
  if (reference_ != nullptr) {
    for (const auto& [name, tensor, shard] : reference_->model->parameters()) {
      told.push_back({{"name", name}, {"shape", tensor.sizes().vec()}});
    }
  }
  told = json::parse(world_.broadcast_bytes(told.dump()));
  for (const json& one : told) {
    names_.push_back(one["name"].get<std::string>());
    shapes_.push_back(one["shape"].get<std::vector<std::int64_t>>());
  }
  mine_.resize(names_.size());
  for (const NamedTensor& mine : parallelized_.model->parameters()) {
    const auto place = std::ranges::find(names_, mine.name);
    if (place == names_.end()) {
      throw Error(
          fmt::format("verify: the layout has a parameter '{}' that the model on one rank does not have", mine.name));
    }
    mine_[static_cast<std::size_t>(place - names_.begin())] = mine;
  }
}

/// Each element of each parameter belongs to one rank: the first one that has it.
void ParameterComparison::find_own_parts() {
  json parts = json::array();
  for (const NamedTensor& part : mine_) {
    parts.push_back(part.name.empty() ? "" : part.shard ? part.shard->box().text() : "whole");
  }
  std::set<std::pair<std::size_t, std::string>> taken;
  int rank = 0;
  for (const std::string& text : world_.all_gather_bytes(parts.dump())) {
    const json theirs = json::parse(text);
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      const auto part = theirs[i].get<std::string>();
      if (!part.empty() && taken.emplace(i, part).second && rank == world_.rank()) own_.insert(i);
    }
    ++rank;
  }
}

const NamedTensor* ParameterComparison::here(std::size_t index) const {
  return mine_[index].name.empty() ? nullptr : &mine_[index];
}

at::Tensor ParameterComparison::send(std::size_t index, const ValueOf& value) const {
  at::Tensor whole;
  if (reference_ != nullptr) whole = value(reference_->model->parameters()[index]);
  if (world_.broadcast_bytes(whole.defined() ? "1" : "") != "1") return {};
  at::Tensor sent =
      reference_ != nullptr ? whole.detach().to(at::kCPU, at::kFloat).clone() : at::empty(shapes_[index], kHostFloat);
  world_.broadcast(sent).wait();
  return sent;
}

std::vector<ParameterCheck> ParameterComparison::compare(const ValueOf& value, const Explain& explain,
                                                         double least_norm) const {
  std::vector<std::string> mine(names_.size());
  for (std::size_t i = 0; i < names_.size(); ++i) {
    const at::Tensor expected = or_zeros(send(i, value), shapes_[i]);
    const double norm = std::max(expected.to(at::kDouble).norm().item<double>(), least_norm);
    if (!std::isfinite(norm)) not_finite_(names_[i]);
    const NamedTensor* const part = here(i);
    if (part == nullptr || part->tensor.numel() == 0) continue;  // of another stage, or no row
    const at::Tensor found = or_zeros(value(*part), part->tensor.sizes());
    const at::Tensor should = part_of(expected, part->shard.get());
    TensorDifference difference = difference_of(found, should, norm, offset_of(*part));
    if (explain && norm > 0) difference.explained = explain(i, norm);
    mine[i] = to_text(difference);
  }
  return worst_of_ranks(mine);
}

std::vector<ParameterCheck> ParameterComparison::compare_same_parts(const std::vector<NamedTensor>& others,
                                                                    const ValueOf& value) const {
  std::vector<std::string> mine(names_.size());
  for (const NamedTensor& other : others) {
    const auto i = static_cast<std::size_t>(std::ranges::find(names_, other.name) - names_.begin());
    const NamedTensor& part = mine_.at(i);
    if (part.tensor.numel() == 0) continue;
    const at::Tensor expected = or_zeros(value(other), part.tensor.sizes()).to(at::kCPU, at::kDouble);
    mine[i] = to_text(difference_of(or_zeros(value(part), part.tensor.sizes()), expected,
                                    expected.norm().item<double>(), offset_of(part)));
  }
  return worst_of_ranks(mine);
}

std::vector<ParameterCheck> ParameterComparison::worst_of_ranks(const std::vector<std::string>& mine) const {
  std::vector<ParameterCheck> worst;
  std::vector<bool> seen(names_.size());
  for (const std::string& name : names_) worst.push_back({.name = name});
  int rank = 0;
  for (const std::string& text : world_.all_gather_bytes(json(mine).dump())) {
    const json list = json::parse(text);
    for (std::size_t i = 0; i < names_.size(); ++i) {
      const auto one = list[i].get<std::string>();
      if (one.empty()) continue;
      const TensorDifference difference = difference_from_text(one);
      if (!seen[i] || difference.unexplained() > worst[i].difference.unexplained()) {
        worst[i].rank = rank;
        worst[i].difference = difference;
      }
      seen[i] = true;
    }
    ++rank;
  }
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (!seen[i]) throw Error(fmt::format("verify: no rank of the layout has the parameter '{}'", names_[i]));
  }
  return worst;
}

at::Tensor ParameterComparison::whole_of_layout(std::size_t index, const ValueOf& value) const {
  at::Tensor whole = at::zeros(shapes_[index], kHostFloat);
  if (own_.contains(index)) {
    const at::Tensor mine = value(mine_[index]);
    if (mine.defined()) part_of(whole, mine_[index].shard.get()).copy_(mine);
  }
  world_.all_reduce(whole);  // zeros, but for one rank's
  return whole;
}

void ParameterComparison::take_weights_of_layout() const {
  for (std::size_t i = 0; i < names_.size(); ++i) {
    const at::Tensor whole = whole_of_layout(i, [](const NamedTensor& p) { return p.tensor; });
    if (reference_ != nullptr) reference_->model->parameters()[i].tensor.copy_(whole);
  }
}

void ParameterComparison::take_gradients_of_layout() const {
  for (std::size_t i = 0; i < names_.size(); ++i) {
    const at::Tensor whole = whole_of_layout(i, [](const NamedTensor& p) { return p.tensor.grad(); });
    if (reference_ == nullptr) continue;
    const at::Tensor& gradient = reference_->model->parameters()[i].tensor.grad();
    if (gradient.defined()) gradient.copy_(whole);
  }
}

}  // namespace phalanx::verify
