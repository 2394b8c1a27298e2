// Divides a model into pipeline stages so that the slowest stage is as fast as possible. It uses no tensors.
//
//   balance_stages({4, 1, 1, 2, 3}, 3)        // {1, 3, 1}: sums 4, 4 and 3
#pragma once

#include <vector>

namespace phalanx {

/// Returns how many consecutive parts each stage takes. The result minimizes the largest sum of costs of a stage. Among
/// equal divisions it is the one whose stages before the last are fullest. Every stage gets at least one part. Throws
/// Error if there are fewer parts than stages, or if a cost is negative or not a number.
std::vector<int> balance_stages(const std::vector<double>& costs, int stages);

}  // namespace phalanx
