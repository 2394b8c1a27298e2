#include "phalanx/parallel/ddp/data_parallel.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/cat.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/nn/dropout.h"
#include "phalanx/parallel/task_thread.h"

namespace phalanx {
namespace {

namespace autograd = torch::autograd;

// A parameter's values on each replica's device. On its own device it is the same memory.
class SendToReplicas : public autograd::Function<SendToReplicas> {
 public:
  static autograd::variable_list forward(autograd::AutogradContext* context, const at::Tensor& parameter,
                                         const std::vector<at::Device>& devices) {
    context->set_materialize_grads(false);  // a replica may not have used it
    context->saved_data["home"] = parameter.device();
    return values(parameter, devices);
  }

  static autograd::variable_list backward(autograd::AutogradContext* context, const autograd::variable_list& grads) {
    const at::Device home = context->saved_data["home"].toDevice();
    at::Tensor sum;
    for (const auto& grad : grads) {
      if (!grad.defined()) continue;
      const at::Tensor here = grad.to(home);
      sum = sum.defined() ? sum.add(here) : here;
    }
    return {sum, at::Tensor()};
  }

  static std::vector<at::Tensor> values(const at::Tensor& parameter, const std::vector<at::Device>& devices) {
    std::vector<at::Tensor> result;
    for (const auto device : devices) {
      const at::Tensor value = parameter.variable_data();
      result.push_back(device == parameter.device() ? value : value.to(device));
    }
    return result;
  }
};

// Makes `replica` a handle to the value and its autograd history. Layers hold the tensor object itself, so it must stay
// the same object. It shares the original's version counter: autograd then detects a change between forward and
// backward.
void give_value(const at::Tensor& replica, const at::Tensor& value, const at::Tensor& original) {
  autograd::impl::set_gradient_edge(replica, autograd::Edge());
  replica.set_requires_grad(false);
  replica.set_data(value.variable_data());
  replica.unsafeGetTensorImpl()->set_version_counter(original.unsafeGetTensorImpl()->version_counter());
  if (value.grad_fn()) autograd::impl::set_gradient_edge(replica, autograd::impl::gradient_edge(value));
}

// The device as tensors name it: with an index, except for the CPU.
at::Device normal(at::Device device) {
  if (!c10::impl::hasDeviceGuardImpl(device.type()) ||
      (!device.is_cpu() &&
       c10::impl::VirtualGuardImpl(device.type()).deviceCount() <= std::max<int>(device.index(), 0))) {
    throw Error(fmt::format("DataParallel: there is no device {} here: DataParallel::all_devices() are those there are",
                            device.str()));
  }
  if (device.is_cpu()) return at::kCPU;
  return device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

struct Parts {
  explicit Parts(torch::nn::Module& module) : modules{&module} {
    for (const auto& p : module.named_parameters()) names.push_back(p.key()), parameters.push_back(p.value());
    for (const auto& b : module.named_buffers()) {
      names.push_back(b.key());
      buffers.push_back(b.value());
    }
    // A module on the stack is not owned by a pointer, which include_self would require.
    for (const auto& child : module.modules(/*include_self=*/false)) modules.push_back(child.get());
  }
  std::vector<std::string> names;
  std::vector<at::Tensor> parameters, buffers;
  std::vector<torch::nn::Module*> modules;  // parents first
};

std::vector<std::int64_t> shape_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.sizes().vec() : std::vector<std::int64_t>{};
}

void check_same_shape(const std::string& name, const Parts& original, const Parts& replica) {
  if (original.names != replica.names || original.parameters.size() != replica.parameters.size() ||
      original.modules.size() != replica.modules.size()) {
    throw Error(
        fmt::format("DataParallel: a copy of module '{}' is not like it: expected {} submodules and [{}], found "
                    "{} and [{}]",
                    name, original.modules.size(), fmt::join(original.names, ", "), replica.modules.size(),
                    fmt::join(replica.names, ", ")));
  }
  const auto check = [&](const at::Tensor& a, const at::Tensor& b, const std::string& tensor) {
    if (shape_of(a) == shape_of(b)) return;
    throw Error(fmt::format("DataParallel: '{}' in a copy of module '{}' has the shape [{}]: expected [{}]", tensor,
                            name, fmt::join(shape_of(b), ", "), fmt::join(shape_of(a), ", ")));
  };
  const std::size_t count = original.parameters.size();
  for (std::size_t i = 0; i < original.names.size(); ++i) {
    i < count ? check(original.parameters[i], replica.parameters[i], original.names[i])
              : check(original.buffers[i - count], replica.buffers[i - count], original.names[i]);
  }
}

std::shared_ptr<torch::nn::Module> clone_of(const torch::nn::Module& module) {
  try {
    return module.clone();
  } catch (const c10::Error&) {
    throw Error(fmt::format(
        "DataParallel: module '{0}', or one inside it, has no clone(): hand over a function that makes another one, "
        "DataParallel(module, devices, [] {{ return std::make_shared<{0}>(); }}), or derive from torch::nn::Cloneable",
        module.name()));
  }
}

// Layers draw random numbers when they are constructed. Nothing uses these, but they would change the numbers drawn
// later.
template <class Body>
auto without_random_numbers(const Body& body) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor state = [&] {
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }();
  struct Restore {
    at::Generator generator;
    at::Tensor state;
    ~Restore() {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  } restore{generator, state};
  return body();
}

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    return caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

[[noreturn]] void throw_with(const std::exception_ptr& cause, const std::string& message) {
  try {
    std::rethrow_exception(cause);
  } catch (...) {
    std::throw_with_nested(Error(message));
  }
}

// Thread-local settings of the caller's thread that a replica's thread has to see.
class CallerState {
 public:
  explicit CallerState(const std::vector<at::Device>& devices) : cache_(at::autocast::is_autocast_cache_enabled()) {
    for (const auto device : devices) {
      dtypes_.push_back(at::autocast::get_autocast_dtype(device.type()));
      streams_.push_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    }
  }
  template <class Body>
  void apply(std::size_t replica, const Body& body) const {
    const at::ThreadLocalStateGuard state(state_);
    at::autocast::set_autocast_cache_enabled(cache_);
    at::autocast::set_autocast_dtype(streams_[replica].device_type(), dtypes_[replica]);
    std::optional<c10::StreamGuard> stream;
    if (streams_[replica].device_type() != at::kCPU) stream.emplace(streams_[replica]);
    body();
  }

