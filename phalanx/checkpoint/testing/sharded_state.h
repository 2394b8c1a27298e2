// Sharded training states for the tests of this folder: global tensors and the boxes that ranks hold of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/tensor/narrow_to_box.h"
#include "phalanx/tensor/testing/random_specs.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx::checkpoint_testing {

/// The layout of a state's tensors: one placement for the matrices, one for the vectors.
struct Layout {
  std::string name;
  MeshShape mesh;
  Placement matrix, vector;
  /// Ranks of the world. A smaller mesh is repeated, one copy after the other (as a sub-mesh is).
  int world = 0;
};

inline DataType data_type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return DataType::bf16;
    case at::kLong:
      return DataType::i64;
    default:
      return DataType::f32;
  }
}

/// The rank's part of a full tensor, in new storage.
inline NamedTensor hold(const NamedTensor& whole, const MeshShape& mesh, const Placement& placement, int rank) {
  const int place = rank % mesh.size();
  auto shard = std::make_shared<Shard>(
      Shard{ShardSpec(whole.name, whole.tensor.sizes().vec(), data_type_of(whole.tensor), mesh, placement), place});
  return {whole.name, narrow_to_box(whole.tensor, shard->box()).clone(), shard};
}

/// Values count up from `number`, so that every element of a tensor differs from its neighbours.
inline at::Tensor counted(std::vector<std::int64_t> shape, std::int64_t number, at::ScalarType dtype = at::kFloat) {
  std::int64_t count = 1;
  for (const auto size : shape) count *= size;
  return at::arange(number, number + count, at::TensorOptions().dtype(at::kFloat)).to(dtype).reshape(shape);
}

/// Matrices of 11 rows and 6 columns, vectors of 11, one of each kind without elements, scalars.
inline TrainState global_state(std::int64_t number) {
  TrainState state;
  state.tensors = {{"model.wq.weight", counted({11, 6}, number)},
                   {"model.norm.weight", counted({11}, number, at::kBFloat16)},
                   {"model.none.weight", counted({0, 6}, number)},
                   {"model.three", counted({11, 6, 2}, number)},
                   {"optimizer.wq.weight.exp_avg", counted({11, 6}, number + 7)},
                   {"optimizer.wq.weight.step", at::full({}, static_cast<double>(number))},
                   {"rng.state", counted({37}, number, at::kLong)}};
  state.integers = {{"step", number}, {"data.position", 10 * number}};
  return state;
}

/// The rank's part of a state. Names decide what is sharded: the model, and the moments like it.
inline TrainState hold_state(const TrainState& whole, const Layout& layout, int rank) {
  TrainState held{{}, whole.integers};
  for (const auto& named : whole.tensors) {
    if (named.tensor.dim() == 0 || named.name.starts_with("rng.")) {
      held.tensors.push_back({named.name, named.tensor.clone()});
    } else {
      const bool is_vector = named.tensor.dim() == 1;
      held.tensors.push_back(hold(named, layout.mesh, is_vector ? layout.vector : layout.matrix, rank));
    }
  }
  return held;
}

/// Layouts of 1 to 8 ranks over the shapes of global_state().
inline std::vector<Layout> layouts() {
  const auto mesh = [](std::vector<MeshAxis> axes) { return MeshShape(std::move(axes)); };
  const Split rows{"dp", 0, {}};
  return {
      {"one rank", mesh({}), {}, {}, 1},
      {"one rank, an axis", mesh({{"dp", 1}}), {.splits = {rows}}, {.splits = {rows}}, 1},
      {"rows/2", mesh({{"dp", 2}}), {.splits = {rows}}, {.splits = {rows}}, 2},
      {"columns/2", mesh({{"tp", 2}}), {.splits = {{"tp", 1, {}}}}, {}, 2},
      {"rows/3", mesh({{"dp", 3}}), {.splits = {rows}}, {.splits = {rows}}, 3},
      // model.none has no rows, so uneven sizes could not add up to them: vectors have the uneven splits.
      {"columns uneven/3",
       mesh({{"tp", 3}}),
       {.splits = {{"tp", 1, {1, 5, 0}}}},
       {.splits = {{"tp", 0, {0, 10, 1}}}},
       3},
      {"rows/4", mesh({{"dp", 4}}), {.splits = {rows}}, {.splits = {rows}}, 4},
      {"hsdp 2x2", mesh({{"replicate", 2}, {"dp", 2}}), {.splits = {rows}}, {.splits = {rows}}, 4},
      {"rows x columns", mesh({{"dp", 2}, {"tp", 2}}), {.splits = {{"tp", 1, {}}, rows}}, {.splits = {rows}}, 4},
      {"tp rows, then dp rows",
       mesh({{"dp", 2}, {"tp", 2}}),
       {.splits = {{"tp", 0, {}}, rows}},
       {.splits = {{"tp", 0, {}}, rows}},
       4},
      {"a sub-mesh of 2, twice", mesh({{"dp", 2}}), {.splits = {rows}}, {.splits = {rows}}, 4},
      {"rows/8", mesh({{"dp", 8}}), {.splits = {rows}}, {.splits = {rows}}, 8},
      {"4x2, columns and rows",
       mesh({{"dp", 4}, {"tp", 2}}),
       {.splits = {{"tp", 1, {2, 4}}, rows}},
       {.splits = {{"dp", 0, {0, 0, 11, 0}}}},
       8},
      {"all on the last of 8", mesh({{"dp", 8}}), {.splits = {{"dp", 1, {0, 0, 0, 0, 0, 0, 0, 6}}}}, {}, 8},
  };
}

}  // namespace phalanx::checkpoint_testing
