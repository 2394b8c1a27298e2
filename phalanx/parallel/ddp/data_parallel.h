// DataParallel: data parallelism over several devices in one process. It splits the batch and runs a replica of the
// module on each piece, each in its own thread. It puts the outputs together on the first device. Gradients are summed
// in the module's own parameters.
//
//   auto net = std::make_shared<Net>();                                    // on devices[0]
//   DataParallel parallel(*net, {{at::kCUDA, 0}, {at::kCUDA, 1}});
//   loss(parallel.forward(x), y).backward();
//   optimizer.step();                                                      // of net->parameters()
//
// Prefer DistributedDataParallel (ddp.h): one process per device needs a launcher but is faster. DataParallel sends all
// parameters out and all gradients in at every step, through one device, which also holds all outputs and the loss.
// Nothing of that overlaps with the computation. The replicas share one process's allocator. On the CPU, one thread
// runs the whole backward pass. It works within one node only. It is for programs that must stay a single process.
//
// Modules
// - Any module whose forward takes one tensor and returns one, both with the batch as dimension 0. A 0-dim output (a
//   loss of the piece) becomes a vector of one element per replica.
// - Replica 0 is the module itself. Its buffers (running statistics) are updated by its own piece only, and hooks
//   attached from outside run there only.
// - The other replicas are made once, by module.clone() (torch's own layers, Sequential, any class derived from
//   torch::nn::Cloneable) or by `make`. Making them draws no random numbers. Before every forward pass they get the
//   values of all parameters and buffers, and the mode (train, eval) of each submodule. Tensors that are not registered
//   in the module are private to each replica.
// - forward must not write to parameters: replicas on devices[0] read the module's own memory.
// - nn::Dropout (dropout.h) drops the same elements as one device would. torch's dropout draws from one generator, in
//   the order in which the threads reach it.
//
// Contract
// - devices may repeat: {kCPU, kCPU} is two replicas on the CPU. Pieces differ by at most one row. A batch with fewer
//   rows than devices uses the first devices only.
// - forward() is synchronous, and only one thread may call it at a time. The replicas' threads see the caller's grad
//   mode, autocast state and current streams. Any number of forward passes may precede a backward pass. If a parameter
//   changes in between, torch reports an error. Gradients are the sum over replicas, in their order.
// - If a replica throws, the caller gets an Error that names the first such replica, with the original nested inside
//   (std::rethrow_if_nested), once all replicas have ended.
// - The module must outlive this object and keep its parameters on devices[0]. CPU replicas share the intra-op threads
//   of the constructing thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "phalanx/nn/module.h"

namespace phalanx {

class DataParallel {
 public:
  /// `make` returns a new module of the same shape. It is needed where the module cannot be cloned. Throws Error if the
  /// new module has another shape, if `make` is missing and clone() does not work, if there are no devices, and if
  /// parameters are not on devices[0].
  template <class M>
  DataParallel(M& module, std::vector<at::Device> devices,
               std::type_identity_t<std::function<std::shared_ptr<M>()>> make = nullptr)
      : DataParallel(static_cast<torch::nn::Module&>(module), std::move(devices),
                     make ? Make([make = std::move(make)] { return make(); }) : Make(), forward_of<M>()) {}
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  at::Tensor forward(const at::Tensor& batch);

  const std::vector<at::Device>& devices() const noexcept;

  /// Every CUDA device, or the CPU if there is none.
  static std::vector<at::Device> all_devices();

 private:
  using Make = std::function<std::shared_ptr<torch::nn::Module>()>;
  using Forward = std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)>;

  DataParallel(torch::nn::Module& module, std::vector<at::Device> devices, const Make& make, Forward forward);

  template <class M>
  static Forward forward_of() {
    return [](torch::nn::Module& module, const at::Tensor& x) -> at::Tensor {
      if constexpr (std::derived_from<M, nn::Module>) {
        return nn::call(static_cast<M&>(module), x);
      } else {
        return static_cast<M&>(module).forward(x);
      }
    };
  }

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phalanx
