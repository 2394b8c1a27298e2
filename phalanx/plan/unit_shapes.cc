#include "phalanx/plan/unit_shapes.h"

#include "phalanx/plan/model_partition.h"

namespace phalanx::plan {
namespace {

using fsdp::FlatParameter;

// The parameters of a layer with both halves, or of a layer that is cut by the end of a stage.
std::vector<FlatParameter> layer_parameters(const TrainingShape& shape, bool has_attention, bool has_feed_forward) {
  const models::LlamaConfig& model = shape.model;
  const ModelPartition m(shape);
  const std::int64_t dim = m.dim, q = m.queries, kv = m.keys, ffn = m.feed_forward_hidden;
  const FlatParameter vector{dim, 1};
  std::vector<FlatParameter> layer;
  if (has_attention) {
    layer.insert(layer.end(), {{q, dim}, {kv, dim}, {kv, dim}, {dim, q}});
    layer.insert(layer.end(), m.norm / dim, vector);
    if (model.has_qkv_bias()) layer.insert(layer.end(), {{q, 1}, {kv, 1}, {kv, 1}});
    if (model.has_qk_norm()) layer.insert(layer.end(), 2, {model.head_dim(), 1});
    if (model.is_gpt2()) layer.push_back(vector);
  }
  if (has_feed_forward) {
    for (std::int64_t net = 0; net < m.nets; ++net) {
      layer.insert(layer.end(), {{ffn, dim}, {dim, ffn}});
      if (m.matrices_of_net == 3) layer.push_back({ffn, dim});
    }
    layer.insert(layer.end(), m.norm / dim, vector);
    if (model.is_gpt2()) layer.insert(layer.end(), {vector, {ffn, 1}});
    if (model.has_experts()) layer.push_back({model.experts, dim});
  }
  return layer;
}

}  // namespace

std::vector<UnitShape> unit_shapes(const TrainingShape& shape, const models::LlamaPart& part) {
  const models::LlamaConfig& model = shape.model;
  const ModelPartition m(shape);
  const FlatParameter table{m.vocab, m.dim};
  std::vector<UnitShape> units;
  // If both ends use the embedding, it is in no unit.
  if (part.embedding || (part.head && model.tie_embeddings)) {
    units.push_back({.parameters = {table}, .is_root = model.tie_embeddings});
  }
  if (part.embedding && m.positions > 0) units.push_back({.parameters = {{model.max_seq_len, m.dim}}});
  std::int64_t first = part.begin, whole = 0;
  if (first % 2 == 1 && first < part.end) {
    units.push_back({.parameters = layer_parameters(shape, false, true)});
    ++first;
  }
  whole = (part.end - first) / 2;
  if (whole > 0) units.push_back({.parameters = layer_parameters(shape, true, true), .count = whole});
  if (first + 2 * whole < part.end) units.push_back({.parameters = layer_parameters(shape, true, false)});
  if (part.head) {
    units.push_back({});
    units.back().parameters.insert(units.back().parameters.end(), m.norm / m.dim, {m.dim, 1});
    if (!model.tie_embeddings) units.back().parameters.push_back(table);
  }
  return units;
}

}  // namespace phalanx::plan
