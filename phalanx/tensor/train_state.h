// The whole state of a training run: named tensors plus a few integers. All of it is checkpointed, nothing else is.
//
// The tensors are handles to live storage: saving reads them, loading copies into them in place, so whoever collected
// the state needs no second step after a load. Integers are values: after a load their owners read them back by name.
//
// Names: "model.<fqn>", "optimizer.<fqn>.exp_avg", "optimizer.<fqn>.exp_avg_sq", "optimizer.<fqn>.step", and of a
// 16-bit parameter its float32 "optimizer.<fqn>.master"; integers such as "step", "data.position", "seed". What belongs
// to the way the run is laid out, and not to what is trained, is named "layout.<...>": a load into another layout
// passes over it.
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

/// "optimizer.<fqn>.master" of "model.<fqn>"; "" of what is no parameter.
inline std::string master_of(std::string_view parameter) {
  if (!parameter.starts_with(kOfParameters)) return {};
  return std::string(kOfOptimizer).append(parameter.substr(kOfParameters.size())).append(kMaster);
}
/// "model.<fqn>" of "optimizer.<fqn>.master"; "" of what is no master.
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
