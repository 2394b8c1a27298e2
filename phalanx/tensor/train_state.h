// The whole state of a training run: named tensors plus a few integers. All of it is checkpointed, nothing else is.
//
// The tensors are handles to live storage: saving reads them, loading copies into them in place, so whoever collected
// the state needs no second step after a load. Integers are values: after a load their owners read them back by name.
//
// Names: "model.<fqn>", "optimizer.<fqn>.exp_avg", "optimizer.<fqn>.exp_avg_sq", "optimizer.<fqn>.step"; integers such
// as "step", "data.position", "seed". What belongs to the way the run is laid out, and not to what is trained, is named
// "layout.<...>": a load into another layout passes over it.
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

struct TrainState {
  std::vector<NamedTensor> tensors;
  std::map<std::string, std::int64_t> integers;
};

}  // namespace phalanx
