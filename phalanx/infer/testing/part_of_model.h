// A rank's part of a full model that a test has, with the same values.
#pragma once

#include <c10/core/GradMode.h>

#include <map>
#include <memory>
#include <string>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/llama_parallel.h"
#include "phalanx/nn/init.h"

namespace phalanx::infer {

/// Cut by layers over the mesh's pp and by matrices over its tp, as in `phalanx generate`.
inline std::shared_ptr<models::Llama> part_of_model(const models::Llama& whole, const DeviceMesh& mesh) {
  const auto& config = whole.config();
  const auto parts = models::balance_llama(config, mesh.size("pp"), config.max_seq_len);
  auto part = std::make_shared<models::Llama>(config, parts.at(static_cast<std::size_t>(mesh.coordinate("pp"))));
  models::parallelize_llama(*part, mesh, {.sequence_parallel = false});
  std::map<std::string, at::Tensor> values;
  for (const auto& [name, parameter, shard] : nn::named_parameters(whole)) values[name] = parameter.detach();
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter, shard] : nn::named_parameters(*part)) {
    at::Tensor value = values.at(name);
    for (std::int64_t d = 0; d < value.dim(); ++d) {
      if (value.size(d) == parameter.size(d)) continue;
      value = value.narrow(d, mesh.coordinate("tp") * parameter.size(d), parameter.size(d));
    }
    parameter.copy_(value);
  }
  return part;
}

}  // namespace phalanx::infer
