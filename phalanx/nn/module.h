// The base of Phalanx's layers: torch::nn::Module plus forward hooks and parameters that may be born without values.
//
// libtorch's C++ frontend has no forward hooks, so whatever wants to act around a module's forward without the model
// knowing (sharding, activation checkpointing, tracing) attaches to this base, and callers go through call():
//
//   x = x + call(attention, call(attention_norm, x), rope);     // [batch, seq, dim]
//
// call(m, inputs...) runs m's pre-forward hooks in order of registration, m->forward(inputs...), then the post-forward
// hooks in reverse order. A module without hooks pays one branch.
//
// Parameters are made by make_parameter() and hold no meaningful values until initialise() (nn/init.h) or a checkpoint
// fills them: constructors never initialise, so that a parameter may also be born without storage and filled by shard.
// What a parameter starts from is the layer's own statement, made with the parameter and read by initialise(); a model
// that wants another start for one of its layers says so with set_init().
#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/tensor/init.h"

namespace phalanx::nn {

struct TensorOptionsOfModule {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
};

class Module : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  using PreHook = std::function<void(Module&)>;
  /// Receives the output (a tensor) and may return another in its place.
  using PostHook = std::function<at::Tensor(Module&, at::Tensor)>;

  void add_pre_forward_hook(PreHook hook) { pre_hooks_.push_back(std::move(hook)); }
  void add_post_forward_hook(PostHook hook) { post_hooks_.push_back(std::move(hook)); }
  /// The starting values of this module's own parameter `name`; throws Error where there is no such parameter.
  const Init& init_of(const std::string& name) const;
  void set_init(const std::string& name, const Init& init);

  bool has_forward_hooks() const noexcept { return !pre_hooks_.empty() || !post_hooks_.empty(); }

  void run_pre_forward_hooks() {
    for (auto& hook : pre_hooks_) hook(*this);
  }
  at::Tensor run_post_forward_hooks(at::Tensor output) {
    for (auto it = post_hooks_.rbegin(); it != post_hooks_.rend(); ++it) output = (*it)(*this, std::move(output));
    return output;
  }

 protected:
  /// Registers an uninitialised parameter of this shape, with its statement of starting values; requires grad.
  at::Tensor make_parameter(const std::string& name, at::IntArrayRef shape, TensorOptionsOfModule options = {},
                            const Init& init = Init::normal(0.0, 0.02));

 private:
  std::vector<PreHook> pre_hooks_;
  std::vector<PostHook> post_hooks_;
  std::map<std::string, Init> inits_;
};

/// The one way to run a module: hooks, forward, hooks.
template <std::derived_from<Module> M, class... Inputs>
at::Tensor call(M& module, Inputs&&... inputs) {
  if (!module.has_forward_hooks()) return module.forward(std::forward<Inputs>(inputs)...);
  module.run_pre_forward_hooks();
  return module.run_post_forward_hooks(module.forward(std::forward<Inputs>(inputs)...));
}
template <class M, class... Inputs>
at::Tensor call(const std::shared_ptr<M>& module, Inputs&&... inputs) {
  return call(*module, std::forward<Inputs>(inputs)...);
}

}  // namespace phalanx::nn
