// A mixture of experts: each token goes through few of many feed-forward nets, and their weighted results are summed.
//
//   p = softmax(gate x)                      over all experts, in fp32
//   y = sum over the k experts e of the largest p:  p_e / (sum of these k) * expert_e(x)
//
// This is Mixtral's formula. A rank has all experts, its rows and columns of each (tensor parallelism), or some of them
// (expert parallelism: parallel/expert/expert_parallel.h). In training every expert runs, even with no token. So all
// parameters get a gradient in every step and on every rank, zeros if no token came: DistributedDataParallel and
// FullyShardedDataParallel wait for all gradients. In inference mode an expert without tokens is skipped.
//
// There is no auxiliary loss to balance the experts' load.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "phalanx/nn/feed_forward.h"

namespace phalanx::nn {

struct MixtureOptions {
  std::int64_t dim = 0;
  std::int64_t hidden = 0;             // of each expert
  std::int64_t experts = 0;            // 1 or more
  std::int64_t experts_per_token = 0;  // 1 to experts
};

/// The experts of one layer, or those that this rank has. Children are named by the experts' numbers.
class Experts : public Module {
 public:
  Experts(const MixtureOptions& options, TensorOptionsOfModule tensor);

  /// Rows sorted by expert, and how many belong to each of those that are here -> [rows, dim], in the same order.
  at::Tensor forward(const at::Tensor& rows, const std::vector<std::int64_t>& counts);

  /// Keeps the experts first, ..., first + count - 1 and removes the others.
  void keep(std::int64_t first, std::int64_t count);
  const std::map<std::int64_t, std::shared_ptr<FeedForward>>& nets() const noexcept { return nets_; }

 private:
  std::map<std::int64_t, std::shared_ptr<FeedForward>> nets_;  // by number
};

class MixtureOfExperts : public Positionwise {
 public:
  explicit MixtureOfExperts(const MixtureOptions& options, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x) override;  // [..., dim] -> [..., dim]
  std::vector<Linear*> last_projections() const override;

  const MixtureOptions& options() const noexcept { return options_; }

  /// Replaces the call of `experts`: gets rows sorted by expert and the number of rows of every expert of the layer, and
  /// returns the experts' results in the same order. For experts that other ranks have.
  using Exchange = std::function<at::Tensor(const at::Tensor& rows, const std::vector<std::int64_t>& counts)>;
  void set_exchange(Exchange exchange) { exchange_ = std::move(exchange); }
  bool has_exchange() const noexcept { return static_cast<bool>(exchange_); }

  std::shared_ptr<Linear> gate;  // [experts, dim]
  std::shared_ptr<Experts> experts;

 private:
  MixtureOptions options_;
  Exchange exchange_;
};

}  // namespace phalanx::nn
