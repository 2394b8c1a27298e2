#include "phalanx/tensor/init.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/tensor/counter_fill.h"

namespace phalanx {
namespace {

constexpr std::int64_t kFillGrain = 1 << 16;   // minimum elements per thread
constexpr std::int64_t kFillStage = 16 << 20;  // elements staged at once if the values are not written in place

void fill_range(std::span<float> out, const Init& init, std::uint64_t key, std::int64_t begin) {
  const auto first = static_cast<std::uint64_t>(begin);
  if (init.kind == Init::Kind::uniform) {
    fill_uniform(key, first, out, static_cast<float>(init.a), static_cast<float>(init.b));
  } else {
    fill_normal(key, first, out, static_cast<float>(init.a), static_cast<float>(init.b));
  }
}

void fill_floats(float* out, std::int64_t count, const Init& init, std::uint64_t key, std::int64_t begin) {
  at::parallel_for(0, count, kFillGrain, [&](std::int64_t from, std::int64_t to) {
    fill_range({out + from, static_cast<std::size_t>(to - from)}, init, key, begin + from);
  });
}

}  // namespace

void fill(const at::Tensor& tensor, const Init& init, std::uint64_t seed, std::string_view name, std::int64_t begin) {
  const at::NoGradGuard no_grad;
  if (init.kind == Init::Kind::constant) {
    tensor.fill_(init.a);
    return;
  }
  const std::uint64_t key = stream_key(seed, name);
  if (tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous()) {
    fill_floats(tensor.mutable_data_ptr<float>(), tensor.numel(), init, key, begin);
    return;
  }
  if (!tensor.is_contiguous()) {
    const at::Tensor whole = at::empty(tensor.sizes(), tensor.options());
    fill(whole, init, seed, name, begin);
    tensor.copy_(whole);
    return;
  }
  const at::Tensor flat = tensor.view({-1});
  const at::Tensor stage = at::empty({std::min(flat.numel(), kFillStage)}, at::TensorOptions(at::kFloat));
  for (std::int64_t from = 0; from < flat.numel(); from += kFillStage) {
    const std::int64_t count = std::min(kFillStage, flat.numel() - from);
    fill_floats(stage.mutable_data_ptr<float>(), count, init, key, begin + from);
    flat.narrow(0, from, count).copy_(stage.narrow(0, 0, count));
  }
}

void fill_shard(const at::Tensor& local, const Init& init, std::uint64_t seed, const ShardSpec& spec, int rank) {
  const Box box = spec.local_box(rank);
  if (!spec.placement().partial.empty())
    throw ConfigError(fmt::format("{}: a partial parameter cannot be initialised; replicate or split it", spec.text()));
  if (local.sizes() != at::IntArrayRef(box.shape))
    throw Error(fmt::format("{}: rank {} holds {}: expected a tensor of shape [{}], found [{}]", spec.text(), rank,
                            box.text(), fmt::join(box.shape, ", "), fmt::join(local.sizes(), ", ")));
  fill_box(local, init, seed, spec.name(), box, spec.shape());
}

void fill_box(const at::Tensor& local, const Init& init, std::uint64_t seed, std::string_view name, const Box& box,
              const std::vector<std::int64_t>& shape) {
  if (local.sizes() != at::IntArrayRef(box.shape))
    throw Error(fmt::format("box {} of '{}': expected a tensor of shape [{}], found [{}]", box.text(), name,
                            fmt::join(box.shape, ", "), fmt::join(local.sizes(), ", ")));
  const std::vector<FlatRange> ranges = flat_ranges(box, shape);
  if (ranges.empty()) return;
  if (ranges.size() == 1 || init.kind == Init::Kind::constant)
    return fill(local, init, seed, name, ranges.front().begin);

  const at::NoGradGuard no_grad;
  const bool in_place = local.device().is_cpu() && local.scalar_type() == at::kFloat && local.is_contiguous();
  const at::Tensor floats = in_place ? local : at::empty(box.shape, at::TensorOptions(at::kFloat));
  float* const out = floats.mutable_data_ptr<float>();
  const std::uint64_t key = stream_key(seed, name);
  const std::int64_t length = ranges.front().length;  // the same for all ranges
  const auto count = static_cast<std::int64_t>(ranges.size());
  at::parallel_for(0, count, std::max<std::int64_t>(1, kFillGrain / length), [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from; i < to; ++i)
      fill_range({out + i * length, static_cast<std::size_t>(length)}, init, key,
                 ranges[static_cast<std::size_t>(i)].begin);
  });
  if (!in_place) local.copy_(floats);
}

}  // namespace phalanx
