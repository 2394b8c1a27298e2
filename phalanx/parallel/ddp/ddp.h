// DistributedDataParallel: data-parallel training of a module; its constructor is the only line that a single-process
// program has to add.
//
//   auto model = std::make_shared<Net>();                      // any torch::nn::Module
//   phalanx::DistributedDataParallel ddp(*model, world);       // the one line
//   ...
//   model->forward(batch).backward();                          // gradients are averages over the ranks afterwards
//   optimizer.step();                                          // any optimizer
//
// What it does
// - The constructor (collective) checks that every rank has the same parameters, buffers and options. Then it copies
//   rank 0's values to all ranks.
// - Gradients live in a few flat buckets, and every p.grad() is a view into one. When all gradients of a bucket are
//   ready, its all-reduce (average, or sum: gradient_reduction) starts, in bucket order, while the backward pass goes
//   on. backward() returns when all of them are done. With local batches of equal size and a mean loss, the average is
//   the gradient of the mean loss over the global batch. With one rank there is nothing to send: its gradients stay
//   where autograd puts them, and nothing is copied.
// - After the first synchronised backward pass the buckets are rebuilt once, in the order in which gradients became
//   ready on rank 0.
//
// Contract
// - Every rank runs the same sequence of synchronised backward passes. Each pass must produce a gradient for every
//   parameter. Otherwise every rank throws an Error that names the parameters, and the communicator is aborted. With
//   `find_unused_parameters`, a parameter without a gradient contributes zeros instead (a parameter that no rank used
//   keeps no gradient).
// - An exception inside backward() on one rank aborts the communicator, so that no other rank waits for it.
// - Gradients may be set to undefined (zero_grad()) or zeroed in place between steps. A gradient tensor that the caller
//   assigned is added to, then moved into the bucket. Handles to p.grad() are valid until the next zero_grad() and
//   until the rebuild at the end of the first synchronised pass.
// - Parameters that did not require grad at construction are left alone. Shared parameters are handled once.
// - The set of trained parameters must not change. If one is frozen, unfrozen or added while this object lives, every
//   rank throws an Error that names it, in the next synchronised backward pass or where the parameter receives a
//   gradient. (Added ones are detected only in modules that a shared_ptr owns.) To train other parameters, destroy this
//   object and make a new one.
// - Gradients must be dense, and all parameters on one device.
// - Buffers are copied from rank 0 at construction and by broadcast_buffers(), not in every forward pass.
// - From the beginning to the end of backward(), nothing else may use the communicator.
// - The module's parameters may outlive this object. Destroying it ends the synchronisation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/tensor/named.h"
#include "phalanx/tensor/train_state.h"

namespace torch::nn {
class Module;
}

namespace phalanx {

class Reducer;

struct DdpOptions {
  std::size_t first_bucket_bytes = 1 << 20;
  std::size_t bucket_bytes = 25 << 20;
  bool find_unused_parameters = false;  // costs one more small collective per backward pass
  /// What the ranks' gradients become: their average, or their sum where each loss is divided by what the global batch
  /// has. avg or sum.
  ReduceOp gradient_reduction = ReduceOp::avg;
};

struct DdpStatistics {
  std::int64_t synchronisations = 0;  // backward passes whose gradients were averaged
  std::int64_t bytes = 0;             // bytes handed to all_reduce by this rank
  double communication_seconds = 0;   // time with an all-reduce in flight, as this rank saw it: an upper bound
  double exposed_seconds = 0;         // the part of it spent waiting at the end of backward (on CUDA: host time)
  std::int64_t rebuilds = 0;          // of the buckets: 0 or 1, plus one for each loaded order
};

class DistributedDataParallel {
 public:
  DistributedDataParallel(torch::nn::Module& module, std::shared_ptr<Communicator> comm, DdpOptions options = {});
  ~DistributedDataParallel();
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// While a NoSync is alive, backward() accumulates locally and sends nothing. The first backward() after the last
  /// guard is destroyed averages the accumulated sum. So guard all micro-batches but the last.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(std::shared_ptr<Reducer> reducer);
    NoSync(NoSync&&) noexcept = default;
    NoSync& operator=(NoSync&&) = delete;
    ~NoSync();

   private:
    std::shared_ptr<Reducer> reducer_;
  };
  NoSync no_sync();

  /// Collective: copies rank 0's buffers to all ranks.
  void broadcast_buffers();

  /// The synchronised parameters with their names. Each appears once.
  const std::vector<NamedTensor>& parameters() const noexcept;
  /// Parameter indices of each bucket, in the order in which buckets are sent.
  const std::vector<std::vector<std::size_t>>& buckets() const noexcept;
  DdpStatistics statistics() const;

  /// Appends "layout.ddp.bucket_order". If a load writes an order into it, the next synchronised backward pass adopts
  /// that order.
  void collect_state(TrainState& state) const;

 private:
  std::shared_ptr<Communicator> comm_;
  DdpOptions options_;
  std::vector<NamedTensor> buffers_;
  std::shared_ptr<Reducer> reducer_;
};

}  // namespace phalanx
