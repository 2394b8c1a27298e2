#include "phalanx/nn/router_jitter.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

namespace phalanx::nn {

at::Tensor with_jitter(const at::Tensor& x, const RouterJitter& jitter) {
  const std::int64_t sequences = x.size(0), local = x.size(1), dim = x.size(2), whole = local * jitter.cut.ranks;
  const at::Tensor noise = at::empty(x.sizes(), at::TensorOptions(at::kFloat).device(x.device()));
  const auto fill = [&](const at::Tensor& part, const PositionRange& range) {
    fill_in_run(part, Init::uniform(1.0 - jitter.eps, 1.0 + jitter.eps), jitter.place, jitter.layer + ".jitter",
                {.offsets = {0, range.first, 0}, .shape = {sequences, range.count, dim}}, {sequences, whole, dim});
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
