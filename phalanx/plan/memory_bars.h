// What layouts take of a device's memory, as a picture: SVG, one bar a layout, its length the bytes, cut by what they
// are for (parameters, gradients, optimizer, activations, buffers, and what is there beside tensors). Knows no tensor.
//
// Each part has its letter, where it is wide enough, and a hatching beside its colour; below the bar stand the bytes of
// all of them and what a rank sends in a step, above it how much of its device the layout takes. A line across the bar
// is what the device has. Where it is more than three times the longest bar, it is left out, and the legend says so.
//
//   write_file("bars.svg", memory_bars(candidates, {.title = "llama3_8b on 8 x H100-80G", .headroom = 0.05}));
#pragma once

#include <string>
#include <vector>

#include "phalanx/plan/layout_search.h"

namespace phalanx::plan {

struct MemoryBarsOptions {
  std::string title;
  std::string detail = {};  // in a line below it
  double headroom = 0;      // with which the layouts were evaluated
};

/// In the order given; at least one.
std::string memory_bars(const std::vector<Candidate>& layouts, const MemoryBarsOptions& options);

}  // namespace phalanx::plan
