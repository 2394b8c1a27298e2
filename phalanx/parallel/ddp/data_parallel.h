// DataParallel: one process, several devices. The batch is cut, a replica of the module works on each piece in a thread
// of its own, the outputs are put together on the first device; gradients add up in the module's own parameters.
//
//   auto net = std::make_shared<Net>();                                    // on devices[0]
//   DataParallel parallel(*net, {{at::kCUDA, 0}, {at::kCUDA, 1}});
//   loss(parallel.forward(x), y).backward();
//   optimizer.step();                                                      // of net->parameters()
//
// Prefer DistributedDataParallel (ddp.h): one process per device needs a launcher but is faster. This class sends
// all parameters out and all gradients in at every step, through one device, which also holds all outputs and the loss;
// nothing of that overlaps the computation; replicas share one process's allocator and, on the CPU, one thread runs
// the whole backward pass. It does not leave the machine. It is for programs that must stay a single process.
//
// Modules
// - Any whose forward takes one tensor and returns one, both with the batch as dimension 0. A 0-dim output (a loss of
//   the piece) becomes a vector of one element per replica.
// - Replica 0 is the module itself: its buffers (running statistics) are what its piece makes of them, and hooks
//   attached from outside run there only. The others are made once, by module.clone() (torch's own layers, Sequential,
//   whatever derives from torch::nn::Cloneable) or by `make`; making them draws no random numbers. Before every forward
//   they get the values of all parameters and buffers and the mode (train, eval) of each submodule. Tensors that are
//   not registered in the module are theirs alone.
// - forward must not write to parameters: replicas on devices[0] read the module's own memory.
// - nn::Dropout (dropout.h) drops what one device would; torch's dropout draws from one generator in the order in which
//   the threads come.
//
// Contract
// - devices may repeat: {kCPU, kCPU} is two replicas on the CPU. Pieces differ by one row at most; a batch of
//   fewer rows than devices uses the first ones only.
// - forward() is synchronous, and for one thread at a time; the threads see the caller's grad mode, autocast and
//   current streams. Any number of forward passes may precede a backward pass; a parameter changed in between is
//   torch's error. Gradients are the sum over replicas, in their order.
// - What a replica throws reaches the caller as an Error that names the first such replica, the original nested inside
//   (std::rethrow_if_nested), once all have ended.
// - The module must outlive this object and keep its parameters on devices[0]. CPU replicas share the intra-op threads
//   that the constructing thread has.
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
  /// `make` returns a new module of the same shape; needed where the module cannot be cloned. Throws Error where it is
  /// not of the same shape, where there is none and clone() does not work, for no devices, and for parameters elsewhere
  /// than on devices[0].
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

  /// Every CUDA device, or the CPU where there is none.
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
