#include "phalanx/models/llama.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/base/ignored_label.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/models/config/llama_json.h"
#include "phalanx/nn/mixture_of_experts.h"

namespace phalanx::models {
namespace {

constexpr std::int64_t kLikelihoodRows = 512;  // logits held at once: 256 MiB of a vocabulary of 128 Ki

/// A list of layers, named by their numbers in the whole model.
class Layers : public nn::Module {
 public:
  Layers() : nn::Module("Layers") {}
  void add(std::int64_t number, const std::shared_ptr<nn::TransformerBlock>& layer) {
    register_module(std::to_string(number), layer);
  }
};

nn::PositionwiseKind positionwise(const LlamaConfig& config, std::int64_t layer) {
  if (config.has_experts(layer)) return nn::PositionwiseKind::experts;
  return config.is_gpt2() ? nn::PositionwiseKind::gelu : nn::PositionwiseKind::swiglu;
}

nn::LatentAttentionOptions latent_attention(const LlamaConfig& config) {
  if (!config.has_latent_attention()) return {};
  const double factor = config.rope_scaling.score_factor();
  return {.dim = config.dim,
          .n_heads = config.n_heads,
          .q_rank = config.q_lora_rank,
          .kv_rank = config.kv_lora_rank,
          .head_dim = config.head_dim(),
          .rope = config.rotary_dim,
          .value_dim = config.v_head_dim,
          .query_scalar = factor == 1.0 ? 0.0 : static_cast<double>(config.head_dim()) / (factor * factor)};
}

double query_scalar(const LlamaConfig& config) {
  const double factor = config.attention_multiplier;  // of scores
  return factor != 0.0 ? 1.0 / (factor * factor) : config.query_scalar;
}

nn::MixtureOptions mixture(const LlamaConfig& config) {
  return {.dim = config.dim,
          .hidden = config.ffn_hidden,
          .experts = config.experts,
          .experts_per_token = config.experts_per_token,
          .normalise = config.normalise_routing,
          .shared_hidden = config.shared_units(),
          .router = config.traits().router,
          .groups = config.expert_groups,
          .groups_per_token = config.groups_per_token,
          .scaling = config.routed_scaling,
          .float32_router = config.has_latent_attention(),
          .net = {.activation = config.traits().activation,
                  .limit = config.activation_limit,
                  .bias = config.has_expert_net_biases()},
          .gate_bias = config.has_expert_net_biases()};
}

/// These positions of x along a dimension.
at::Tensor of_ranges(const at::Tensor& x, std::int64_t dim, const std::array<PositionRange, 2>& ranges) {
  const auto of = [&](const PositionRange& range) { return x.narrow(dim, range.first, range.count); };
  return at::cat({of(ranges[0]), of(ranges[1])}, dim);
}

nn::NormKind norm_kind(const LlamaConfig& config) {
  if (config.is_gpt2()) return nn::NormKind::layer;
  return config.traits().norms_add_one ? nn::NormKind::rms_one_plus : nn::NormKind::rms;
}

}  // namespace

Llama::Llama(const LlamaConfig& config, nn::TensorOptionsOfModule tensor) : Llama(config, full_llama(config), tensor) {}

Llama::Llama(const LlamaConfig& config, const LlamaPart& part, nn::TensorOptionsOfModule tensor)
    : nn::Module("Llama"), config_(config), part_(part) {
  config.validate();
  if (part.begin < 0 || part.end < part.begin || part.end > 2 * config.n_layers) {
    throw Error(fmt::format("Llama: half-layers {} to {} of a model of {} layers; expected a range within 0 to {}",
                            part.begin, part.end, config.n_layers, 2 * config.n_layers));
  }
  if (part.embedding || (part.head && config.tie_embeddings)) {
    tok_embeddings = register_module(
        "tok_embeddings", std::make_shared<nn::Embedding>(nn::EmbeddingOptions{config.vocab_size, config.dim}, tensor));
  }
  if (part.embedding && config.is_gpt2()) {
    pos_embeddings =
        register_module("pos_embeddings",
                        std::make_shared<nn::Embedding>(nn::EmbeddingOptions{config.max_seq_len, config.dim}, tensor));
  }
  const auto list = register_module("layers", std::make_shared<Layers>());
  nn::TransformerBlockOptions block = {.attention = {.dim = config.dim,
                                                     .n_heads = config.n_heads,
                                                     .n_kv_heads = config.n_kv_heads,
                                                     .head_dim = config.head_dim(),
                                                     .qkv_bias = config.has_qkv_bias(),
                                                     .output_bias = config.has_output_bias(),
                                                     .sinks = config.has_sinks(),
                                                     .qk_norm = config.traits().qk_norm,
                                                     .norms_add_one = config.traits().norms_add_one,
                                                     .norm_eps = config.norm_eps,
                                                     .rotary_dim = config.rotary_dim,
                                                     .query_scalar = query_scalar(config)},
                                       .latent_attention = latent_attention(config),
                                       .ffn_hidden = config.dense_units(),
                                       .activation = config.traits().activation,
                                       .mixture = mixture(config),
                                       .norms = config.traits().norms,
                                       .norm = norm_kind(config),
                                       .norm_eps = config.norm_eps,
                                       .residual_multiplier = config.residual_multiplier};
  const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(config.n_layers));
  for (std::int64_t i = part.begin / 2; 2 * i < part.end; ++i) {
    block.attention.window = config.window_of(i);
    block.attention.rotary = config.is_rotated(i);
    block.positionwise = positionwise(config, i);
    block.has_attention = part.begin <= 2 * i;
    block.has_feed_forward = 2 * i + 1 < part.end;
    layers.push_back(std::make_shared<nn::TransformerBlock>(block, tensor));
    const auto& layer = *layers.back();
    if (config.depth_scaled_init && layer.attention) {
      layer.attention->wo->set_init("weight", Init::normal(0.0, residual_std));
    }
    if (config.depth_scaled_init && layer.feed_forward) {
      for (nn::Linear* last : layer.feed_forward->last_projections()) {
        last->set_init("weight", Init::normal(0.0, residual_std));
      }
    }
    list->add(i, layers.back());
  }
  if (part.head) norm = register_module("norm", nn::make_norm(norm_kind(config), config.dim, config.norm_eps, tensor));
  if (part.head && !config.tie_embeddings) {
    output = register_module("output",
                             std::make_shared<nn::Linear>(nn::LinearOptions{config.dim, config.vocab_size}, tensor));
  }
}

