#include "phalanx/verify/forward_trace.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <algorithm>

#include "phalanx/nn/embedding.h"
#include "phalanx/parallel/end_of_backward.h"
#include "phalanx/tensor/grad_ready.h"

namespace phalanx::verify {
namespace {

at::Tensor copy_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.detach().to(at::TensorOptions(at::kCPU).dtype(at::kDouble), /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

at::Tensor ForwardTrace::ModuleRecord::input() const { return inputs.empty() ? at::Tensor() : at::cat(inputs, 0); }

ForwardTrace::ForwardTrace(nn::Module& model) {
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    if (auto* module = dynamic_cast<nn::Module*>(item.value().get())) attach(item.key(), *module);
  }
}

void ForwardTrace::attach(const std::string& name, nn::Module& module) {
  module.add_input_hook([this, name](const at::Tensor& input) {
    if (!inside_backward()) {
      ModuleRecord& seen = place_of(name);
      if (seen.rows < wanted_rows_) {
        seen.inputs.push_back(copy_of(input));
        seen.rows += input.size(0);
      }
    }
    return input;
  });
  if (module.named_parameters(/*recurse=*/false).find("weight") == nullptr) return;
  with_weight_.emplace_back(name, &module);
  module.add_parameter_hooks(
      [this, name](nn::Module& used) { note_weight(name, used, &ModuleRecord::weight); },
      [this, name, reads = dynamic_cast<nn::Embedding*>(&module) == nullptr](nn::Module& used, at::Tensor output) {
        // The backward pass of an embedding does not read its weight.
        if (!reads || !output.requires_grad()) return output;
        output.register_hook(
            [this, name, &used](const at::Tensor&) { note_weight(name, used, &ModuleRecord::backward_weight); });
        return output;
      });
}

void ForwardTrace::note_weight(const std::string& name, nn::Module& of, at::Tensor ModuleRecord::*where) {
  ModuleRecord& seen = place_of(name);
  seen.has_weight = true;
  const at::Tensor weight = of.named_parameters(/*recurse=*/false)["weight"];
  if ((seen.*where).defined() || !has_memory(weight)) return;
  seen.*where = copy_of(weight);
  seen.shard = of.shard_of("weight");
}

void ForwardTrace::note_uncalled() {
  for (const auto& [name, module] : with_weight_) {
    if (find(name) == nullptr) note_weight(name, *module, &ModuleRecord::weight);
  }
}

void ForwardTrace::start(std::int64_t rows) {
  seen_.clear();
  wanted_rows_ = rows;
}

ForwardTrace::ModuleRecord& ForwardTrace::place_of(const std::string& module) {
  const auto found = std::ranges::find(seen_, module, &ModuleRecord::module);
  if (found != seen_.end()) return *found;
  return seen_.emplace_back(ModuleRecord{.module = module});
}

const ForwardTrace::ModuleRecord* ForwardTrace::find(const std::string& module) const {
  const auto found = std::ranges::find(seen_, module, &ModuleRecord::module);
  return found == seen_.end() ? nullptr : &*found;
}

}  // namespace phalanx::verify
