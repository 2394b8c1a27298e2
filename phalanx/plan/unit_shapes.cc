#include "phalanx/plan/unit_shapes.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "phalanx/layout/nf4_blocks.h"
#include "phalanx/models/config/parameter_kinds.h"
#include "phalanx/plan/model_partition.h"

namespace phalanx::plan {
namespace {

using fsdp::FlatParameter;

struct NamedShape {
  std::string name;  // without that of its layer
  FlatParameter shape;
};

// The linear layers that may have adapters: rows and columns on a rank, and which of them tensor parallelism cuts.
struct LinearShape {
  const char* name;
  std::int64_t rows, columns;
};

void add_adapters(const TrainingShape& shape, const std::set<std::string>& adapted, const std::string& layer,
                  const std::vector<LinearShape>& linears, std::vector<NamedShape>& parameters) {
  const std::int64_t rank = shape.lora.rank;
  for (const LinearShape& linear : linears) {
    if (!adapted.contains(layer + linear.name)) continue;
    parameters.push_back({std::string(linear.name) + models::kLoraA, {rank, linear.columns}});
    parameters.push_back({std::string(linear.name) + models::kLoraB, {linear.rows, rank}});
  }
}

void add_net(const std::string& name, const ModelPartition& m, std::int64_t hidden,
             std::vector<NamedShape>& parameters) {
  const FlatParameter in{hidden, m.dim}, out{m.dim, hidden};
  parameters.push_back({name + "w1.weight", in});
  parameters.push_back({name + "w2.weight", out});
  if (m.matrices_of_net == 3) parameters.push_back({name + "w3.weight", in});
}

// Those of the experts that the rank has, or of the only net.
void add_nets(const TrainingShape& shape, const ModelPartition& m, std::vector<NamedShape>& parameters) {
  for (std::int64_t net = 0; net < m.nets; ++net) {
    const std::string name = shape.model.has_experts() ? fmt::format("moe.experts.{}.", net) : "feed_forward.";
    add_net(name, m, m.feed_forward_hidden, parameters);
    if (!shape.model.has_expert_net_biases()) continue;
    parameters.push_back({name + "w1.bias", {m.feed_forward_hidden, 1}});
    parameters.push_back({name + "w2.bias", {m.dim, 1}});
    parameters.push_back({name + "w3.bias", {m.feed_forward_hidden, 1}});
  }
}

void add_latent_attention(const ModelPartition& m, std::vector<NamedShape>& parameters) {
  const auto add = [&](const char* name, const FlatParameter& parameter) { parameters.push_back({name, parameter}); };
  if (m.q_rank == 0) {
    add("attention.wq.weight", {m.queries, m.dim});
  } else {
    add("attention.wq_a.weight", {m.q_rank, m.dim});
    add("attention.q_norm.weight", {m.q_rank, 1});
    add("attention.wq_b.weight", {m.queries, m.q_rank});
  }
  add("attention.wkv_a.weight", {m.kv_rank + m.rotated, m.dim});
  add("attention.kv_norm.weight", {m.kv_rank, 1});
  add("attention.wkv_b.weight", {m.queries - m.heads * m.rotated + m.values, m.kv_rank});
  add("attention.wo.weight", {m.dim, m.values});
}

std::vector<LinearShape> attention_linears(const ModelPartition& m) {
  const std::int64_t dim = m.dim, q = m.queries;
  if (m.kv_rank == 0) {
    return {{"attention.wq", q, dim},
            {"attention.wk", m.keys, dim},
            {"attention.wv", m.keys, dim},
            {"attention.wo", dim, q}};
  }
  return {{"attention.wq", q, dim},
          {"attention.wq_a", m.q_rank, dim},
          {"attention.wq_b", q, m.q_rank},
          {"attention.wkv_a", m.kv_rank + m.rotated, dim},
          {"attention.wkv_b", q - m.heads * m.rotated + m.values, m.kv_rank},
          {"attention.wo", dim, m.values}};
}

std::vector<LinearShape> feed_forward_linears(const ModelPartition& m, bool has_experts) {
  const std::int64_t dim = m.dim, shared = m.shared_hidden;
  const std::int64_t ffn = m.dense_layers > 0 ? m.dense_hidden : m.feed_forward_hidden;
  if (!has_experts)
    return {{"feed_forward.w1", ffn, dim}, {"feed_forward.w2", dim, ffn}, {"feed_forward.w3", ffn, dim}};
  return {{"moe.shared_experts.w1", shared, dim},
          {"moe.shared_experts.w2", dim, shared},
          {"moe.shared_experts.w3", shared, dim}};
}

// The parameters of a layer with both halves, or of a layer that is cut by the end of a stage; without experts that are
// divided among ranks.
std::vector<NamedShape> layer_parameters(const TrainingShape& shape, const std::set<std::string>& adapted,
                                         std::int64_t number, bool has_attention, bool has_feed_forward) {
  const std::string layer = fmt::format("layers.{}.", number);
  const models::LlamaConfig& model = shape.model;
  const ModelPartition m(shape);
  const std::int64_t dim = m.dim, q = m.queries, kv = m.keys;
  const FlatParameter vector{dim, 1};
  std::vector<NamedShape> all;
  const auto add = [&](const std::string& name, const FlatParameter& parameter) { all.push_back({name, parameter}); };
  const auto add_norm = [&](const std::string& name) {
    add(name + ".weight", vector);
    if (model.is_gpt2()) add(name + ".bias", vector);
  };
  if (has_attention) {
    if (model.has_latent_attention()) {
      add_latent_attention(m, all);
    } else {
      add("attention.wq.weight", {q, dim});
      add("attention.wk.weight", {kv, dim});
      add("attention.wv.weight", {kv, dim});
      add("attention.wo.weight", {dim, q});
    }
    add_norm("attention_norm");
    if (model.norms_per_layer() == 4) add_norm("attention_post_norm");
    if (model.has_qkv_bias()) {
      add("attention.wq.bias", {q, 1});
      add("attention.wk.bias", {kv, 1});
      add("attention.wv.bias", {kv, 1});
    }
    if (model.has_qk_norm()) {
      add("attention.q_norm.weight", {m.q_norm, 1});
      add("attention.k_norm.weight", {m.k_norm, 1});
    }
    if (model.has_output_bias()) add("attention.wo.bias", vector);
    if (model.has_sinks()) add("attention.sinks", {m.heads, 1});
    add_adapters(shape, adapted, layer, attention_linears(m), all);
  }
  if (has_feed_forward) {
    if (number < m.dense_layers) {
      add_net("feed_forward.", m, m.dense_hidden, all);
    } else {
      if (shape.expert_parallel_size == 1) add_nets(shape, m, all);
      if (m.shared_hidden > 0) add_net("moe.shared_experts.", m, m.shared_hidden, all);
    }
    add_norm("ffn_norm");
    if (model.norms_per_layer() == 4) add_norm("ffn_post_norm");
    if (model.is_gpt2()) {
      add("feed_forward.w2.bias", vector);
      add("feed_forward.w1.bias", {m.feed_forward_hidden, 1});
    }
    if (model.has_experts(number)) add("moe.gate.weight", {model.experts, dim});
    if (model.has_expert_net_biases()) add("moe.gate.bias", {model.experts, 1});
    add_adapters(shape, adapted, layer, feed_forward_linears(m, model.has_experts(number)), all);
  }
  return all;
}

bool same(const std::vector<FlatParameter>& a, const std::vector<FlatParameter>& b) {
  return std::ranges::equal(a, b, [](const FlatParameter& x, const FlatParameter& y) {
    return x.rows == y.rows && x.row_elements == y.row_elements;
  });
}

void count_once_more(std::vector<UnitShape>& units, std::size_t last) {
  for (std::size_t i = units.size() - last; i < units.size(); ++i) ++units[i].count;
}

bool same_unit(const UnitShape& a, const UnitShape& b) {
  return same(a.parameters, b.parameters) && same(a.frozen, b.frozen) && same(a.in_nf4, b.in_nf4);
}

class Units {
 public:
  explicit Units(const TrainingShape& shape) : shape_(shape), frozen_(shape.frozen.begin(), shape.frozen.end()) {
    if (shape.lora.rank == 0) return;
    const std::vector<std::string> layers = models::lora_layers(shape.model, shape.lora);
    adapted_.insert(layers.begin(), layers.end());
    for (const std::string& layer : models::nf4_layers(shape.model, shape.lora)) in_nf4_.insert(layer + ".weight");
  }

