#include "phalanx/comm/slices.h"

#include <fmt/format.h>

namespace phalanx {

std::string all_to_all_mismatch(const std::vector<const std::int64_t*>& inputs,
                                const std::vector<const std::int64_t*>& outputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i)
    for (std::size_t j = 0; j < outputs.size(); ++j)
      if (inputs[i][j] != outputs[j][i])
        return fmt::format(
            "the counts of all_to_all differ: rank {} sends {} elements to rank {}, which "
            "expects {}",
            i, inputs[i][j], j, outputs[j][i]);
  return {};
}

}  // namespace phalanx
