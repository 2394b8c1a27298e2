// Where to cut a model into pipeline stages, so that the slowest stage is as fast as it can be. Knows no tensor.
//
//   balance_stages({4, 1, 1, 2, 3}, 3)        // {1, 3, 1}: sums 4, 4 and 3
#pragma once

#include <vector>

namespace phalanx {

/// How many of the parts, in their order, each stage takes: the division whose largest sum of costs is the smallest;
/// among those, the one whose stages before the last are fullest. Every stage gets at least one part. Throws Error for
/// fewer parts than stages and for costs that are negative or no numbers.
std::vector<int> balance_stages(const std::vector<double>& costs, int stages);

}  // namespace phalanx