Llama::Rotation Llama::make_rope(std::int64_t positions, std::int64_t longest, at::Device device) const {
  const std::int64_t rotated = config_.rotary_dim != 0 ? config_.rotary_dim : config_.head_dim();
  Rotation rotation{
      .of_all = nn::rotary_tables(
          {.head_dim = rotated, .theta = config_.rope_theta, .scaling = config_.rope_scaling, .longest = longest},
          positions, device),
      .of_window = {}};
  if (config_.window_rope_theta != 0.0) {
    rotation.of_window =
        nn::rotary_tables({.head_dim = rotated, .theta = config_.window_rope_theta, .scaling = {}}, positions, device);
  }
  return rotation;
}

Llama::Rotation Llama::rope(std::int64_t positions, std::int64_t longest, at::Device device) {
  // Tables made in inference mode could never be used in training afterwards.
  const c10::InferenceMode trainable(false);
  const RopeScaling& scaling = config_.rope_scaling;
  const bool is_stretched = scaling.depends_on_length() && longest > scaling.original_max_seq_len;
  if (is_stretched && scaling.type == RopeScalingType::dynamic) {
    return make_rope(positions, longest, device);  // of exactly this length
  }
  Rotation& kept = is_stretched ? stretched_rope_ : rope_;
  const at::Tensor& cos = kept.of_all.cos;
  if (!cos.defined() || cos.device() != device || cos.size(0) < positions) {
    kept = make_rope(positions, longest, device);
  }
  return kept;
}

