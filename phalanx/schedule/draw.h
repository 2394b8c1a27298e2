// A picture of a simulated schedule: SVG, one row a rank, time from left to right, for a browser or a document.
//
// Passes are boxes in the colour of their kind, labelled with as much of their text as fits (`2F0`, `F0` or `0`); the
// further stages of a rank are lighter. The parts of an overlap share their time, one above the other. Light ground is
// time that the rank waits. Beside each row stand the part of the time that it waits and its peak of live activations.
// Pointing at a box shows its text, start and end. The file is complete in itself: no scripts, fonts or links.
//
//   write_file("1f1b.svg", to_svg(schedule, simulate(schedule)));
#pragma once

#include <string>

#include "phalanx/schedule/schedule.h"
#include "phalanx/schedule/simulate.h"

namespace phalanx::schedule {

/// `simulation` is simulate()'s of the same schedule.
std::string to_svg(const Schedule& schedule, const Simulation& simulation);

/// Several of one schedule, one below the other and to one scale, each under its name; times in `unit`.
struct NamedSimulation {
  std::string name;
  Simulation simulation;
};
std::string to_svg(const Schedule& schedule, const std::vector<NamedSimulation>& simulations, const std::string& unit);

}  // namespace phalanx::schedule