 private:
  at::ThreadLocalState state_;
  bool cache_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<c10::Stream> streams_;
};

}  // namespace

struct DataParallel::Impl {
  struct Replica {
    std::shared_ptr<torch::nn::Module> owner;  // null for the first, which is the user's
    Parts parts;
    TaskThread thread;
    torch::nn::Module& module() { return *parts.modules.front(); }
    Replica(torch::nn::Module& module, std::shared_ptr<torch::nn::Module> owned)
        : owner(std::move(owned)), parts(module) {}
  };

  Impl(torch::nn::Module& module, std::vector<at::Device> devices_, const Make& make, Forward forward_)
      : devices(std::move(devices_)), forward(std::move(forward_)) {
    if (devices.empty())
      throw Error("DataParallel: no devices: name one at least, or take DataParallel::all_devices()");
    for (auto& device : devices) device = normal(device);
    replicas.push_back(std::make_unique<Replica>(module, nullptr));
    for (std::size_t i = 0; i < original().parameters.size(); ++i) {
      const at::Device device = original().parameters[i].device();
      if (device == devices[0]) continue;
      throw Error(
          fmt::format("DataParallel: parameter '{}' is on {}: expected it on the first device, {}; move the "
                      "module there first: module.to(device)",
                      original().names[i], device.str(), devices[0].str()));
    }
    without_random_numbers([&] {
      for (std::size_t r = 1; r < devices.size(); ++r) {
        auto owned = make ? make() : clone_of(module);
        if (!owned) throw Error("DataParallel: the function that makes replicas returned a null pointer");
        replicas.push_back(std::make_unique<Replica>(*owned, owned));
        check_same_shape(module.name(), original(), replicas.back()->parts);
      }
    });
    share_threads();
    const at::NoGradGuard no_grad;
    replicate(devices.size());  // frees the memory that they were made with
  }

  const Parts& original() const { return replicas.front()->parts; }

  // The number of intra-op threads is a per-thread setting, and a new thread starts with the last value set in any
  // thread.
  void share_threads() {
    const int threads = at::get_num_threads();
    const auto on_cpu = static_cast<int>(std::ranges::count_if(devices, [](at::Device d) { return d.is_cpu(); }));
    for (std::size_t r = 0; r < devices.size(); ++r) {
      if (!devices[r].is_cpu()) continue;
      replicas[r]->thread.start([&] { at::set_num_threads(std::max(1, threads / on_cpu)); });
      replicas[r]->thread.wait();
    }
    at::set_num_threads(threads);
  }

  // Gives replicas 1 ... used - 1 the module's values, history and modes.
  void replicate(std::size_t used) {
    if (used < 2) return;
    std::optional<c10::InferenceMode> versions;  // tensors of inference mode have none
    if (c10::InferenceMode::is_enabled()) versions.emplace(false);
    const std::vector<at::Device> others(devices.begin() + 1, devices.begin() + static_cast<std::ptrdiff_t>(used));
    for (std::size_t i = 0; i < original().parameters.size(); ++i) {
      const at::Tensor& parameter = original().parameters[i];
      // Done even if the caller records nothing: graphs of earlier forward passes refer to the replicas' parameters,
      // which must not lose their history. The threads run in the caller's mode.
      const at::AutoGradMode record(true);
      const bool recorded = parameter.requires_grad();
      const auto values =
          recorded ? SendToReplicas::apply(parameter, others) : SendToReplicas::values(parameter, others);
      for (std::size_t r = 1; r < used; ++r) give_value(replicas[r]->parts.parameters[i], values[r - 1], parameter);
    }
    for (std::size_t i = 0; i < original().buffers.size(); ++i) {
      const at::Tensor& buffer = original().buffers[i];
      if (!buffer.defined()) continue;
      for (std::size_t r = 1; r < used; ++r) {
        const at::Tensor own = buffer.variable_data().to(devices[r], buffer.scalar_type(), false, /*copy=*/true);
        replicas[r]->parts.buffers[i].set_data(own);
      }
    }
    for (std::size_t i = 0; i < original().modules.size(); ++i) {
      const bool training = original().modules[i]->is_training();
      for (std::size_t r = 1; r < used; ++r) {
        auto& module = *replicas[r]->parts.modules[i];
        if (module.is_training() != training) module.train(training);  // sets its children, too: they are handled later
      }
    }
  }

