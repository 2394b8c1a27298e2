// Linear layers in float8: which they are, and making them so, as [model] converters and [quantize.linear.float8] say.
//
// Those of the transformer blocks whose two sizes are multiples of 16, but for routers, experts and those that
// filter_fqns names. Sizes are those of the whole model, so every layout has the same layers in float8.
//
//   apply_float8(model, config, mesh, device);      // after tensor parallelism has cut the weights
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/config/config.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"

namespace phalanx::train {

/// Does nothing if the configuration does not ask for float8. Collective over the world of `mesh`.
/// ConfigError if the device has no such products, or a rank's part of a weight has a size that is no multiple of 16.
void apply_float8(models::Llama& model, const config::TrainConfig& config, const DeviceMesh& mesh, at::Device device);

/// While it lives, the linear layers of these modules multiply in their own type.
/// REQUIRES: the modules outlive it.
class [[nodiscard]] WithoutFloat8 {
 public:
  explicit WithoutFloat8(const std::vector<nn::Module*>& modules);
  WithoutFloat8(const WithoutFloat8&) = delete;
  WithoutFloat8& operator=(const WithoutFloat8&) = delete;
  ~WithoutFloat8();

 private:
  std::vector<std::pair<nn::Linear*, nn::Linear::Float8>> taken_;
};

/// For the start of a run: the recipe, which layers are in float8, and which are not and why. Empty without float8.
std::string float8_text(const models::Llama& model, const config::TrainConfig& config, at::Device device);

}  // namespace phalanx::train