Llama::Rotation Llama::rope_of_rows(const nn::KvCache& cache, std::int64_t count,
                                    const std::vector<std::int64_t>& lengths, at::Device device) {
  const auto of_pass = [&](const nn::RotaryTables& all) {
    return cache.positions().defined() ? all.at_positions(cache.positions()) : all.narrow(cache.start(), count);
  };
  const auto of_longest = [&](std::int64_t longest) {
    return rope(cache.options().max_len, longest, device).map(of_pass);
  };
  const auto [shortest, longest] = std::ranges::minmax(lengths);
  const RopeScaling& scaling = config_.rope_scaling;
  const std::int64_t original = scaling.original_max_seq_len;
  if (scaling.type != RopeScalingType::longrope || shortest > original || longest <= original) {
    return of_longest(longest);
  }
  // Rows on both sides of the length at which the angles change: each has its own.
  std::vector<std::int64_t> is_long;
  for (const std::int64_t length : lengths) is_long.push_back(length > original ? 1 : 0);
  const at::Tensor chosen = at::tensor(is_long, at::TensorOptions(at::kLong)).to(device).to(at::kBool).view({-1, 1, 1});
  const Rotation of_long = of_longest(longest);
  const nn::RotaryTables of_short = of_longest(shortest).of_all;
  return {.of_all = {at::where(chosen, of_long.of_all.cos, of_short.cos),
                     at::where(chosen, of_long.of_all.sin, of_short.sin)},
          .of_window = of_long.of_window};  // not scaled
}

const nn::RotaryTables& Llama::rope_of_layer(const Rotation& rotation, std::size_t layer) const {
  const std::int64_t number = part_.begin / 2 + static_cast<std::int64_t>(layer);
  return rotation.of_window.cos.defined() && config_.window_of(number) > 0 ? rotation.of_window : rotation.of_all;
}

void Llama::check_tokens(const at::Tensor& tokens) const {
  if (tokens.dim() != 2 || tokens.scalar_type() != at::kLong || tokens.numel() == 0) {
    throw Error(fmt::format("Llama: expected tokens of shape [batch, seq] and type int64, found {} of {} dimensions",
                            c10::toString(tokens.scalar_type()), tokens.dim()));
  }
}

void Llama::check_hidden(const at::Tensor& input) const {
  if (input.dim() != 3 || input.size(2) != config_.dim || input.numel() == 0) {
    throw Error(fmt::format("Llama ({}): expected hidden states of shape [batch, seq, {}], found [{}]", part_.text(),
                            config_.dim, fmt::join(input.sizes(), ", ")));
  }
}

void Llama::check_documents(const Rows& rows, const at::Tensor& input) const {
  const std::int64_t count = input.size(0) * (!part_.embedding && head_.parts_dim == 0 ? head_.parts : 1);
  if (rows.documents->rows() == count && rows.documents->seq_len() == rows.seq) return;
  throw Error(fmt::format("Llama: document boundaries of {} rows of {} tokens; expected those of the batch, {} of {}",
                          rows.documents->rows(), rows.documents->seq_len(), count, rows.seq));
}

void Llama::set_context(LlamaContext context) {
  context_ = std::move(context);
  for (const auto& layer : layers) {
    if (layer->attention) layer->attention->set_context_attention(context_.attention);
  }
}

void Llama::require_no_context(const char* what) const {
  if (context_.cut.ranks == 1) return;
  throw Error(
      fmt::format("Llama: {} needs whole sequences, but they are cut over {} ranks (context parallelism); "
                  "expected a model without set_context()",
                  what, context_.cut.ranks));
}

Llama::Rows Llama::rows_of(const at::Tensor& input, const std::shared_ptr<const DocumentBoundaries>& documents) const {
  part_.embedding ? check_tokens(input) : check_hidden(input);
  const bool is_cut = context_.cut.ranks > 1;
  // Hidden states of a stage are this rank's positions already; how much of them is padding is not known there.
  const std::int64_t given = input.size(1);
  Rows rows{.seq = part_.embedding ? context_.cut.padded_if_cut(given)
                                   : given * (head_.parts_dim == 0 ? 1 : head_.parts) * context_.cut.ranks,
            .documents = documents,
            .packed = nullptr};
  if ((part_.embedding ? given : is_cut ? 0 : rows.seq) > config_.max_seq_len) {
    throw Error(fmt::format("Llama: sequences of {} tokens, but max_seq_len is {}", part_.embedding ? given : rows.seq,
                            config_.max_seq_len));
  }
  if (!documents) return rows;
  if (is_cut && context_.cut.padded(documents->seq_len()) == rows.seq) rows.documents = documents->padded(rows.seq);
  check_documents(rows, input);
  if (is_cut && context_.cut.by_work) {
    rows.packed = std::make_shared<const PackedPositions>(context_.cut, *rows.documents);
  }
  return rows;
}

