// Levels of memory as a busy or shared machine measures them: the nearest may come out slower than one behind it.
#pragma once

#include <cstddef>
#include <vector>

#include "phalanx/measure/bandwidth.h"
#include "phalanx/measure/topology.h"

namespace phalanx::lecture {

/// Whether the level is faster than all behind it. One that is not was disturbed, by another program or by another
/// machine on the same processor: its number says nothing of it.
bool is_told_apart(const std::vector<measure::MemoryLevel>& levels, std::size_t level);

/// Of up to three measurements the fastest of each level, because what disturbs makes it slower. The first one is enough if
/// it tells all levels apart.
std::vector<measure::MemoryLevel> measure_levels_well(const measure::Topology& machine);

}  // namespace phalanx::lecture
