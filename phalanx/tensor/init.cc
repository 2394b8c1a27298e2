#include "phalanx/tensor/init.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <span>

#include "phalanx/tensor/counter_fill.h"

namespace phalanx {
namespace {

constexpr std::int64_t kFillGrain = 1 << 16;   // elements a thread takes at least
constexpr std::int64_t kFillStage = 16 << 20;  // elements staged at once where the values are not written in place

void fill_floats(float* out, std::int64_t count, const Init& init, std::uint64_t key, std::int64_t begin) {
  at::parallel_for(0, count, kFillGrain, [&](std::int64_t from, std::int64_t to) {
    const std::span<float> part(out + from, static_cast<std::size_t>(to - from));
    const auto first = static_cast<std::uint64_t>(begin + from);
    if (init.kind == Init::Kind::uniform) {
      fill_uniform(key, first, part, static_cast<float>(init.a), static_cast<float>(init.b));
    } else {
      fill_normal(key, first, part, static_cast<float>(init.a), static_cast<float>(init.b));
    }
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

}  // namespace phalanx
