#include "phalanx/parallel/fsdp/find_units.h"

#include <fmt/format.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/module.h"

namespace phalanx::fsdp {
namespace {

struct Member {
  torch::nn::Module* module = nullptr;
  RegisterHooks attach;  // null: gathered on use
};
using Group = std::vector<Member>;

Member member_of(nn::Module& module) {
  return {&module, [&module](ForwardHooks hooks) {
            if (hooks.input) module.add_input_hook(std::move(hooks.input));
            module.add_parameter_hooks(
                [before = std::move(hooks.before)](nn::Module&) { before(); },
                [after = std::move(hooks.after)](nn::Module&, at::Tensor output) { return after(std::move(output)); });
          }};
}

// Replaces one child in a Sequential's list of modules to run. The registered children, and so all names, do not
// change.
class HookedModule : public torch::nn::Module {
 public:
  HookedModule(torch::nn::AnyModule inner, ForwardHooks hooks) : inner_(std::move(inner)), hooks_(std::move(hooks)) {}
  at::Tensor forward(at::Tensor input) {
    hooks_.before();
    if (hooks_.input) input = hooks_.input(input);
    return hooks_.after(inner_.forward<at::Tensor>(std::move(input)));
  }

 private:
  torch::nn::AnyModule inner_;
  ForwardHooks hooks_;
};

void hook_child(torch::nn::SequentialImpl& sequential, std::size_t child, ForwardHooks hooks) {
  auto place = sequential.begin() + static_cast<std::ptrdiff_t>(child);
  torch::nn::AnyModule inner = *place;
  *place = torch::nn::AnyModule(std::make_shared<HookedModule>(std::move(inner), std::move(hooks)));
}

void add_children(torch::nn::SequentialImpl& sequential, std::vector<Group>& groups) {
  for (std::size_t i = 0; i < sequential.size(); ++i) {
    const auto attach = [&sequential, i](ForwardHooks hooks) { hook_child(sequential, i, std::move(hooks)); };
    groups.push_back({{sequential[i].get(), attach}});
  }
}

bool is_number(const std::string& name) {
  return !name.empty() && std::ranges::all_of(name, [](char c) { return c >= '0' && c <= '9'; });
}

// Their kernels read memory without any operator of libtorch.
void refuse_modules_of_phalanx(const torch::nn::Module& plain, const std::string& name) {
  for (const auto& inner : plain.named_modules(name, /*include_self=*/false)) {
    if (dynamic_cast<nn::Module*>(inner.value().get()) == nullptr || inner.value()->parameters().empty()) continue;
    throw ConfigError(
        fmt::format("fully_shard: gather_on_use: {} is a phalanx::nn::Module inside the plain module {}, whose first "
                    "operator gathers both; modules of Phalanx compute without operators of libtorch: give {} plain "
                    "torch::nn layers, or make it a phalanx::nn::Module and leave out gather_on_use",
                    inner.key(), name, name));
  }
}

// The children of Sequentials and the members of numbered lists, anywhere in the module: the blocks of a model. On use,
// also modules with parameters of their own; what is inside such a module is looked for in the same way.
void find_blocks(torch::nn::Module& module, std::vector<Group>& groups, bool on_use) {
  if (auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module)) {
    add_children(*sequential, groups);
    return;
  }
  for (const auto& child : module.named_children()) {
    torch::nn::Module& inner = *child.value();
    auto* ours = dynamic_cast<nn::Module*>(&inner);
    const bool in_list = is_number(child.key()), has_own = on_use && !inner.parameters(/*recurse=*/false).empty();
    const bool is_sequential = dynamic_cast<torch::nn::SequentialImpl*>(&inner) != nullptr;
    if (ours != nullptr && (in_list || has_own)) {
      groups.push_back({member_of(*ours)});
    } else if (on_use && in_list && !is_sequential) {
      refuse_modules_of_phalanx(inner, child.key());
      groups.push_back({{&inner, nullptr}});
    } else {
      if (has_own && !is_sequential) groups.push_back({{&inner, nullptr}});
      find_blocks(inner, groups, on_use);
    }
  }
}

std::vector<Group> groups_of(torch::nn::Module& module, bool on_use) {
  std::vector<Group> groups;
  if (auto* ours = dynamic_cast<nn::Module*>(&module)) {
    for (const auto& unit : ours->shard_units()) {
      auto& group = groups.emplace_back();
      for (nn::Module* member : unit) group.push_back(member_of(*member));
    }
  }
  if (groups.empty()) find_blocks(module, groups, on_use);
  return groups;
}

constexpr std::size_t kRoot = static_cast<std::size_t>(-1);
using UnitOfModule = std::unordered_map<const torch::nn::Module*, std::size_t>;

// Members that are inside another member of their group are used whenever that one is.
bool is_inside(const torch::nn::Module* module, const Member& member) {
  if (module == member.module) return false;
  const auto all = member.module->modules(/*include_self=*/false);
  return std::ranges::any_of(all, [&](const auto& inner) { return inner.get() == module; });
}

void drop_covered_members(Group& group) {
  Group kept;
  for (const Member& member : group) {
    if (std::ranges::none_of(group, [&](const Member& other) { return is_inside(member.module, other); })) {
      kept.push_back(member);
    }
  }
  group = std::move(kept);
}

// A module that several groups name belongs to the root.
UnitOfModule units_of_modules(const std::vector<Group>& groups) {
  UnitOfModule unit_of;
  for (std::size_t unit = 0; unit < groups.size(); ++unit) {
    for (const Member& member : groups[unit]) {
      const auto [found, is_new] = unit_of.emplace(member.module, unit);
      if (!is_new && found->second != unit) found->second = kRoot;
    }
  }
  return unit_of;
}

/// Visits every parameter in `module` with the innermost unit around it, and the nesting depth of units there. A
/// parameter that is registered in several places is visited in each.
using Visit = std::function<void(const at::Tensor& parameter, std::size_t unit, int levels)>;
void visit_parameters(const torch::nn::Module& module, const UnitOfModule& unit_of, const Visit& visit,
                      std::size_t unit = kRoot, int levels = 0) {
  if (const auto named = unit_of.find(&module); named != unit_of.end() && named->second != unit) {
    unit = named->second;
    ++levels;
  }
  for (const auto& parameter : module.parameters(/*recurse=*/false)) visit(parameter, unit, levels);
  for (const auto& child : module.children()) visit_parameters(*child, unit_of, visit, unit, levels);
}

bool is_on_use(const Group& group) { return group.front().attach == nullptr; }

std::vector<Group> joined(const std::vector<Group>& groups, std::int64_t smallest) {
  std::vector<Group> result;
  const UnitOfModule unit_of = units_of_modules(groups);
  std::int64_t last = 0;
  for (std::size_t unit = 0; unit < groups.size(); ++unit) {
    const Group& group = groups[unit];
    std::int64_t count = 0;
    for (const Member& member : group) {
      const std::size_t own = unit_of.at(member.module);
      const auto add = [&](const at::Tensor& parameter, std::size_t of, int) {
        count += of == own ? parameter.numel() : 0;
      };
      visit_parameters(*member.module, unit_of, add);
    }
    if (count == 0) continue;
    if (result.empty() || last >= smallest || is_on_use(result.back()) != is_on_use(group)) {
      result.emplace_back();
      last = 0;
    }
    result.back().insert(result.back().end(), group.begin(), group.end());
    last += count;
  }
  if (result.size() > 1 && last < smallest && is_on_use(result.back()) == is_on_use(result[result.size() - 2])) {
    const Group tail = std::move(result.back());
    result.pop_back();
    result.back().insert(result.back().end(), tail.begin(), tail.end());
  }
  for (Group& group : result) drop_covered_members(group);
  return result;
}

// Own parameters that other units use, too, are not in the plan: counting would not tell.
bool has_parameters_of_children(const ParamGroupPlan& plan, const torch::nn::Module& module) {
  const std::vector<at::Tensor> own = module.parameters(/*recurse=*/false);
  return std::ranges::any_of(plan.parameters, [&](const NamedTensor& parameter) {
    return std::ranges::none_of(own, [&](const at::Tensor& one) { return one.is_same(parameter.tensor); });
  });
}

}  // namespace

