#include "phalanx/parallel/tensor/vocab_parallel.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/kernels/frozen_weight.h"
#include "phalanx/kernels/fusible.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/kernels/row_kernels.h"
#include "phalanx/kernels/weight_product.h"
#include "phalanx/tensor/scale_in_place.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx {
namespace {

constexpr std::int64_t kTokens = 512;  // per block; a fixed number, so that sums over blocks have fixed bits

struct HeadParts : torch::CustomClassHolder {
  at::Tensor dh;  // undefined if it is not needed
  std::optional<EarlyWeightGradient> dweight;
  at::Tensor wide, weight;  // in place of dweight, for a float16 weight: float32
  kernels::LowRankRows low;
  at::Tensor factor;  // 0-dim, fp32: what all of them are still to be multiplied by; undefined: 1
};

// One block of tokens: its logits, then their exponentials, then their gradients.
struct Block {
  std::int64_t from = 0, count = 0;
  at::Tensor logits;     // fp32 [count, rows]
  at::Tensor ignored;    // [count], whether the token has no loss
  at::Tensor owned;      // [count], whether the label is one of this rank's ids
  at::Tensor column;     // [count], which column; 0 if it is not
  at::Tensor mine, all;  // [3, count] and [ranks, 3, count]: largest, sum of exponentials, label's logit
  Work gather;
};

/// fp32 [tokens]: NaN where a label is neither an id nor kIgnoredLabel, else 0. The host does not wait to look.
at::Tensor nan_outside(const at::Tensor& labels, std::int64_t vocab) {
  const at::Tensor outside = labels.lt(0).logical_or_(labels.ge(vocab)).logical_and_(labels.ne(kIgnoredLabel));
  return at::zeros(labels.sizes(), labels.options().dtype(at::kFloat))
      .masked_fill_(outside, std::numeric_limits<float>::quiet_NaN());
}

class Head {
 public:
  // The gradients of 16-bit weights are made for the sum of the losses, so that small ones are not lost, and scaled in
  // the backward pass.
  Head(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& labels, const VocabShard& part,
       Communicator& comm, HeadParts& gradients, bool records, const at::Tensor& scale, double z_loss_weight,
       const at::Tensor& token_weights)
      : h_(h),
        weight_(weight),
        labels_(labels),
        part_(part),
        comm_(comm),
        gradients_(gradients),
        records_(records),
        scale_(scale),
        gradient_scale_(scale.to(at::kFloat)),
        z_loss_weight_(z_loss_weight),
        token_weights_(token_weights.defined() ? token_weights.reshape({-1}) : token_weights),
        gradient_weights_(token_weights_),
        narrow_(kernels::is_narrow_weight(h, weight)),
        fused_(kernels::fusible_product(h, weight)),
        losses_(at::empty({h.size(0)}, h.options().dtype(at::kFloat))) {
    if (!labels.device().is_cpu()) nan_outside_ = nan_outside(labels, part.count);  // checked() has looked on the CPU
    if (records && !narrow_ && weight.itemsize() == 2) scale_later();
    const std::int64_t tokens = std::min(h.size(0), kTokens);
    const int blocks = h.size(0) > tokens ? 2 : 1;
    for (int i = 0; fused_ && i < blocks; ++i) room_[i] = at::empty({tokens, weight.size(0)}, h.options());
  }

  /// The losses of the tokens, fp32, before weights and scale.
  at::Tensor token_losses() {
    std::optional<Block> before;
    int number = 0;
    for (std::int64_t from = 0; from < h_.size(0); from += kTokens, ++number) {
      Block block = begin(from, std::min(kTokens, h_.size(0) - from), room_[number % 2]);
      if (before) finish(*before);
      before = std::move(block);
    }
    if (before) finish(*before);
    return losses_;
  }
  at::Tensor run() {
    at::Tensor losses = token_losses().to(at::kDouble);
    if (token_weights_.defined()) losses = losses.mul(token_weights_);
    return losses.sum().mul_(scale_).to(at::kFloat);
  }

