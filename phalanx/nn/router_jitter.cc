#include "phalanx/nn/router_jitter.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "phalanx/base/philox.h"
#include "phalanx/tensor/init.h"

namespace phalanx::nn {

at::Tensor with_jitter(const at::Tensor& x, const RouterJitter& jitter) {
  // Each step has its own streams, and within a step each layer, by name (stream_key()).
  const std::uint64_t seed = PhiloxStream(jitter.seed, static_cast<std::uint64_t>(jitter.step)).next_u64();
  const std::int64_t sequences = x.size(0), local = x.size(1), dim = x.size(2), whole = local * jitter.cut.ranks;
  const at::Tensor noise = at::empty(x.sizes(), at::TensorOptions(at::kFloat).device(x.device()));
  const auto fill = [&](const at::Tensor& part, const PositionRange& range) {
    fill_box(part, Init::uniform(1.0 - jitter.eps, 1.0 + jitter.eps), seed, jitter.layer + ".jitter",
             {.offsets = {jitter.first_row, range.first, 0}, .shape = {sequences, range.count, dim}},
             {jitter.first_row + sequences, whole, dim});
  };
  if (jitter.cut.ranks == 1) {
    fill(noise, {.first = 0, .count = whole});
  } else {
    std::int64_t begin = 0;
    for (const PositionRange& range : jitter.cut.ranges(whole)) {
      fill(noise.narrow(1, begin, range.count), range);
      begin += range.count;
    }
  }
  return x * noise;
}

}  // namespace phalanx::nn
