#include "phalanx/optim/optimizer_set.h"

#include <algorithm>
#include <utility>

namespace phalanx {
namespace {

std::vector<NamedTensor> parameters_of(const std::vector<std::unique_ptr<Optimizer>>& members) {
  std::vector<NamedTensor> all;
  for (const auto& member : members) all.insert(all.end(), member->parameters().begin(), member->parameters().end());
  return all;
}

}  // namespace

OptimizerSet::OptimizerSet(std::vector<std::unique_ptr<Optimizer>> members)
    : Optimizer(parameters_of(members), {.master_weights = false}), members_(std::move(members)) {}

void OptimizerSet::step(double lr, StepOptions options) {
  for (const auto& member : members_) member->step(lr, options);
}

bool OptimizerSet::scales_gradients_itself() const {
  return std::ranges::all_of(members_, [](const auto& member) { return member->scales_gradients_itself(); });
}

void OptimizerSet::collect_state(TrainState& state) const {
  for (const auto& member : members_) member->collect_state(state);
}

}  // namespace phalanx