at::Tensor Llama::own_of_padded(const at::Tensor& x, const Rows& rows) const {
  if (context_.cut.ranks == 1) return x;
  return rows.packed ? rows.packed->own(x) : of_ranges(x, x.dim() - 1, context_.cut.ranges(rows.seq));
}

at::Tensor Llama::own_positions(const at::Tensor& ids, std::int64_t padding, const Rows& rows) const {
  const std::int64_t missing = context_.cut.padded_if_cut(ids.size(1)) - ids.size(1);
  return own_of_padded(missing > 0 ? at::constant_pad_nd(ids, {0, missing}, padding) : ids, rows);
}

// Times a number of its own, or times sqrt(dim), rounded to the type of x as transformers does.
at::Tensor Llama::scaled(const at::Tensor& x) const {
  if (config_.embedding_multiplier != 1.0) return x * config_.embedding_multiplier;
  if (!config_.traits().scales_embeddings) return x;
  const double times = std::sqrt(static_cast<double>(config_.dim));
  if (x.scalar_type() == at::kBFloat16) return x * static_cast<double>(c10::BFloat16(static_cast<float>(times)));
  if (x.scalar_type() == at::kHalf) return x * static_cast<double>(c10::Half(static_cast<float>(times)));
  return x * times;
}

at::Tensor Llama::embed(const at::Tensor& tokens, const at::Tensor& positions) {
  const at::Tensor x = scaled(call(tok_embeddings, tokens));  // [batch, seq, dim]
  return pos_embeddings ? x + call(pos_embeddings, positions) : x;
}

Llama::Rotation Llama::rope_of(const Rows& rows, at::Device device) {
  const std::int64_t seq = rows.seq;
  if (!rows.documents) {
    return rope(seq, seq, device).map([&](const nn::RotaryTables& tables) -> nn::RotaryTables {
      nn::RotaryTables all = tables.narrow(0, seq);
      if (context_.cut.ranks == 1) return all;
      const auto ranges = context_.cut.ranges(seq);
      return {of_ranges(all.cos, 0, ranges), of_ranges(all.sin, 0, ranges)};
    });
  }
  const std::int64_t longest = rows.documents->longest();
  const RopeScaling& scaling = config_.rope_scaling;
  const bool is_stretched = scaling.depends_on_length() && longest > scaling.original_max_seq_len;
  if (is_stretched && rows.documents->count() > rows.documents->rows()) {
    throw Error(
        fmt::format("Llama: a document of {} tokens among others, and rotary angles that depend on each one's "
                    "length beyond {} (rope_scaling {}); expected shorter documents, or one in each row",
                    longest, scaling.original_max_seq_len, rope_scaling_name(scaling.type)));
  }
  const at::Tensor positions = own_of_padded(rows.documents->positions(), rows);
  return rope(longest, longest, device).map([&](const nn::RotaryTables& tables) {
    return tables.at_positions(positions);
  });
}

at::Tensor Llama::learnt_positions(const Rows& rows, at::Device device) const {
  at::Tensor all = own_of_padded(
      rows.documents ? rows.documents->positions() : at::arange(rows.seq, at::TensorOptions(at::kLong).device(device)),
      rows);
  if (context_.cut.ranks > 1) all = all.clamp_max(config_.max_seq_len - 1);  // padding may be behind the last one
  const std::int64_t dim = head_.parts_dim == 1 ? all.dim() - 1 : 0;
  if (head_.parts_dim == 0 && !rows.documents) return all;  // the same for every sequence
  const std::int64_t count = all.size(dim) / head_.parts;
  return all.narrow(dim, count * head_.part, count);
}

