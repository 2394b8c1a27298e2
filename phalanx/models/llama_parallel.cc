#include "phalanx/models/llama_parallel.h"

#include <ATen/core/Tensor.h>

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/models/config/vocabulary_split.h"
#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/parallel/tensor/functional_collectives.h"
#include "phalanx/parallel/tensor/vocab_parallel.h"

namespace phalanx::models {

namespace {

bool is_mixture(const nn::Positionwise& net) { return dynamic_cast<const nn::MixtureOfExperts*>(&net) != nullptr; }

}  // namespace

std::vector<ParallelStyle> llama_tensor_plan(const Llama& model, int ranks, const ActivationLayout& between,
                                             bool overlap) {
  const ColwiseParallel inner{.input = ActivationLayout::shared()};
  const auto kv_heads = static_cast<int>(model.config().n_kv_heads);
  ColwiseParallel key_value = inner;
  if (ranks > kv_heads) key_value.copies = ranks / kv_heads;
  const auto any_layer = [&](auto member) {
    return std::ranges::any_of(model.layers, [&](const auto& layer) { return ((*layer).*member) != nullptr; });
  };
  const ActivationLayout shared = ActivationLayout::shared();
  const auto last = [&](bool overlaps) {
    return RowwiseParallel{.output = overlaps ? ActivationLayout::partial() : between};
  };
  std::vector<ParallelStyle> plan;
  // Biases behind the last projection, experts and latent attention are not overlapped.
  const bool is_latent = model.config().has_latent_attention();
  const bool overlaps_attention = overlap && !model.config().has_output_bias() && !is_latent;
  const bool overlaps_net = overlaps_attention && !model.config().has_experts();
  const bool norms_all_heads = model.config().traits().qk_norm == QkNorm::all_heads;
  const auto exchange_around = [&](const std::string& layers, bool overlaps) {
    if (overlaps) {
      plan.push_back({layers, Overlapped{.activations = between}});
    } else {
      plan.push_back({layers, PrepareModuleInput{.from = between, .to = shared}});
    }
  };
  const bool splits = between.kind == ActivationLayout::Kind::split;
  const bool by_ids = splits_vocabulary(model.config(), ranks);
  if (model.tok_embeddings && by_ids) {
    plan.push_back({"tok_embeddings", RowwiseParallel{.output = between}});
  } else if (model.tok_embeddings && splits) {
    plan.push_back({"tok_embeddings", PrepareModuleOutput{.from = ActivationLayout::replicated(), .to = between}});
  }
  if (model.pos_embeddings && splits) plan.push_back({"pos_embeddings", SequenceParallel{}});
  if (any_layer(&nn::TransformerBlock::attention)) {
    exchange_around("layers.*.attention", overlaps_attention);
    if (is_latent) {
      // Every rank makes the latent vectors of all heads, and heads of its own from them. So each rank's gradients of
      // what makes these vectors are addends.
      const bool has_rank = model.config().q_lora_rank > 0;
      std::vector<const char*> whole = {"wkv_a", "kv_norm"};
      if (has_rank) whole.insert(whole.end(), {"wq_a", "q_norm"});
      for (const char* name : whole) plan.push_back({fmt::format("layers.*.attention.{}", name), SequenceParallel{}});
      plan.push_back({has_rank ? "layers.*.attention.wq_b" : "layers.*.attention.wq", inner});
      plan.push_back({"layers.*.attention.wkv_b", inner});
    } else {
      plan.push_back({"layers.*.attention.wq", inner});
      plan.push_back({"layers.*.attention.w[kv]", key_value});
    }
    plan.push_back({"layers.*.attention.wo", last(overlaps_attention)});
    if (model.config().has_sinks()) plan.push_back({"layers.*.attention", SplitSinks{}});
    if (norms_all_heads) {
      plan.push_back({"layers.*.attention.q_norm", SplitNorm{}});
      plan.push_back({"layers.*.attention.k_norm", SplitNorm{.copies = key_value.copies}});
    } else if (model.config().has_qk_norm()) {  // they see a part of the heads
      plan.push_back({"layers.*.attention.[qk]_norm", SequenceParallel{}});
    }
  }
  const auto any_net = [&](bool with_experts) {
    return std::ranges::any_of(model.layers, [&](const auto& layer) {
      return layer->feed_forward && is_mixture(*layer->feed_forward) == with_experts;
    });
  };
  if (any_net(/*with_experts=*/true)) {
    // Every rank sends the same tokens to its part of each expert, and its results are addends. The gate weighs these
    // results, so each rank's gradient of the gate is an addend, too.
    const RowwiseParallel addends{.output = ActivationLayout::partial()};
    exchange_around("layers.*.moe", false);
    plan.push_back({"layers.*.moe", PrepareModuleOutput{.from = ActivationLayout::partial(), .to = between}});
    plan.push_back({"layers.*.moe.gate", SequenceParallel{}});
    plan.push_back({"layers.*.moe.experts.*.w[13]", inner});
    plan.push_back({"layers.*.moe.experts.*.w2", addends});
    if (model.config().shared_experts > 0) {
      plan.push_back({"layers.*.moe.shared_experts.w[13]", inner});
      plan.push_back({"layers.*.moe.shared_experts.w2", addends});
    }
  }
  if (any_net(/*with_experts=*/false)) {
    exchange_around("layers.*.feed_forward", overlaps_net);
    plan.push_back({"layers.*.feed_forward.w[13]", inner});
    plan.push_back({"layers.*.feed_forward.w2", last(overlaps_net)});
  }
  if (model.output && by_ids) plan.push_back({"output", inner});
  if (!splits) return plan;
  // These norms see a part of the positions.
  if (model.norm) plan.push_back({"norm", SequenceParallel{}});
  for (const auto& [norms, member] : {std::pair("layers.*.attention_norm", &nn::TransformerBlock::attention_norm),
                                      {"layers.*.ffn_norm", &nn::TransformerBlock::ffn_norm},
                                      {"layers.*.attention_post_norm", &nn::TransformerBlock::attention_post_norm},
                                      {"layers.*.ffn_post_norm", &nn::TransformerBlock::ffn_post_norm}}) {
    if (any_layer(member)) plan.push_back({norms, SequenceParallel{}});
  }
  return plan;
}

std::vector<std::shared_ptr<Communicator>> parallelize_llama(Llama& model, const DeviceMesh& mesh,
                                                             const LlamaParallelOptions& options) {
  const LlamaConfig& config = model.config();
  const bool has_axis = mesh.has("tp");
  const int ranks = has_axis ? mesh.size("tp") : 1;
  if (options.split_dim != 0 && options.split_dim != 1) {
    throw ConfigError(
        fmt::format("tensor parallel: split_dim = {}: expected 0 (sequences) or 1 (positions)", options.split_dim));
  }
  const bool by_positions = options.sequence_parallel && options.split_dim == 1;
  const ActivationLayout between =
      options.sequence_parallel ? ActivationLayout::split(options.split_dim) : ActivationLayout::replicated();
  config.validate_tensor_parallel(ranks, by_positions ? options.seq_len : 0);
  auto groups = parallelize_module(
      model, mesh, llama_tensor_plan(model, ranks, between, options.sequence_parallel && options.overlap));
  if (ranks == 1) return groups;
  const std::shared_ptr<Communicator> group = mesh.communicator("tp");
  LlamaHead head{.parts = options.sequence_parallel ? ranks : 1,
                 .parts_dim = static_cast<std::size_t>(options.split_dim),
                 .part = options.sequence_parallel ? mesh.coordinate("tp") : 0};
  // Of the adapter, if the output layer has one.
  const auto low_rank = [layer = model.output.get()](const at::Tensor& h) {
    return layer != nullptr ? layer->low_rank(h) : kernels::LowRank();
  };
  if (!splits_vocabulary(config, ranks)) {
    const auto whole = [=](const at::Tensor& h) { return convert(h, between, ActivationLayout::replicated(), group); };
    head.logits = [=](const at::Tensor& h, const at::Tensor& weight) {
      const at::Tensor all = whole(h);
      return low_rank(all).added_to(kernels::linear(all, weight));
    };
    head.loss = [=](const at::Tensor& h, const at::Tensor& weight, const at::Tensor& labels,
                    std::optional<double> divisor, double z_loss_weight, const at::Tensor& token_weights) {
      const at::Tensor all = whole(h);
      return kernels::linear_cross_entropy(all, weight, labels, divisor, z_loss_weight, token_weights, low_rank(all));
    };
    head.token_losses = [=](const at::Tensor& h, const at::Tensor& weight, const at::Tensor& labels) {
      const at::Tensor all = whole(h);
      return kernels::linear_token_losses(all, weight, labels, low_rank(all));
    };
    model.set_head(std::move(head));
    return groups;
  }
  const std::int64_t vocab = config.vocab_size;
  const VocabShard part{.first = vocab / ranks * mesh.coordinate("tp"), .count = vocab};
  head.logits = [=](const at::Tensor& h, const at::Tensor& weight) {
    const at::Tensor shared = convert(h, between, ActivationLayout::shared(), group);
    return gather_from_group(low_rank(shared).added_to(kernels::linear(shared, weight)), -1, group);
  };
  head.loss = [=](const at::Tensor& h, const at::Tensor& weight, const at::Tensor& labels,
                  std::optional<double> divisor, double z_loss_weight, const at::Tensor& token_weights) {
    const at::Tensor shared = convert(h, between, ActivationLayout::shared(), group);
    return vocab_parallel_cross_entropy(shared, weight, labels, part, group, divisor, z_loss_weight, token_weights,
                                        low_rank(shared));
  };
  head.token_losses = [=](const at::Tensor& h, const at::Tensor& weight, const at::Tensor& labels) {
    const at::Tensor shared = convert(h, between, ActivationLayout::shared(), group);
    return vocab_parallel_token_losses(shared, weight, labels, part, group, low_rank(shared));
  };
  model.set_head(std::move(head));
  return groups;
}

}  // namespace phalanx::models
