#include "phalanx/parallel/attached_parameters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <set>

#include "phalanx/nn/init.h"
#include "phalanx/parallel/missing_gradients.h"

namespace phalanx {

AttachedParameters::AttachedParameters(torch::nn::Module& module)
    : module_(module.weak_from_this()), count_(module.parameters().size()) {
  for (auto& named : nn::named_parameters(module)) {
    const bool is_trained = named.tensor.requires_grad();
    parameters_.push_back({std::move(named), is_trained});
  }
}

std::string AttachedParameters::changes() const {
  std::vector<std::string> frozen, unfrozen, added;
  for (const auto& [named, is_trained] : parameters_) {
    if (named.tensor.requires_grad() != is_trained) (is_trained ? frozen : unfrozen).push_back(named.name);
  }
  const auto module = module_.lock();
  if (module && module->parameters().size() != count_) {
    std::set<const void*> known;
    for (const auto& [named, is_trained] : parameters_) known.insert(named.tensor.unsafeGetTensorImpl());
    for (const auto& p : module->named_parameters()) {
      if (!known.contains(p.value().unsafeGetTensorImpl())) added.push_back(p.key());
    }
  }
  std::vector<std::string> parts;
  const auto say = [&](const std::vector<std::string>& names, const char* what) {
    if (names.empty()) return;
    parts.push_back(fmt::format("{} {} been {}", quoted_list(names), names.size() == 1 ? "has" : "have", what));
  };
  say(frozen, "frozen (requires_grad = false)");
  say(unfrozen, "unfrozen (requires_grad = true)");
  say(added, "added");
  return parts.empty() ? "" : fmt::format("the parameters have changed ({})", fmt::join(parts, "; "));
}

std::vector<GradReadySubscription> AttachedParameters::hook_frozen(
    const std::function<void(const std::string& changes)>& found) const {
  std::vector<GradReadySubscription> watches;
  for (const auto& [named, is_trained] : parameters_) {
    if (is_trained || named.tensor.requires_grad() || !named.tensor.is_floating_point()) continue;
    watches.push_back(on_unexpected_gradient(named.tensor, [this, found, name = named.name](const at::Tensor&) {
      const std::string text = changes();
      found(!text.empty() ? text
                          : fmt::format("a parameter has changed ('{}' was unfrozen in the forward pass)", name));
    }));
  }
  return watches;
}

}  // namespace phalanx
