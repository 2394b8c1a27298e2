// Draws a simulated schedule as SVG: one row per rank, time from left to right, for a browser or a document.
//
// Passes are boxes in the colour of their kind, labelled with as much of their text as fits (`2F0`, `F0` or `0`). The
// further stages of a rank are lighter. The parts of an overlap share their time, one above the other. A light
// background is time in which the rank waits. Beside each row are the share of time that the rank waits and its peak of
// live activations. Pointing at a box shows its text, start and end. The file is self-contained: no scripts, fonts or
// links.
//
//   write_file("1f1b.svg", to_svg(schedule, simulate(schedule)));
#pragma once

#include <string>

#include "phalanx/schedule/schedule.h"
#include "phalanx/schedule/simulate.h"

namespace phalanx::schedule {

/// REQUIRES: `simulation` is the result of simulate() for the same schedule.
std::string to_svg(const Schedule& schedule, const Simulation& simulation);

/// For several simulations of one schedule, one below the other and to one scale, each under its name; times in `unit`.
struct NamedSimulation {
  std::string name;
  Simulation simulation;
};
std::string to_svg(const Schedule& schedule, const std::vector<NamedSimulation>& simulations, const std::string& unit);

}  // namespace phalanx::schedule