 private:
  void scale_later() {
    gradients_.factor = gradient_scale_;
    gradient_scale_ = at::ones_like(gradient_scale_);
    if (!token_weights_.defined()) return;
    kernels::WeightShares of_tokens = kernels::shares_of_largest(token_weights_);
    gradient_weights_ = std::move(of_tokens.shares);
    gradients_.factor = gradients_.factor * of_tokens.largest;
  }

  Block begin(std::int64_t from, std::int64_t count, const at::Tensor& room) {
    Block block{.from = from, .count = count};
    const at::Tensor rows = h_.narrow(0, from, count), label = labels_.narrow(0, from, count) - part_.first;
    block.ignored = labels_.narrow(0, from, count).eq(kIgnoredLabel);
    block.owned = label.ge(0).logical_and_(label.lt(weight_.size(0)));
    block.column = label.masked_fill(block.owned.logical_not(), 0);
    if (fused_) {
      block.logits = room.narrow(0, 0, count);
      kernels::product_out(block.logits, rows, weight_);
    } else if (narrow_) {
      block.logits = at::empty({count, weight_.size(0)}, h_.options());
      kernels::product_out(block.logits, rows, weight_);
    } else {
      block.logits = at::mm(rows, weight_.t()).to(at::kFloat);
    }
    gradients_.low.add_to(block.logits, from);
    block.mine = at::empty({3, count}, block.logits.options());
    block.mine[2].copy_(block.logits.gather(1, block.column.unsqueeze(1)).squeeze(1));
    block.mine[2].masked_fill_(block.owned.logical_not(), 0.0);
    exponentials(block);
    block.all = at::empty({comm_.size(), 3, count}, block.mine.options());
    block.gather = comm_.all_gather(block.all, block.mine, {.async = true});
    return block;
  }

  void exponentials(Block& block) const {
    if (!fused_) {
      const at::Tensor largest = block.logits.amax(1);
      block.logits.sub_(largest.unsqueeze(1)).exp_();
      block.mine[0].copy_(largest);
      block.mine[1].copy_(block.logits.sum(1));
      return;
    }
    float *values = block.logits.mutable_data_ptr<float>(), *mine = block.mine.mutable_data_ptr<float>();
    const std::int64_t width = weight_.size(0), count = block.count;
    at::parallel_for(0, count, 16, [&](std::int64_t first, std::int64_t last) {
      kernels::row_kernels().exponentials(last - first, width, values + first * width, mine + first,
                                          mine + count + first);
    });
  }

  // With the other ranks' values: computes the losses, and the factors that turn the exponentials into gradients.
  void finish(Block& block) {
    block.gather.wait();
    const at::Tensor largest = block.all.select(1, 0).amax(0);             // [count]
    const at::Tensor shares = block.all.select(1, 0).sub(largest).exp_();  // [ranks, count]
    const at::Tensor sum = shares.mul(block.all.select(1, 1)).sum(0);      // [count]
    at::Tensor losses = largest.sub(block.all.select(1, 2).sum(0)).add_(sum.log()), z;
    if (z_loss_weight_ != 0) {
      z = largest.add(sum.log());
      losses.add_(z.square(), z_loss_weight_);
    }
    if (nan_outside_.defined()) losses.add_(nan_outside_.narrow(0, block.from, block.count));
    losses_.narrow(0, block.from, block.count).copy_(losses.masked_fill_(block.ignored, 0.0));
    if (!records_) return;
    at::Tensor factor = shares[comm_.rank()].div(sum).mul_(gradient_scale_);
    if (z.defined()) factor.mul_(z.mul(2 * z_loss_weight_).add_(1));
    at::Tensor own = block.owned.to(at::kFloat).mul_(gradient_scale_).neg_();
    if (gradient_weights_.defined()) {
      const at::Tensor weights = gradient_weights_.narrow(0, block.from, block.count);
      factor.mul_(weights);
      own.mul_(weights);
    }
    if (nan_outside_.defined()) factor.add_(nan_outside_.narrow(0, block.from, block.count));
    factor = factor.masked_fill_(block.ignored, 0.0).contiguous();
    to_gradients(block, factor, own);
    const at::Tensor dlogits = fused_ || narrow_ ? block.logits : block.logits.to(weight_.scalar_type());
    if (gradients_.dh.defined()) {
      kernels::input_gradient_out(gradients_.dh.narrow(0, block.from, block.count), dlogits, weight_);
    }
    if (gradients_.dweight) {
      gradients_.dweight->out().addmm_(dlogits.t(), h_.narrow(0, block.from, block.count), block.from == 0 ? 0.0 : 1.0);
    }
    if (gradients_.wide.defined()) {
      kernels::add_weight_product(dlogits, h_.narrow(0, block.from, block.count),
                                  {gradients_.wide, block.from == 0 ? 0.0 : 1.0, at::Tensor()});
    }
    gradients_.low.add_gradients(block.logits, block.from);
  }

