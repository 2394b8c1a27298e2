// One step of a pipeline written out (GPipe): each rank holds some layers of the deep MLP, and the batch goes through
// them in micro-batches. pipeline_by_hand.cc trains with it.
//
//   PipelineByHand by_hand(world, layers_of_this_rank, device);
//   const double loss = by_hand.step(batch);              // forward and backward; the optimizer's step follows
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "recipes/deep_mlp.h"
#include "recipes/recipe.h"

class PipelineByHand {
 public:
  static constexpr int kMicroBatches = 4;
  static constexpr std::int64_t kRows = deep_mlp::kBatch / kMicroBatches;

  PipelineByHand(phalanx::Communicator& world, deep_mlp::Net& part, at::Device device)
      : world_(world), part_(part), here_(device), rank_(world.rank()) {}

  /// Returns the mean loss of the micro-batches, on every rank.
  double step(const at::Tensor& batch) {
    const double loss = forward(batch);
    backward();
    for (const auto& send : sends_) send.wait();
    sends_.clear();
    at::Tensor shared = at::full({}, loss, here_);
    world_.broadcast(shared, {.root = world_.size() - 1});
    return shared.item<double>();
  }
  const std::string& log() const { return log_; }  // of all passes so far, in their order

 private:
  double forward(const at::Tensor& batch) {
    double loss = 0;
    if (!is_first()) next_ = receive(rank_ - 1);
    for (std::size_t m = 0; m < kMicroBatches; ++m) {
      at::Tensor x = batch.narrow(0, static_cast<std::int64_t>(m) * kRows, kRows);
      if (!is_first()) x = arrived(m, rank_ - 1).detach().requires_grad_();
      inputs_[m] = x;
      outputs_[m] = part_.forward(x);
      log_ += fmt::format("forward of micro-batch {}: {}\n", m, recipe::summary(outputs_[m]));
      if (is_last()) {
        outputs_[m] = deep_mlp::loss_of(outputs_[m]);
        loss += outputs_[m].item<double>() / kMicroBatches;
      } else {  // in flight while the next one is computed
        sends_.push_back(world_.send(outputs_[m].detach(), rank_ + 1, {.async = true}));
      }
    }
    return loss;
  }

  void backward() {
    if (!is_last()) next_ = receive(rank_ + 1);
    for (std::size_t m = 0; m < kMicroBatches; ++m) {
      at::Tensor dy = at::full({}, 1.0 / kMicroBatches, here_);  // of the mean of the micro-batches' losses
      if (!is_last()) dy = arrived(m, rank_ + 1);
      torch::autograd::backward({outputs_[m]}, {dy});
      log_ += fmt::format("backward of micro-batch {}\n", m);
      if (!is_first()) sends_.push_back(world_.send(inputs_[m].grad(), rank_ - 1, {.async = true}));
      outputs_[m].reset();  // the graph, and with it the activations
    }
  }

  using Incoming = std::pair<at::Tensor, phalanx::Work>;  // a receive in flight
  Incoming receive(int from) {
    const at::Tensor room = at::empty({kRows, deep_mlp::kDim}, here_);
    return {room, world_.recv(room, from, {.async = true})};
  }
  /// Micro-batch m, whose receive is in flight. The next one may arrive while this one is computed.
  at::Tensor arrived(std::size_t m, int from) {
    const auto [tensor, arrival] = next_;
    if (m + 1 < kMicroBatches) next_ = receive(from);
    arrival.wait();
    return tensor;
  }
  bool is_first() const { return rank_ == 0; }
  bool is_last() const { return rank_ + 1 == world_.size(); }

  phalanx::Communicator& world_;
  deep_mlp::Net& part_;
  at::TensorOptions here_;
  int rank_;
  std::array<at::Tensor, kMicroBatches> inputs_, outputs_;
  std::vector<phalanx::Work> sends_;
  Incoming next_;
  std::string log_;
};
