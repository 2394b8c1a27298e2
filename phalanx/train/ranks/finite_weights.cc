#include "phalanx/train/ranks/finite_weights.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "phalanx/base/error.h"

namespace phalanx::train {
namespace {

/// The name of the first weight that is not finite. It computes largest magnitudes, which copies no tensor, and waits
/// once for all of them.
std::string first_not_finite(const std::vector<NamedTensor>& weights) {
  std::vector<at::Tensor> largest;
  std::vector<const std::string*> names;
  for (const NamedTensor& weight : weights) {
    if (weight.tensor.numel() == 0 || !weight.tensor.is_floating_point()) continue;
    // In the weight's own type: in another one it would be converted as a whole.
    largest.push_back(
        at::linalg_vector_norm(weight.tensor.detach(), std::numeric_limits<double>::infinity()).to(at::kFloat));
    names.push_back(&weight.name);
  }
  if (largest.empty()) return {};
  const at::Tensor on_host = at::stack(largest).cpu();
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!std::isfinite(on_host.const_data_ptr<float>()[i])) return *names[i];
  }
  return {};
}

}  // namespace

void require_finite_weights(Communicator& world, const std::vector<NamedTensor>& weights, const std::string& when,
                            const std::string& advice) {
  const std::vector<std::string> found = world.all_gather_bytes(first_not_finite(weights));
  for (std::size_t rank = 0; rank < found.size(); ++rank) {
    if (found[rank].empty()) continue;
    throw Error(fmt::format("{}: the weight {} is not finite on rank {}: nothing is saved; {}", when, found[rank], rank,
                            advice));
  }
}

}  // namespace phalanx::train