  void set_dropout_rng_state(std::size_t replica, std::int64_t row) {
    for (std::size_t i = 0; i < original().modules.size(); ++i) {
      const auto* first = dynamic_cast<const nn::Dropout*>(original().modules[i]);
      auto* other = dynamic_cast<nn::Dropout*>(replicas[replica]->parts.modules[i]);
      if (first == nullptr || other == nullptr || !first->rng_state()) continue;
      nn::PlaceInRun rng_state = *first->rng_state();
      rng_state.first_row += row;
      other->rng_state(first->layer(), rng_state);
    }
  }

  std::vector<at::Tensor> scatter(const at::Tensor& batch, std::size_t used) {
    std::vector<at::Tensor> pieces;
    const auto count = static_cast<std::int64_t>(used), rows = batch.size(0);
    std::int64_t begin = 0;
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t length = rows / count + (r < rows % count ? 1 : 0);
      const auto replica = static_cast<std::size_t>(r);
      pieces.push_back(batch.narrow(0, begin, length).to(devices[replica]));
      if (r > 0) set_dropout_rng_state(replica, begin);
      begin += length;
    }
    return pieces;
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& pieces) {
    const CallerState caller(devices);
    const std::size_t used = pieces.size();
    std::vector<at::Tensor> outputs(used);
    std::vector<std::exception_ptr> errors(used);
    for (std::size_t r = 0; r < used; ++r) {
      replicas[r]->thread.start([&, r] {
        try {
          caller.apply(r, [&] { outputs[r] = forward(replicas[r]->module(), pieces[r]); });
          if (!outputs[r].defined()) throw Error("its forward returned an undefined tensor");
        } catch (...) {
          errors[r] = std::current_exception();
        }
      });
    }
    for (std::size_t r = 0; r < used; ++r) replicas[r]->thread.wait();
    const auto first = std::ranges::find_if(errors, [](const auto& error) { return error != nullptr; });
    if (first == errors.end()) return outputs;
    const auto failed = static_cast<std::size_t>(first - errors.begin());
    const auto more = std::count_if(first + 1, errors.end(), [](const auto& error) { return error != nullptr; });
    throw_with(*first, fmt::format("DataParallel: replica {} of {} (on {}){}: {}", failed, used, devices[failed].str(),
                                   more > 0 ? fmt::format(", and {} more", more) : "", what_of(*first)));
  }

  at::Tensor gather(std::vector<at::Tensor> outputs) const {
    for (auto& output : outputs) {
      if (output.dim() == 0) output = output.unsqueeze(0);
      output = output.to(devices[0]);
    }
    return outputs.size() == 1 ? outputs.front() : at::cat(outputs, 0);
  }

  std::vector<at::Device> devices;
  Forward forward;
  std::vector<std::unique_ptr<Replica>> replicas;
};

DataParallel::DataParallel(torch::nn::Module& module, std::vector<at::Device> devices, const Make& make,
                           Forward forward)
    : impl_(std::make_unique<Impl>(module, std::move(devices), make, std::move(forward))) {}

DataParallel::~DataParallel() = default;

const std::vector<at::Device>& DataParallel::devices() const noexcept { return impl_->devices; }

at::Tensor DataParallel::forward(const at::Tensor& batch) {
  if (!batch.defined() || batch.dim() == 0) {
    throw Error(fmt::format("DataParallel: the batch is {}: expected a tensor whose first dimension counts its rows",
                            batch.defined() ? "a single number" : "undefined"));
  }
  const auto used = std::clamp<std::int64_t>(batch.size(0), 1, static_cast<std::int64_t>(devices().size()));
  impl_->replicate(static_cast<std::size_t>(used));
  return impl_->gather(impl_->run(impl_->scatter(batch, static_cast<std::size_t>(used))));
}

std::vector<at::Device> DataParallel::all_devices() {
  std::vector<at::Device> devices;
  if (c10::impl::hasDeviceGuardImpl(at::kCUDA)) {
    const auto count = c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount();
    for (at::DeviceIndex i = 0; i < count; ++i) devices.emplace_back(at::kCUDA, i);
  }
  if (devices.empty()) devices.emplace_back(at::kCPU);
  return devices;
}

}  // namespace phalanx
