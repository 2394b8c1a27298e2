#include "phalanx/parallel/fsdp/find_units.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "phalanx/base/error.h"
#include "phalanx/nn/init.h"

namespace phalanx::fsdp {
namespace {

using Group = std::vector<nn::Module*>;

bool is_number(const std::string& name) {
  return !name.empty() && std::ranges::all_of(name, [](char c) { return c >= '0' && c <= '9'; });
}

// The members of numbered lists, wherever they are: the blocks of a model.
std::vector<Group> blocks_of(const torch::nn::Module& module) {
  std::vector<Group> groups;
  for (const auto& child : module.named_children()) {
    auto* ours = dynamic_cast<nn::Module*>(child.value().get());
    if (ours != nullptr && is_number(child.key())) {
      groups.push_back({ours});
    } else {
      for (auto& group : blocks_of(*child.value())) groups.push_back(std::move(group));
    }
  }
  return groups;
}

}  // namespace

std::vector<UnitPlan> find_units(torch::nn::Module& module) {
  auto* root = dynamic_cast<nn::Module*>(&module);
  std::vector<Group> groups = root != nullptr ? root->shard_units() : std::vector<Group>();
  if (groups.empty() && root != nullptr) groups = blocks_of(module);

  // A parameter that several units use belongs to the root.
  constexpr std::size_t kRoot = static_cast<std::size_t>(-1);
  std::unordered_map<const void*, std::size_t> unit_of;
  std::map<const void*, std::string> names;
  for (const auto& m : module.named_modules("", /*include_self=*/false)) names[m.value().get()] = m.key();
  std::vector<UnitPlan> plans;
  for (const Group& group : groups) {
    UnitPlan plan{.modules = group};
    for (nn::Module* member : group) {
      if (!names.contains(member)) {
        throw Error(fmt::format("fully_shard: shard_units() of {} names a {} that is not a submodule of it",
                                module.name(), member->name()));
      }
      plan.name += (plan.name.empty() ? "" : ", ") + names[member];
      for (const auto& tensor : member->parameters()) {
        const auto [found, is_new] = unit_of.emplace(tensor.unsafeGetTensorImpl(), plans.size());
        if (!is_new && found->second != plans.size()) found->second = kRoot;
      }
    }
    plans.push_back(std::move(plan));
  }
  UnitPlan rest{.name = "(root)", .is_root = true};
  if (root != nullptr) rest.modules = {root};
  for (const auto& named : nn::named_parameters(module)) {
    const auto found = unit_of.find(named.tensor.unsafeGetTensorImpl());
    const bool in_unit = found != unit_of.end() && found->second != kRoot;
    (in_unit ? plans[found->second] : rest).parameters.push_back(named);
  }
  plans.insert(plans.begin(), std::move(rest));
  std::erase_if(plans, [](const UnitPlan& plan) { return plan.parameters.empty(); });
  return plans;
}

}  // namespace phalanx::fsdp