at::Tensor Llama::hidden(const at::Tensor& whole_input, const Rows& rows) {
  const at::Tensor input = part_.embedding ? own_positions(whole_input, 0, rows) : whole_input;
  const Rotation rotation = config_.is_gpt2() ? Rotation() : rope_of(rows, input.device());
  const at::Tensor positions = pos_embeddings ? learnt_positions(rows, input.device()) : at::Tensor();
  at::Tensor x = part_.embedding ? embed(input, positions) : input;  // [batch, seq, dim]
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const nn::RotaryTables& tables = rope_of_layer(rotation, i);
    x = call(layers[i], x, tables, rows.documents);
  }
  return norm ? normed(x) : x;
}

// Logits are linear in it, so it is divided in their place.
at::Tensor Llama::normed(const at::Tensor& x) {
  const at::Tensor h = call(norm, x);
  return config_.logits_scaling == 1.0 ? h : h / config_.logits_scaling;
}

at::Tensor Llama::logits(const at::Tensor& hidden) {
  if (!head_.logits) return output ? call(output, hidden) : kernels::linear(hidden, tok_embeddings->weight);
  if (!output) return head_.logits(hidden, tok_embeddings->weight);
  return output->around_use(
      [&] { return output->around_forward([&] { return head_.logits(hidden, output->weight); }); });
}

at::Tensor Llama::forward(const at::Tensor& input, const std::shared_ptr<const DocumentBoundaries>& documents) {
  const at::Tensor h = hidden(input, rows_of(input, documents));
  return part_.head ? logits(h) : h;
}

std::vector<std::vector<nn::Module*>> Llama::shard_units() {
  std::vector<std::vector<nn::Module*>> units;
  if (tok_embeddings && !config_.tie_embeddings) units.push_back({tok_embeddings.get()});
  if (pos_embeddings) units.push_back({pos_embeddings.get()});
  for (const auto& layer : layers) {
    units.push_back({layer.get()});
    const auto* const mixture = dynamic_cast<const nn::MixtureOfExperts*>(layer->feed_forward.get());
    if (mixture != nullptr && mixture->has_exchange()) units.push_back({mixture->experts.get()});
  }
  if (norm) units.push_back({norm.get()});
  if (output) units.back().push_back(output.get());
  return units;
}

at::Tensor Llama::loss(const at::Tensor& input, const at::Tensor& labels, const LlamaLossOptions& options) {
  if (!part_.head) throw Error("Llama: a part without the output has no loss: " + part_.text());
  std::vector<std::int64_t> positions = input.sizes().slice(0, std::min<std::int64_t>(input.dim(), 2)).vec();
  std::vector<std::int64_t> of_labels = labels.sizes().vec();
  if (!part_.embedding && positions.size() == 2) {
    positions[head_.parts_dim] *= head_.parts;
    positions[1] *= context_.cut.ranks;
    if (of_labels.size() == 2) of_labels[1] = context_.cut.padded_if_cut(of_labels[1]);
  }
  if (positions.size() != 2 || of_labels != positions || labels.scalar_type() != at::kLong) {
    throw Error("Llama: labels must be int64 and of the tokens' shape: one next token for each token");
  }
  if (!options.divisor) require_no_context("a mean loss");
  if (options.document_loss && !options.divisor) throw Error("Llama: a loss of documents needs a divisor");
  const Rows rows = rows_of(input, options.documents);
  return around_use(
      [&] { return loss_of(hidden(input, rows), own_positions(labels, kIgnoredLabel, rows), options, rows); });
}

