// Initialises every parameter of a model by its fully qualified name, so that values depend on neither the order of
// construction nor the layout over ranks.
//
// A phalanx::nn::Module states its parameters' starting values itself (module.h). A parameter of any other module
// starts as torch's own layers do: a matrix uniform within 1 / sqrt(fan in), "weight" vectors one, other vectors zero.
//
//   auto model = std::make_shared<models::Llama>(config);
//   nn::initialise(*model, /*seed=*/1);
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/tensor/init.h"
#include "phalanx/tensor/named.h"

namespace phalanx::nn {

/// Of a parameter with a shard each rank fills its own part; one that was born without memory gets it first.
void initialise(torch::nn::Module& model, std::uint64_t seed);
/// Gives memory to the parameters that have none, for whoever fills them otherwise.
void materialize(torch::nn::Module& model);

/// The same statement without acting on it, for whoever fills shards: name, parameter and starting values.
struct ParameterInit {
  std::string name;
  at::Tensor parameter;
  Init init;
  std::shared_ptr<const Shard> shard = nullptr;  // the part that this rank holds, if not all
};
std::vector<ParameterInit> parameter_inits(torch::nn::Module& model);

/// named_parameters() as NamedTensors with the shards that their modules know, each shared parameter once.
std::vector<NamedTensor> named_parameters(const torch::nn::Module& model);

}  // namespace phalanx::nn
