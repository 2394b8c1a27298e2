#include "phalanx/nn/module.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/kernels/fused_linear.h"
#include "phalanx/observe/memory_counters.h"

namespace phalanx::nn {

at::Tensor Module::make_parameter(const std::string& name, at::IntArrayRef shape, TensorOptionsOfModule options,
                                  const Init& init) {
  inits_[name] = init;
  const at::TensorOptions tensor = at::TensorOptions(options.dtype).device(options.device);
  const observe::MemoryScope scope(observe::MemoryCategory::parameters);
  const bool can_be_trained = c10::isFloatingType(options.dtype);
  if (!options.without_memory) return register_parameter(name, at::empty(shape, tensor), can_be_trained);
  const at::Tensor shell = at::empty({0}, tensor);
  shell.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return register_parameter(name, shell, can_be_trained);
}

void Module::share_storage() const {
  const observe::MemoryScope scope(observe::MemoryCategory::parameters);
  for (const auto& group : one_products()) kernels::make_adjacent(group);
}

const Init& Module::init_of(const std::string& parameter) const {
  const auto found = inits_.find(parameter);
  if (found == inits_.end()) {
    throw Error(fmt::format("module '{}' has no parameter '{}' made by make_parameter()", name(), parameter));
  }
  return found->second;
}

void Module::set_init(const std::string& parameter, const Init& init) {
  init_of(parameter);  // throws where there is none
  inits_[parameter] = init;
}

void Module::set_shard(const std::string& parameter, std::shared_ptr<const Shard> shard) {
  init_of(parameter);
  shards_[parameter] = std::move(shard);
}

std::shared_ptr<const Shard> Module::shard_of(const std::string& parameter) const {
  init_of(parameter);
  const auto found = shards_.find(parameter);
  return found == shards_.end() ? nullptr : found->second;
}

void Module::set_parameter_use(const std::string& parameter, ParameterUse use) {
  init_of(parameter);
  uses_[parameter] = std::move(use);
}

void detail::throw_cannot_run_again(const std::string& module) {
  throw Error(module +
              " is checkpointed, and called with an input that cannot be kept until it runs again: expected a tensor "
              "first, and the others by value or const reference");
}

at::Tensor Module::substituted(const char* parameter, const at::Tensor& tensor) const {
  const auto found = uses_.find(parameter);
  return found == uses_.end() ? tensor : found->second(tensor);
}

}  // namespace phalanx::nn
