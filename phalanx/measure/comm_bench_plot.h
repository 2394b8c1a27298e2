// Draws the results of `phalanx bench comm`: one self-contained SVG file without scripts. For each verb there are two
// charts over the message size: the time of a call (p50) and the bus bandwidth. There is a line for each backend, and
// for each type, op and place if several were measured. A dashed grey line is the copy roofline, in the same units.
// Torch-free.
//
//   write_file("comm.svg", comm_bench_plot(result));
#pragma once

#include <string>

#include "phalanx/measure/comm_bench_output.h"

namespace phalanx::measure {

std::string comm_bench_plot(const CommBenchResult& result);

}  // namespace phalanx::measure