  bool is_frozen(const std::string& name) const {
    return frozen_.contains(name) || (shape_.lora.rank > 0 && !models::is_lora_name(name));
  }

  std::vector<UnitShape> of(const models::LlamaPart& part) const {
    const models::LlamaConfig& model = shape_.model;
    const ModelPartition m(shape_);
    const FlatParameter table{m.vocab, m.dim};
    std::vector<UnitShape> units;
    // If both ends use the embedding, it is in no unit.
    if (part.embedding || (part.head && model.tie_embeddings)) {
      units.push_back(unit("", {{"tok_embeddings.weight", table}}));
      units.back().is_root = model.tie_embeddings;
    }
    if (part.embedding && m.positions > 0) {
      units.push_back(unit("", {{"pos_embeddings.weight", {model.max_seq_len, m.dim}}}));
    }
    const std::size_t before = units.size();
    bool last_is_whole = false;
    std::size_t of_layer = 1;  // units
    for (std::int64_t layer = part.begin / 2; 2 * layer < part.end; ++layer) {
      const std::string name = fmt::format("layers.{}.", layer);
      const bool has_attention = part.begin <= 2 * layer, has_feed_forward = 2 * layer + 1 < part.end;
      const bool is_whole = has_attention && has_feed_forward;
      const bool is_other_kind = layer == m.dense_layers;
      if (is_whole && last_is_whole && !is_other_kind && !shape_.trains_a_part()) {  // as the one before
        count_once_more(units, of_layer);
        continue;
      }
      last_is_whole = is_whole;
      std::vector<UnitShape> next = {
          unit(name, layer_parameters(shape_, adapted_, layer, has_attention, has_feed_forward))};
      if (has_feed_forward && shape_.expert_parallel_size > 1 && layer >= m.dense_layers) {
        std::vector<NamedShape> nets;
        add_nets(shape_, m, nets);
        next.push_back(unit(name, nets));
        next.back().shards = shape_.shards_of_experts();
        next.back().is_inner = true;
      }
      of_layer = next.size();
      const auto last = units.end() - static_cast<std::ptrdiff_t>(std::min(of_layer, units.size() - before));
      if (std::equal(last, units.end(), next.begin(), next.end(), same_unit)) {
        count_once_more(units, of_layer);
      } else {
        units.insert(units.end(), next.begin(), next.end());
      }
    }
    if (part.head) {
      std::vector<NamedShape> last = {{"norm.weight", {m.dim, 1}}};
      if (model.is_gpt2()) last.push_back({"norm.bias", {m.dim, 1}});
      if (!model.tie_embeddings) last.push_back({"output.weight", table});
      add_adapters(shape_, adapted_, "", {{"output", m.vocab, m.dim}}, last);
      units.push_back(unit("", last));
    }
    return units;
  }