  void to_gradients(Block& block, const at::Tensor& factor, const at::Tensor& own) const {
    if (!fused_) {
      block.logits.mul_(factor.unsqueeze(1));
    } else {
      float* values = block.logits.mutable_data_ptr<float>();
      const float* factors = factor.const_data_ptr<float>();
      const std::int64_t width = weight_.size(0);
      at::parallel_for(0, block.count, 16, [&](std::int64_t first, std::int64_t last) {
        kernels::row_kernels().scale_rows(last - first, width, factors + first, values + first * width);
      });
    }
    block.logits.scatter_add_(1, block.column.unsqueeze(1), own.unsqueeze(1));
  }

  const at::Tensor &h_, &weight_, &labels_;
  const VocabShard& part_;
  Communicator& comm_;
  HeadParts& gradients_;
  bool records_;
  at::Tensor scale_, gradient_scale_;  // 0-dim, float64 and fp32: 1 / divisor
  double z_loss_weight_;
  at::Tensor token_weights_, gradient_weights_;  // fp32 [tokens]; undefined: 1
  bool narrow_, fused_;
  at::Tensor nan_outside_;  // undefined on the CPU
  at::Tensor losses_;
  std::array<at::Tensor, 2> room_;
};

/// 1 / divisor, float64 on the labels' device. The host waits for nothing.
at::Tensor inverse(const std::optional<double>& divisor, const at::Tensor& labels) {
  const auto options = at::TensorOptions(at::kDouble).device(labels.device());
  return divisor ? at::full({}, 1.0 / *divisor, options) : labels.ne(kIgnoredLabel).sum().to(at::kDouble).reciprocal_();
}

/// Under autocast a norm's output may have 16 bits.
at::Tensor checked(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& labels, const VocabShard& part) {
  if (labels.device().is_cpu()) kernels::check_labels(labels.contiguous(), part.count);
  if (h.numel() == 0) throw Error("vocabulary_parallel_cross_entropy: no tokens");
  return kernels::is_narrow_weight(h, weight) ? h : h.to(weight.scalar_type());
}

struct VocabParallelCrossEntropy : torch::autograd::Function<VocabParallelCrossEntropy> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& h_in, const at::Tensor& weight,
                            const at::Tensor& labels, const VocabShard& part, const std::shared_ptr<Communicator>& comm,
                            std::optional<double> divisor, double z_loss_weight,
                            const std::optional<at::Tensor>& token_weights, const std::optional<at::Tensor>& low_x,
                            const std::optional<at::Tensor>& low_weight, bool record) {
    const at::Tensor h = h_in.reshape({-1, h_in.size(-1)}).contiguous();
    auto gradients = c10::make_intrusive<HeadParts>();
    gradients->low = kernels::LowRankRows(low_x, low_weight, record);
    if (record && h_in.requires_grad()) gradients->dh = at::empty_like(h);
    if (record && weight.requires_grad() && weight.scalar_type() == at::kHalf) {
      gradients->wide = at::empty(weight.sizes(), weight.options().dtype(at::kFloat));
      gradients->weight = weight;
    } else if (record && weight.requires_grad()) {
      gradients->dweight.emplace(weight);
    }
    const at::Tensor flat_labels = labels.reshape({-1}).contiguous();
    at::Tensor loss = Head(h, weight, flat_labels, part, *comm, *gradients, record, inverse(divisor, flat_labels),
                           z_loss_weight, token_weights.value_or(at::Tensor()))
                          .run();
    if (gradients->dh.defined()) gradients->dh = gradients->dh.view(h_in.sizes());
    if (record) ctx->saved_data["gradients"] = c10::IValue::make_capsule(std::move(gradients));
    return loss;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto found = ctx->saved_data.find("gradients");
    if (found == ctx->saved_data.end()) {
      throw Error(
          "vocabulary_parallel_cross_entropy: a second backward through the same loss; compute the loss again instead");
    }
    const auto capsule = std::move(found->second).toCapsule();
    ctx->saved_data.erase(found);
    auto& gradients = static_cast<HeadParts&>(*capsule);
    at::Tensor dh = std::move(gradients.dh), dweight;
    kernels::LowRankRows::Gradients low;
    const at::Tensor total = gradients.factor.defined() ? grads[0] * gradients.factor : grads[0];
    if (gradients.wide.defined()) dweight = deliver_float32_sum(gradients.weight, gradients.wide, total);
    if (total.device().is_cpu()) {
      const float factor = total.item<float>();
      if (dh.defined() && factor != 1.0F) scale_in_place(dh, factor);
      if (gradients.dweight) dweight = gradients.dweight->deliver(factor);
      low = gradients.low.deliver(factor);
    } else {  // the host does not wait for the factor
      if (dh.defined()) scale_in_place(dh, total);
      if (gradients.dweight) dweight = gradients.dweight->deliver(total);
      low = gradients.low.deliver(total);
    }
    const at::Tensor none;
    return {std::move(dh),    std::move(dweight),    none, none, none, none, none, none,
            std::move(low.x), std::move(low.weight), none};
  }
};

}  // namespace

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& h_in, const at::Tensor& weight, const at::Tensor& labels,
                                        const VocabShard& part, const std::shared_ptr<Communicator>& group,
                                        std::optional<double> divisor, double z_loss_weight,
                                        const at::Tensor& token_weights, const kernels::LowRank& low_in) {
  const at::Tensor h = checked(h_in, weight, labels, part);
  kernels::require_divisor(divisor);
  const kernels::LowRank low = low_in.to(at::kFloat);  // as the logits are
  const bool record =
      at::GradMode::is_enabled() && (h.requires_grad() || weight.requires_grad() || low.requires_grad());
  const auto given = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  return VocabParallelCrossEntropy::apply(h, weight, labels, part, group, divisor, z_loss_weight, given(token_weights),
                                          given(low.x), given(low.weight), record);
}

at::Tensor vocab_parallel_token_losses(const at::Tensor& h_in, const at::Tensor& weight, const at::Tensor& labels,
                                       const VocabShard& part, const std::shared_ptr<Communicator>& group,
                                       const kernels::LowRank& low_in) {
  const at::NoGradGuard no_grad;
  const at::Tensor h = checked(h_in, weight, labels, part).reshape({-1, h_in.size(-1)}).contiguous();
  const at::Tensor flat_labels = labels.reshape({-1}).contiguous();
  HeadParts no_gradients;
  if (const kernels::LowRank low = low_in.to(at::kFloat); low.defined()) {
    no_gradients.low = kernels::LowRankRows(low.x, low.weight, /*records=*/false);
  }
  const at::Tensor scale = at::ones({}, at::TensorOptions(at::kDouble).device(labels.device()));
  return Head(h, weight, flat_labels, part, *group, no_gradients, /*records=*/false, scale, 0, {})
      .token_losses()
      .view(labels.sizes());
}

}  // namespace phalanx
