#include "phalanx/checkpoint/expert_biases.h"

#include <algorithm>
#include <system_error>

#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/models/config/parameter_kinds.h"

namespace phalanx {

bool holds_expert_biases(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path / kManifestName, error)) return false;
  return std::ranges::any_of(SavedState(path).tensors(),
                             [](const SavedTensor& tensor) { return models::is_expert_bias(tensor.name); });
}

}  // namespace phalanx
