// TrainState: the whole state of a training run, as named tensors plus a few integers. A checkpoint contains all of it
// and nothing else.
//
// The tensors are handles to live storage. Saving reads them, and loading copies into them in place, so nothing remains
// to be done after a load. Integers are values: after a load their owners read them back by name.
//
// Names: "model.<fqn>", "optimizer.<fqn>.exp_avg", "optimizer.<fqn>.exp_avg_sq", "optimizer.<fqn>.step", and for a
// 16-bit parameter its float32 "optimizer.<fqn>.master". Integers are for example "step", "data.position", "seed".
// Names "layout.<...>" belong to the layout of the run, not to what is trained: a load into another layout skips them.
//
//   TrainState state;
//   for (auto& p : model->named_parameters()) state.tensors.push_back({"model." + p.key(), p.value()});
//   optimizer.collect_state(state);
//   state.integers["step"] = step;
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/tensor/named.h"

namespace phalanx {

inline bool is_of_layout(std::string_view name) { return name.starts_with("layout."); }

inline constexpr std::string_view kOfParameters = "model.", kOfOptimizer = "optimizer.", kMaster = ".master";

/// Maps "model.<fqn>" to "optimizer.<fqn>.master". Returns "" if the name is not a parameter's.
inline std::string master_of(std::string_view parameter) {
  if (!parameter.starts_with(kOfParameters)) return {};
  return std::string(kOfOptimizer).append(parameter.substr(kOfParameters.size())).append(kMaster);
}
/// Maps "optimizer.<fqn>.master" to "model.<fqn>". Returns "" if the name is not a master's.
inline std::string parameter_of_master(std::string_view name) {
  if (!name.starts_with(kOfOptimizer) || !name.ends_with(kMaster)) return {};
  name.remove_prefix(kOfOptimizer.size());
  name.remove_suffix(kMaster.size());
  return std::string(kOfParameters).append(name);
}

struct TrainState {
  std::vector<NamedTensor> tensors;
  std::map<std::string, std::int64_t> integers;
};

}  // namespace phalanx
