// Compares what the routers of a layout do with those of one rank (routing_replay.h), for layout_check.h.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "phalanx/comm/communicator.h"
#include "phalanx/verify/layout_check.h"
#include "phalanx/verify/layout_side.h"

namespace phalanx::verify {

struct RoutingCheck {
  /// "choice of experts" of a bias or, without, of a gate; or "router logits" of a gate.
  std::optional<LayoutFinding> finding;
  /// Of all tokens and layers, those that the layout alone would have sent to other experts.
  std::int64_t tokens = 0, elsewhere = 0;
};

/// Of the passes of a step that was replayed. `tolerance`: of a layer's logits, relative to their norm. Collective.
RoutingCheck compare_routing(const LayoutSide& layout, Communicator& world,
                             const std::function<double(std::int64_t layer)>& tolerance);

}  // namespace phalanx::verify
