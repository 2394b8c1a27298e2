// Formats the result of a layout check, as text and as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "phalanx/verify/layout_check.h"

namespace phalanx::verify {

/// For each step the losses; for each parameter the largest differences of gradient and weight with rank, element,
/// ulps.
std::string layout_table(const LayoutCheck& check);

/// "dp_shard=2  ok  loss 1.2e-07  gradient 6.1e-08 (layers.0.attention.wq.weight)  update 3e-07 (...)  1.2 s"
std::string layout_line(const std::string& name, const LayoutCheck& check, double seconds);

nlohmann::json layout_record(const std::string& name, const LayoutCheck& check);

}  // namespace phalanx::verify
