// The base of Phalanx's layers: torch::nn::Module plus forward hooks, and parameters that may start without values.
//
// libtorch's C++ frontend has no forward hooks. Features that act around a module's forward without the model's
// knowledge (sharding, activation checkpointing, tracing) attach to this base, and callers use call():
//
//   x = x + call(attention, call(attention_norm, x), rope);     // [batch, seq, dim]
//
// call(m, inputs...) runs m's pre-forward hooks in order of registration, m->forward(inputs...), then the post-forward
// hooks in reverse order. A module without hooks pays one branch.
//
// make_parameter() makes parameters. They hold no meaningful values until initialise() (nn/init.h) or a checkpoint
// fills them. Constructors never initialise, so that a parameter may also be made without storage and filled by shard.
// The layer declares a parameter's initial values when it makes it, and initialise() reads them. A model that wants
// other initial values for one of its layers calls set_init().
//
// If a rank holds a part of a parameter, set_shard() says which part. Functions that list the model's parameters
// (nn/init.h) pass that on. Layers read their parameters through used(). So code that shards a model can put a
// differentiable function between a parameter and its use.
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "phalanx/tensor/init.h"
#include "phalanx/tensor/named.h"

namespace phalanx::nn {

struct TensorOptionsOfModule {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  bool without_memory = false;  // parameters have shapes but no memory: they are filled shard by shard
};

class Module : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  using PreHook = std::function<void(Module&)>;
  /// Receives the output (a tensor) and may return another in its place.
  using PostHook = std::function<at::Tensor(Module&, at::Tensor)>;

  void add_pre_forward_hook(PreHook hook) { pre_hooks_.push_back(std::move(hook)); }
  void add_post_forward_hook(PostHook hook) { post_hooks_.push_back(std::move(hook)); }
  /// For code that only has to act before and after the use of the module's parameters. `before` runs ahead of all
  /// pre-forward hooks, and `after` behind all post-forward hooks. Both also run if a fused kernel uses the parameters
  /// instead of forward(); `after` then receives that kernel's result.
  void add_parameter_hooks(PreHook before, PostHook after) {
    before_use_.push_back(std::move(before));
    after_use_.push_back(std::move(after));
  }
  /// From now on call() passes its first input, if that is a tensor, through this hook before everything else. Input
  /// hooks that are added later run before it.
  using InputHook = std::function<at::Tensor(const at::Tensor& input)>;
  void add_input_hook(InputHook hook) { input_hooks_.push_back(std::move(hook)); }
  bool has_input_hook() const noexcept { return !input_hooks_.empty(); }
  at::Tensor run_input_hooks(at::Tensor input) const {
    for (auto it = input_hooks_.rbegin(); it != input_hooks_.rend(); ++it) input = (*it)(input);
    return input;
  }
  /// The units in which a sharded model is gathered (parallel/fsdp/fully_shard.h), in the order of use. Each entry
  /// lists the modules of one unit. If empty, the module's numbered lists of modules are the units.
  virtual std::vector<std::vector<Module*>> shard_units() { return {}; }
  /// Parameters that are multiplied with one input, and are one product if they are adjacent in one storage, in this
  /// order. Its modules may have such groups inside a group of this one.
  virtual std::vector<std::vector<at::Tensor>> one_products() const { return {}; }
  /// Makes those of each group adjacent whose parameters have memory. For constructors, and for code that has replaced
  /// their storage. REQUIRES: they are not in the buffer of a sharded unit.
  void share_storage() const;
  /// The initial values of this module's own parameter `name`. Throws Error if there is no such parameter.
  const Init& init_of(const std::string& name) const;
  void set_init(const std::string& name, const Init& init);

  /// The part of its own parameter `name` that this rank holds; null: all of it. The parameter already has that part's
  /// shape. Both throw Error if there is no such parameter.
  void set_shard(const std::string& name, std::shared_ptr<const Shard> shard);
  std::shared_ptr<const Shard> shard_of(const std::string& name) const;
  /// Sets the function whose result the forward pass uses in place of its own parameter `name`. If the result is
  /// undefined, the module does without the parameter.
  using ParameterUse = std::function<at::Tensor(const at::Tensor& parameter)>;
  void set_parameter_use(const std::string& name, ParameterUse use);
  bool has_parameter_uses() const noexcept { return !uses_.empty(); }

  /// Whether forward() itself must be called, because it has hooks.
  bool has_forward_hooks() const noexcept { return !pre_hooks_.empty() || !post_hooks_.empty(); }
  bool has_parameter_hooks() const noexcept { return !before_use_.empty(); }