at::Tensor Llama::loss_of(const at::Tensor& h, const at::Tensor& labels, const LlamaLossOptions& options,
                          const Rows& rows) {
  const auto fused = [&](const at::Tensor& weight) {
    const auto weighted = [&](const at::Tensor& token_weights) {
      return head_.loss
                 ? head_.loss(h, weight, labels, options.divisor, options.z_loss_weight, token_weights)
                 : kernels::linear_cross_entropy(h, weight, labels, options.divisor, options.z_loss_weight,
                                                 token_weights, output ? output->low_rank(h) : kernels::LowRank());
    };
    if (options.document_loss == nullptr) return weighted({});
    const auto token_losses = [&] {
      const at::NoGradGuard no_grad;
      return head_.token_losses
                 ? head_.token_losses(h, weight, labels)
                 : kernels::linear_token_losses(h, weight, labels, output ? output->low_rank(h) : kernels::LowRank());
    };
    return loss_of_documents(token_losses(), options, rows, weighted);
  };
  if (!output) return fused(tok_embeddings->weight);
  // A hook on the output layer must see its call, so the layer is not fused with the loss then.
  if (output->has_forward_hooks()) {
    const at::Tensor whole = logits(h);
    const auto weighted = [&](const at::Tensor& token_weights) {
      return kernels::cross_entropy(whole, labels, options.divisor, options.z_loss_weight, token_weights);
    };
    if (options.document_loss == nullptr) return weighted({});
    return loss_of_documents(kernels::token_losses(whole.detach(), labels), options, rows, weighted);
  }
  return output->around_use([&] { return fused(output->weight); });
}

at::Tensor Llama::loss_of_documents(const at::Tensor& token_losses, const LlamaLossOptions& options, const Rows& rows,
                                    const std::function<at::Tensor(const at::Tensor&)>& weighted) const {
  const DocumentLoss& loss = *options.document_loss;
  const at::Tensor documents = own_positions(loss.documents, 0, rows).flatten();
  DocumentLoss::Value value;
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    const at::Tensor likelihoods = at::zeros({loss.count}, token_losses.options().dtype(at::kDouble));
    likelihoods.index_add_(0, documents, token_losses.flatten().to(at::kDouble), -1);
    if (context_.sum) context_.sum(likelihoods);
    value = loss.of(likelihoods);
    // The ranks' parts are summed, and all of them have the same documents.
    result = value.loss.to(at::kFloat) * ((context_.cut.rank == 0 ? 1 : 0) / *options.divisor);
  }
  if (!at::GradMode::is_enabled()) return result;
  const at::Tensor weights = value.gradient.neg().to(at::kFloat).index_select(0, documents).view(token_losses.sizes());
  const at::Tensor sum = weighted(weights);  // has the gradient, and another value
  return sum - sum.detach() + result;
}

at::Tensor Llama::log_likelihoods(const at::Tensor& input, const at::Tensor& labels) {
  if (!part_.head) throw Error("Llama: a part without the output has no likelihoods: " + part_.text());
  if (head_.parts > 1) {
    throw Error(
        "Llama: likelihoods are those of whole sequences; expected parallelize_llama(model, mesh, "
        "{.sequence_parallel = false})");
  }
  require_no_context("a likelihood");
  const at::NoGradGuard no_grad;
  const auto likelihoods_of = [&] {
    const at::Tensor h = hidden(input, rows_of(input, nullptr)).flatten(0, 1),
                     wanted = labels.flatten();  // [batch * seq, dim], [batch * seq]
    const at::Tensor places = (wanted >= 0).nonzero().squeeze(1);
    const at::Tensor result = at::zeros({wanted.size(0)}, h.options().dtype(at::kFloat));
    for (const at::Tensor& some : places.split(kLikelihoodRows)) {
      const at::Tensor rows = at::log_softmax(logits(h.index_select(0, some)).to(at::kFloat), -1);
      result.index_copy_(0, some, rows.gather(1, wanted.index_select(0, some).unsqueeze(1)).squeeze(1));
    }
    return result.view(labels.sizes());
  };
  return around_use(likelihoods_of);
}

at::TensorOptions Llama::activations() const {
  const at::Tensor parameter = nn::Module::parameters().front();
  return at::TensorOptions(activation_dtype_.value_or(parameter.scalar_type())).device(parameter.device());
}

nn::KvCache Llama::make_cache(std::int64_t batch, std::int64_t max_len) const {
  const at::TensorOptions options = activations();
  const auto attends = std::ranges::find_if(layers, [](const auto& layer) { return layer->attention != nullptr; });
  const bool any = attends != layers.end();
  return nn::KvCache({.layers = any ? std::ssize(layers) : 0,
                      .batch = batch,
                      .kv_heads = any ? (*attends)->attention->cached_heads() : 0,
                      .max_len = max_len,
                      .head_dim = config_.head_dim(),
                      .dtype = options.dtype().toScalarType(),
                      .device = options.device()});
}

