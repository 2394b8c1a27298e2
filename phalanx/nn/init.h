// Initialises every parameter of a model by its fully qualified name. So values depend neither on the order of
// construction nor on the layout over ranks.
//
// A phalanx::nn::Module declares its parameters' initial values itself (module.h). A parameter of any other module
// starts as in torch's own layers: a matrix uniform within 1 / sqrt(fan in), "weight" vectors one, other vectors zero.
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

/// For a parameter with a shard, each rank fills its own part. A parameter without memory gets memory first.
void initialise(torch::nn::Module& model, std::uint64_t seed);
/// Allocates memory for the parameters that have none, if they are filled in another way.
void materialize(torch::nn::Module& model);

/// The declared initial values without applying them, for code that fills shards: name, parameter and initial values.
struct ParameterInit {
  std::string name;
  at::Tensor parameter;
  Init init;
  std::shared_ptr<const Shard> shard = nullptr;  // the part that this rank holds, if not all
};
std::vector<ParameterInit> parameter_inits(torch::nn::Module& model);

/// named_parameters() as NamedTensors with their modules' shards. Each shared parameter appears once.
std::vector<NamedTensor> named_parameters(const torch::nn::Module& model);

}  // namespace phalanx::nn
