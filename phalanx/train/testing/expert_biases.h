// The biases by which experts are chosen, as a run has saved them.
//
//   EXPECT_TRUE(at::equal(expert_biases_of(path("run"), {0, 1}), expected));
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/models/expert_bias.h"

namespace phalanx::train {

/// Of these layers in the newest checkpoint of the run in `folder`: [layers, experts].
inline at::Tensor expert_biases_of(const std::string& folder, const std::vector<std::int64_t>& layers,
                                   std::int64_t experts = 8) {
  const CheckpointReader reader(list_checkpoints(folder + "/checkpoint").complete.front().path);
  std::vector<at::Tensor> rows;
  for (const std::int64_t layer : layers) {
    rows.push_back(at::zeros({experts}));
    reader.read({{"model." + models::expert_bias_name(layer), rows.back()}}, {.allow_unexpected = true});
  }
  return at::stack(rows);
}

}  // namespace phalanx::train
