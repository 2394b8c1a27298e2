#include "phalanx/testing/sim_device/torch/operator_traits.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>

#include <memory>
#include <mutex>
#include <unordered_map>

namespace phalanx::sim_device {
namespace {

bool mentions(const c10::Argument& argument, const char* type) {
  return argument.type()->str().find(type) != std::string::npos;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Which argument a result with that alias is.
int argument_of(const c10::FunctionSchema& schema, const c10::AliasInfo& result) {
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (is_written(argument) && argument.alias_info()->beforeSets() == result.beforeSets()) return static_cast<int>(i);
  }
  return OperatorTraits::kNew;
}

std::unique_ptr<OperatorTraits> read_schema(const c10::OperatorHandle& op) {
  auto traits = std::make_unique<OperatorTraits>();
  const c10::FunctionSchema& schema = op.schema();
  traits->name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    traits->writes.push_back(is_written(argument));
    traits->writes_out |= is_written(argument) && argument.kwarg_only();
    traits->has_tensor_input |= !argument.kwarg_only() && mentions(argument, "Tensor");
    if (mentions(argument, "Generator")) traits->generator = static_cast<int>(i);
  }
  for (const c10::Argument& result : schema.returns()) {
    const c10::AliasInfo* alias = result.alias_info();
    traits->returned.push_back(is_written(result) ? argument_of(schema, *alias) : OperatorTraits::kNew);
    if (alias == nullptr) {
      traits->makes_new = true;
      traits->reads_data |= !mentions(result, "Tensor");
    } else if (!alias->isWrite()) {
      traits->is_view = true;
    }
  }
  traits->reads_data |= op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  traits->has_meta = op.hasKernelForDispatchKey(c10::DispatchKey::Meta);
  return traits;
}

}  // namespace

const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto& all = *new std::unordered_map<const void*, std::unique_ptr<OperatorTraits>>;
  thread_local std::unordered_map<const void*, const OperatorTraits*> known;
  const OperatorTraits*& traits = known[&op.schema()];
  if (traits == nullptr) {
    const std::lock_guard lock(mutex);
    std::unique_ptr<OperatorTraits>& shared = all[&op.schema()];
    if (!shared) shared = read_schema(op);
    traits = shared.get();
  }
  return *traits;
}

}  // namespace phalanx::sim_device