at::Tensor Llama::forward(const at::Tensor& input, nn::KvCache& cache, std::vector<std::int64_t> counts,
                          std::int64_t first_row) {
  const at::NoGradGuard no_grad;
  return around_use([&] { return forward_cached(input, cache, std::move(counts), first_row); });
}

at::Tensor Llama::forward_cached(const at::Tensor& input, nn::KvCache& cache, std::vector<std::int64_t> counts,
                                 std::int64_t first_row) {
  part_.embedding ? check_tokens(input) : check_hidden(input);
  require_no_context("a cache");
  if (head_.parts > 1) {
    throw Error(
        "Llama: with a cache no rank can have a part of the positions; expected parallelize_llama(model, mesh, "
        "{.sequence_parallel = false})");
  }
  const std::int64_t rows = input.size(0), count = input.size(1);
  const bool padded = !counts.empty();
  if (first_row < 0 || first_row + rows > cache.options().batch || (padded && std::ssize(counts) != rows) ||
      (cache.options().layers != std::ssize(layers) && cache.options().layers != 0)) {
    throw Error(
        fmt::format("Llama: {} rows from row {} on, {} counts and {} layers do not fit a cache made for {} rows "
                    "and {} layers",
                    rows, first_row, counts.size(), layers.size(), cache.options().batch, cache.options().layers));
  }
  at::Tensor last;  // each row's last real token of this pass
  if (padded) {
    std::vector<std::int64_t> at_rows(counts);
    for (auto& n : at_rows) n = std::max<std::int64_t>(n - 1, 0);
    last = at::tensor(at_rows, at::TensorOptions(at::kLong)).to(input.device());
  } else {
    counts.assign(static_cast<std::size_t>(rows), count);
  }
  std::vector<std::int64_t> row_lengths;  // after this pass
  const RopeScaling& scaling = config_.rope_scaling;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    const std::int64_t held = cache.length(first_row + static_cast<std::int64_t>(r));
    row_lengths.push_back(held + counts[r]);
    const std::int64_t original = scaling.original_max_seq_len;
    if (scaling.type == RopeScalingType::longrope && held > 0 && held <= original && row_lengths.back() > original) {
      throw Error(
          fmt::format("Llama: row {} grows from {} to {} tokens, and longrope has other angles beyond {}, so that the "
                      "keys in the cache are of no use; expected truncate(row, 0), and all of its tokens once more",
                      first_row + static_cast<std::int64_t>(r), held, row_lengths.back(), original));
    }
  }
  const std::int64_t longest_row = row_lengths.empty() ? 0 : std::ranges::max(row_lengths);
  if (config_.is_gpt2() && longest_row > config_.max_seq_len) {
    throw Error(fmt::format("Llama: a row of {} tokens, but the model has learnt positions of {} (max_seq_len)",
                            longest_row, config_.max_seq_len));
  }
  cache.begin(count, std::move(counts), first_row);
  const Rotation rotation = config_.is_gpt2() ? Rotation() : rope_of_rows(cache, count, row_lengths, input.device());
  at::Tensor positions;
  if (pos_embeddings) {
    positions = cache.positions().defined()
                    ? cache.positions()
                    : at::arange(cache.start(), cache.start() + count, input.options().requires_grad(false));
    positions = positions.clamp_max(config_.max_seq_len - 1);  // padding may be behind the last one
  }

  at::Tensor x = part_.embedding ? embed(input, positions) : input;  // [rows, n, dim]
  for (std::size_t i = 0; i < layers.size(); ++i) {
    x = call(layers[i], x, rope_of_layer(rotation, i), cache, static_cast<std::int64_t>(i));
  }
  cache.finish();
  if (!part_.head) return x;

  const at::TensorOptions integers = last.defined() ? last.options() : at::TensorOptions(at::kLong);
  x = padded ? x.index({at::arange(rows, integers), last}) : x.select(1, count - 1);  // [rows, dim]
  return logits(normed(x));
}

}  // namespace phalanx::models
