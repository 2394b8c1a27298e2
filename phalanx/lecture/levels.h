// Levels of memory as a busy or shared machine measures them: the nearest may come out slower than one behind it.
//
//   const auto levels = fastest_of_measurements([&] { return measure::measure_memory(machine); });
//   if (is_told_apart(levels, 0)) fmt::print("{}: {} bytes/s\n", levels[0].name, levels[0].one_cpu);
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "phalanx/measure/bandwidth.h"

namespace phalanx::lecture {

/// Whether one CPU copies faster within this level than within all behind it. A level that is not faster was disturbed,
/// by another program or by another machine on the same processor: its number says nothing of it.
/// REQUIRES: levels are in order, the nearest first, and level < levels.size().
bool is_told_apart(const std::vector<measure::MemoryLevel>& levels, std::size_t level);

/// The fastest one_cpu of each level in up to three measurements, because what disturbs makes it slower; all else is
/// that of the first. Measures no more once all levels are told apart.
/// REQUIRES: each measurement has the same levels, the nearest first.
std::vector<measure::MemoryLevel> fastest_of_measurements(
    const std::function<std::vector<measure::MemoryLevel>()>& measure);

}  // namespace phalanx::lecture