std::vector<ParamGroupPlan> find_units(torch::nn::Module& module, std::int64_t smallest, bool on_use) {
  std::map<const void*, std::string> names;
  for (const auto& m : module.named_modules("", /*include_self=*/false)) names[m.value().get()] = m.key();
  const std::vector<Group> groups = joined(groups_of(module, on_use), smallest);
  std::vector<ParamGroupPlan> plans;
  for (const Group& group : groups) {
    ParamGroupPlan plan;
    for (const Member& member : group) {
      if (!names.contains(member.module)) {
        throw Error(fmt::format("fully_shard: shard_units() of {} names a {} that is not a submodule of it",
                                module.name(), member.module->name()));
      }
      plan.name += (plan.name.empty() ? "" : ", ") + names[member.module];
      if (member.attach) plan.uses.push_back(member.attach);
    }
    plan.on_use = is_on_use(group);
    plans.push_back(std::move(plan));
  }
  // A parameter that several units use belongs to the root.
  std::unordered_map<const void*, std::size_t> unit_of;
  visit_parameters(module, units_of_modules(groups), [&](const at::Tensor& parameter, std::size_t unit, int levels) {
    const auto [found, is_new] = unit_of.emplace(parameter.unsafeGetTensorImpl(), unit);
    if (!is_new && found->second != unit) found->second = kRoot;
    if (unit != kRoot) plans[unit].levels = std::max(plans[unit].levels, levels);
  });
  ParamGroupPlan rest{.name = "(root)", .is_root = true};
  if (auto* root = dynamic_cast<nn::Module*>(&module)) rest.uses.push_back(member_of(*root).attach);
  rest.on_use = on_use && rest.uses.empty();
  for (const auto& named : nn::named_parameters(module)) {
    const std::size_t unit = unit_of.at(named.tensor.unsafeGetTensorImpl());
    (unit == kRoot ? rest : plans[unit]).parameters.push_back(named);
  }
  for (std::size_t u = 0; u < plans.size(); ++u)
    plans[u].can_be_split =
        plans[u].on_use && groups[u].size() == 1 && has_parameters_of_children(plans[u], *groups[u].front().module);
  plans.insert(plans.begin(), std::move(rest));
  std::erase_if(plans, [](const ParamGroupPlan& plan) { return plan.parameters.empty(); });
  return plans;
}

bool attach_to_output(torch::nn::Module& module, std::function<at::Tensor(at::Tensor)> after) {
  if (auto* ours = dynamic_cast<nn::Module*>(&module)) {
    ours->add_parameter_hooks(
        [](nn::Module&) {},
        [after = std::move(after)](nn::Module&, at::Tensor output) { return after(std::move(output)); });
    return true;
  }
  auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module);
  if (sequential == nullptr || sequential->is_empty()) return false;
  hook_child(*sequential, sequential->size() - 1, {.before = [] {}, .after = std::move(after)});
  return true;
}

}  // namespace phalanx::fsdp
