// A small training state for the tests of this folder: several dtypes and shapes, values that depend on a number.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cstdint>
#include <string>

#include "phalanx/base/file.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx::checkpoint_testing {

/// Values count up in order from `number`, cast to each dtype.
inline TrainState make_state(std::int64_t number, std::int64_t rows = 7) {
  const auto counted = [&](at::IntArrayRef shape, at::ScalarType dtype) {
    std::int64_t count = 1;
    for (const auto dimension : shape) count *= dimension;
    return at::arange(number, number + count, at::TensorOptions().dtype(at::kFloat)).to(dtype).reshape(shape);
  };
  TrainState state;
  state.tensors = {{"model.embedding.weight", counted({rows, 5}, at::kFloat)},
                   {"model.norm.weight", counted({5}, at::kBFloat16)},
                   {"model.empty", counted({0, 3}, at::kFloat)},
                   {"optimizer.embedding.weight.exp_avg", counted({rows, 5}, at::kFloat).t().contiguous().t()},
                   {"optimizer.embedding.weight.step", counted({}, at::kFloat)},
                   {"counts", counted({3, 2, 2}, at::kLong)}};
  state.integers = {{"step", number}, {"data.position", 10 * number}};
  return state;
}

inline bool same_state(const TrainState& a, const TrainState& b) {
  if (a.integers != b.integers || a.tensors.size() != b.tensors.size()) return false;
  for (std::size_t i = 0; i < a.tensors.size(); ++i)
    if (a.tensors[i].name != b.tensors[i].name || !a.tensors[i].tensor.equal(b.tensors[i].tensor)) return false;
  return true;
}

}  // namespace phalanx::checkpoint_testing