 private:
  UnitShape unit(const std::string& layer, const std::vector<NamedShape>& parameters) const {
    UnitShape made;
    made.shards = shape_.shards;
    for (const auto& [name, shape] : parameters) {
      if (in_nf4_.contains(layer + name)) {
        add_nf4(shape, made.in_nf4);
        continue;
      }
      (is_frozen(layer + name) ? made.frozen : made.parameters).push_back(shape);
      if (!is_frozen(layer + name) && is_matrix(layer + name, shape)) made.matrices += shape.numel();
    }
    return made;
  }

  /// The scales of the scales are those of the whole matrix on every rank.
  void add_nf4(const FlatParameter& matrix, std::vector<FlatParameter>& bytes) const {
    bytes.push_back({matrix.rows, matrix.row_elements / 2});
    bytes.push_back({matrix.rows, matrix.row_elements / kNf4Block});
    bytes.push_back({nf4_nested_bytes(matrix.numel() * shape_.tensor_parallel_size), 1});
  }

  bool is_matrix(const std::string& name, const FlatParameter& shape) const {
    return models::is_muon_matrix(name, shape.row_elements == 1 ? 1 : 2, shape_.adamw_params);
  }

  const TrainingShape& shape_;
  std::set<std::string> frozen_, adapted_, in_nf4_;
};

std::int64_t sum_of(const std::vector<FlatParameter>& parameters) {
  std::int64_t sum = 0;
  for (const FlatParameter& parameter : parameters) sum += parameter.numel();
  return sum;
}

}  // namespace

std::vector<UnitShape> unit_shapes(const TrainingShape& shape, const models::LlamaPart& part) {
  return Units(shape).of(part);
}

ElementCounts elements_of(const UnitShape& unit) {
  return {.trained = sum_of(unit.parameters),
          .frozen = sum_of(unit.frozen),
          .matrices = unit.matrices,
          .nf4_bytes = sum_of(unit.in_nf4)};
}

ElementCounts elements_of_part(const TrainingShape& shape, const models::LlamaPart& part) {
  ElementCounts counts;
  for (const UnitShape& unit : unit_shapes(shape, part)) counts.add(elements_of(unit), unit.count);
  return counts;
}

ElementCounts elements_of_all_experts(const TrainingShape& shape, const models::LlamaPart& part) {
  if (shape.expert_parallel_size == 1) return elements_of_part(shape, part);
  TrainingShape undivided = shape;
  undivided.expert_parallel_size = 1;
  return elements_of_part(undivided, part);
}

bool trains_embedding(const TrainingShape& shape) { return !Units(shape).is_frozen("tok_embeddings.weight"); }

bool trains_output(const TrainingShape& shape) {
  return shape.model.tie_embeddings ? trains_embedding(shape) : !Units(shape).is_frozen("output.weight");
}

}  // namespace phalanx::plan
