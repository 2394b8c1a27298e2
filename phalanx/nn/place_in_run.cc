#include "phalanx/nn/place_in_run.h"

#include "phalanx/base/philox.h"

namespace phalanx::nn {

void fill_in_run(const at::Tensor& tensor, const Init& init, const PlaceInRun& place, std::string_view name, Box box,
                 std::vector<std::int64_t> shape) {
  // Each step has its own streams, and within a step each layer, by name (stream_key()).
  const std::uint64_t seed = PhiloxStream(place.seed, static_cast<std::uint64_t>(place.step)).next_u64();
  box.offsets.at(0) += place.first_row;
  shape.at(0) += place.first_row;
  fill_box(tensor, init, seed, name, box, shape);
}

}  // namespace phalanx::nn
