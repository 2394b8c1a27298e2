// Draws how layouts use a device's memory, as SVG: one bar per layout, whose length is its bytes. The bar is divided by
// purpose (parameters, gradients, optimizer, activations, buffers, and memory that is not in tensors). It does not use
// torch.
//
// Each part has its letter, if it is wide enough, and a hatching in addition to its colour. Below the bar are the bytes
// of all parts and what a rank sends in a step; above it, how much of its device the layout takes. A line across the
// bar marks the device's memory. If that is more than three times the longest bar, it is left out, and the legend says
// so.
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
  double headroom = 0;      // the one with which the layouts were evaluated
};

/// Draws the layouts in the order given.
/// REQUIRES: there is at least one.
std::string memory_bars(const std::vector<Candidate>& layouts, const MemoryBarsOptions& options);

}  // namespace phalanx::plan
