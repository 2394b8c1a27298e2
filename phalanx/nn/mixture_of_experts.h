// A mixture of experts: each token goes through few of many feed-forward nets, and their weighted results are summed.
//
//   p = softmax(gate x)                      over all experts, in fp32
//   y = sum over the k experts e of the largest p:  p_e / (sum of these k) * expert_e(x)
//
// This is the formula of Mixtral and of Qwen3's mixtures; routing.h has others. It is that of GPT-OSS, too, which takes
// the softmax of the k largest logits: p_e / (sum of these k) is the same. DeepSeek's have a net beside the experts
// that all tokens go through (shared_experts), whose result is added. A rank has all experts, its rows and columns of
// each (tensor parallelism), or some of them (expert parallelism: parallel/expert/expert_parallel.h). In training every
// expert runs, even with no token. So all parameters get a gradient in every step and on every rank, zeros if no token
// came: DistributedDataParallel and FullyShardedDataParallel wait for all gradients. In inference mode an expert
// without tokens is skipped.
//
//   MixtureOfExperts mixture({.dim = 64, .hidden = 176, .experts = 8, .experts_per_token = 2});
//   mixture.set_losses({.load_weight = 0.01 / sequences});
//   const at::Tensor y = call(mixture, x);   // [sequences, tokens, dim] -> the same
//
// In training, losses of the router can be added (router_losses.h), its input can have noise (router_jitter.h), and
// experts a capacity (expert_capacity.h).
//
// A bias for each expert can even out the load, too (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2). It is added to p
// where the experts of a token are chosen, and nowhere else. It has no gradient: whoever sets it moves it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "phalanx/kernels/grouped_feed_forward.h"
#include "phalanx/nn/expert_capacity.h"
#include "phalanx/nn/feed_forward.h"
#include "phalanx/nn/router_jitter.h"
#include "phalanx/nn/router_losses.h"
#include "phalanx/nn/routing.h"

namespace phalanx::nn {

struct MixtureOptions {
  std::int64_t dim = 0;
  std::int64_t hidden = 0;             // of each expert
  std::int64_t experts = 0;            // 1 or more
  std::int64_t experts_per_token = 0;  // 1 to experts
  bool normalise = true;               // a token's weights add up to 1
  std::int64_t shared_hidden = 0;      // of a net that all tokens go through; 0: none
  // As of RoutingOptions:
  RouterForm router = RouterForm::softmax;
  std::int64_t groups = 0, groups_per_token = 0;
  double scaling = 1.0;
  bool float32_router = false;  // the gate's product is in fp32, whatever the types of the run
  FeedForwardOptions net = {};  // of the experts
  bool gate_bias = false;

  RoutingOptions routing() const {
    return {.experts_per_token = experts_per_token,
            .normalise = normalise,
            .form = router,
            .groups = groups,
            .groups_per_token = groups_per_token,
            .scaling = scaling};
  }
};

/// The experts of one layer, or those that this rank has. Children are named by the experts' numbers.
class Experts : public Module {
 public:
  Experts(const MixtureOptions& options, TensorOptionsOfModule tensor);

  /// Rows sorted by expert, and how many belong to each of those that are here -> [rows, dim], in the same order.
  at::Tensor forward(const at::Tensor& rows, const std::vector<std::int64_t>& counts);
  /// The same where only the device knows how many: `ends` and `covers_all` as of kernels::grouped_feed_forward().
  /// REQUIRES: can_be_grouped(rows).
  at::Tensor forward(const at::Tensor& rows, const at::Tensor& ends, bool covers_all);
  /// Whether the experts can be grouped products (kernels/grouped_feed_forward.h).
  bool can_be_grouped(const at::Tensor& rows) const;
  /// On a device the weights of all experts become adjacent, in the order of grouped products.
  std::vector<std::vector<at::Tensor>> one_products() const override;

  /// Keeps the experts first, ..., first + count - 1 and removes the others.
  void keep(std::int64_t first, std::int64_t count);
  const std::map<std::int64_t, std::shared_ptr<FeedForward>>& nets() const noexcept { return nets_; }

 private:
  kernels::ExpertWeights weights() const;

  std::map<std::int64_t, std::shared_ptr<FeedForward>> nets_;  // by number
};

/// Of the experts of one layer. They are read or changed in each forward pass; undefined: there is none.
struct ExpertTensors {
  at::Tensor bias;  // [experts] in fp32, added where experts are chosen
  /// int64 [experts]: how many tokens chose each. A training pass adds its tokens once, also where it is computed
  /// again.
  at::Tensor counts;
  at::Tensor dropped = {};  // int64, 0-dim: likewise, how many choices were beyond an expert's capacity
};

/// What a router made of the tokens of a pass.
struct RouterChoice {
  at::IntArrayRef shape;      // of the mixture's input
  const at::Tensor& logits;   // [tokens, experts], in the gate's type
  const at::Tensor& bias;     // fp32 [experts]; undefined: none
  const at::Tensor& experts;  // int64 [tokens, experts_per_token]
};

class MixtureOfExperts : public Positionwise {
 public:
  explicit MixtureOfExperts(const MixtureOptions& options, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x) override;  // [..., dim] -> [..., dim]
  std::vector<Linear*> last_projections() const override;

  const MixtureOptions& options() const noexcept { return options_; }

  /// Replaces the call of `experts`: gets rows sorted by expert and the number of rows of every expert of the layer,
  /// and returns the experts' results in the same order. For experts that other ranks have.
  using Exchange = std::function<at::Tensor(const at::Tensor& rows, const std::vector<std::int64_t>& counts)>;
  void set_exchange(Exchange exchange) { exchange_ = std::move(exchange); }
  bool has_exchange() const noexcept { return static_cast<bool>(exchange_); }
  /// Added from now on by passes in training mode that record gradients. With a load_weight forward() throws Error
  /// unless the input is [sequences, T, dim], and is collective over the ranks of sum_counts.
  void set_losses(RouterLosses losses) { losses_ = std::move(losses); }
  const RouterLosses& losses() const noexcept { return losses_; }
  /// From now on of what the router sees in training mode. forward() then throws Error unless the input is
  /// [sequences, T, dim].
  void set_jitter(RouterJitter jitter) { jitter_ = std::move(jitter); }
  const RouterJitter& jitter() const noexcept { return jitter_; }
  /// From now on of all experts in training mode. forward() then throws Error unless the input is [sequences, T, dim],
  /// and is collective over the ranks of the cut.
  void set_capacity(ExpertCapacity capacity) { capacity_ = std::move(capacity); }
  const ExpertCapacity& capacity() const noexcept { return capacity_; }
  /// Read, and counted in, from now on. They are shared with the caller, and on the mixture's device.
  void set_tensors(ExpertTensors tensors) { tensors_ = std::move(tensors); }
  /// Called in each pass; tokens go to the experts that it returns, in the shape of RouterChoice::experts. Null: to
  /// those that the router chose.
  using Choose = std::function<at::Tensor(const RouterChoice& choice)>;
  void set_choose(Choose choose) { choose_ = std::move(choose); }

  std::shared_ptr<Linear> gate;  // [experts, dim]
  std::shared_ptr<Experts> experts;
  std::shared_ptr<FeedForward> shared_experts;  // null without shared_hidden

 private:
  MixtureOptions options_;
  Exchange exchange_;
  RouterLosses losses_;
  RouterJitter jitter_;
  ExpertCapacity capacity_;
  ExpertTensors tensors_;
  Choose choose_;
};

}  // namespace phalanx::nn
