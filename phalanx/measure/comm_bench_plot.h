// The figures of `phalanx bench comm` as a picture: one SVG file, no scripts, readable on its own. For each verb two
// charts over the message size: the time of a call (p50) and the bus bandwidth, a line for each backend (and type, op
// and place where several were measured). A dashed grey line is the copy roofline, brought to the same units.
// Torch-free.
//
//   write_file("comm.svg", comm_bench_plot(result));
#pragma once

#include <string>

#include "phalanx/measure/comm_bench_output.h"

namespace phalanx::measure {

std::string comm_bench_plot(const CommBenchResult& result);

}  // namespace phalanx::measure