  /// From now on call() gives forward() to the runner, as a function of its first input that may be rerun later. For
  /// activation checkpointing (parallel/activation_checkpoint.h). While gradients are recorded, call() throws Error for
  /// inputs that cannot be kept until then: a first one that is no tensor, others by non-const reference.
  using Forward = std::function<at::Tensor(const at::Tensor& input)>;
  using Runner = std::function<at::Tensor(Forward forward, const at::Tensor& input)>;
  void set_runner(Runner runner) { runner_ = std::move(runner); }
  bool has_runner() const noexcept { return static_cast<bool>(runner_); }
  at::Tensor run(Forward forward, const at::Tensor& input) { return runner_(std::move(forward), input); }

  /// Runs `use`, which uses the module's parameters, between the parameter hooks.
  template <class Use>
  at::Tensor around_use(Use&& use) {
    for (auto& hook : before_use_) hook(*this);
    return run_post(after_use_, std::forward<Use>(use)());
  }
  /// Runs `forward` between the forward hooks.
  template <class Run>
  at::Tensor around_forward(Run&& forward) {
    for (auto& hook : pre_hooks_) hook(*this);
    return run_post(post_hooks_, std::forward<Run>(forward)());
  }

 protected:
  /// Registers an uninitialised parameter of this shape that requires grad, if it is floating-point, with its declared
  /// initial values.
  at::Tensor make_parameter(const std::string& name, at::IntArrayRef shape, TensorOptionsOfModule options = {},
                            const Init& init = Init::normal(0.0, 0.02));
  /// For forward(): parameter `name`, or its substitute.
  at::Tensor used(const char* name, const at::Tensor& parameter) const {
    return uses_.empty() ? parameter : substituted(name, parameter);
  }

 private:
  at::Tensor substituted(const char* name, const at::Tensor& parameter) const;
  at::Tensor run_post(std::vector<PostHook>& hooks, at::Tensor output) {
    for (auto it = hooks.rbegin(); it != hooks.rend(); ++it) output = (*it)(*this, std::move(output));
    return output;
  }

  std::vector<PreHook> pre_hooks_, before_use_;
  std::vector<PostHook> post_hooks_, after_use_;
  std::vector<InputHook> input_hooks_;
  Runner runner_;
  std::map<std::string, Init> inits_;
  std::map<std::string, std::shared_ptr<const Shard>> shards_;
  std::map<std::string, ParameterUse> uses_;
};

namespace detail {

/// A checkpointed module is called with what cannot be kept until it runs again.
[[noreturn]] void throw_cannot_run_again(const std::string& module);

template <class T>
inline constexpr bool kMayBeSaved = !std::is_lvalue_reference_v<T> || std::is_const_v<std::remove_reference_t<T>>;

/// The forward pass as a function of its first input; the others are copied.
template <class M, class First, class... Rest>
at::Tensor run_again_later(M& module, First&& first, Rest&&... rest) {
  return module.run(
      [&module, ... rest = std::decay_t<Rest>(std::forward<Rest>(rest))](const at::Tensor& input) {
        return module.around_forward([&] { return module.forward(input, rest...); });
      },
      first);
}

template <class M, class First, class... Rest>
at::Tensor call_between_hooks(M& module, First&& first, Rest&&... rest) {
  if constexpr (std::is_same_v<std::decay_t<First>, at::Tensor> && (kMayBeSaved<Rest> && ...)) {
    if (module.has_runner()) {
      return module.around_use(
          [&] { return run_again_later(module, std::forward<First>(first), std::forward<Rest>(rest)...); });
    }
  }
  if (module.has_runner() && at::GradMode::is_enabled()) throw_cannot_run_again(module.name());
  const auto forward = [&] { return module.forward(std::forward<First>(first), std::forward<Rest>(rest)...); };
  if (!module.has_forward_hooks() && !module.has_parameter_hooks()) return forward();
  return module.around_use([&] { return module.around_forward(forward); });
}

}  // namespace detail

/// The one way to run a module: hooks, forward, hooks.
template <std::derived_from<Module> M, class First, class... Rest>
at::Tensor call(M& module, First&& first, Rest&&... rest) {
  if constexpr (std::is_same_v<std::decay_t<First>, at::Tensor>) {
    if (module.has_input_hook()) {
      return detail::call_between_hooks(module, module.run_input_hooks(first), std::forward<Rest>(rest)...);
    }
  }
  return detail::call_between_hooks(module, std::forward<First>(first), std::forward<Rest>(rest)...);
}
template <class M, class... Inputs>
at::Tensor call(const std::shared_ptr<M>& module, Inputs&&... inputs) {
  return call(*module, std::forward<Inputs>(inputs)...);
}

}  // namespace phalanx::nn
