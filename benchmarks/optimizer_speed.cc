// Measures the cost of an optimizer step and of the gradient norm, next to libtorch's kernels and a plain sum, in one
// run.
//
//   OMP_NUM_THREADS=1 optimizer_speed [elements=10000000] [repeats=15]
//
// Each row: the medians of alternating calls, in ms, and their ratio (below 1: ours is faster).
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/optim/sum_of_squares.h"

namespace {

double milliseconds(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void compare(const char* what, int repeats, const std::function<void()>& ours, const std::function<void()>& peer) {
  std::vector<double> own, other;
  for (int i = 0; i <= repeats; ++i) {  // the first round warms up
    own.push_back(milliseconds(ours));
    other.push_back(milliseconds(peer));
  }
  own.erase(own.begin());
  other.erase(other.begin());
  std::printf("%-28s %9.2f %9.2f %7.2f\n", what, median(own), median(other), median(own) / median(other));
}

/// The squares summed in float64 over blocks of the whole tensor, on the calling thread.
double plain_norm(const at::Tensor& grad) {
  const float* values = grad.const_data_ptr<float>();
  const auto count = static_cast<std::size_t>(grad.numel());
  double sum = 0;
  for (std::size_t at = 0; at < count; at += phalanx::kSumOfSquaresBlock) {
    sum += phalanx::sum_of_squares(values + at, std::min(phalanx::kSumOfSquaresBlock, count - at));
  }
  return std::sqrt(sum);
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t elements = argc > 1 ? std::atoll(argv[1]) : 10'000'000;
  const int repeats = argc > 2 ? std::atoi(argv[2]) : 15;
  const at::NoGradGuard no_grad;
  const auto value = at::sin(at::arange(elements, at::TensorOptions(at::kFloat)));
  const auto grad = at::sin(at::arange(elements, at::TensorOptions(at::kFloat)).mul_(3));
  std::printf("%lld elements, %d threads\n%-28s %9s %9s %7s\n", static_cast<long long>(elements), at::get_num_threads(),
              "", "ours ms", "peer ms", "ratio");

  {
    const auto ours = value.clone(), peer = value.clone(), m = at::zeros_like(value), v = at::zeros_like(value);
    ours.mutable_grad() = grad;
    phalanx::AdamW optimizer({{"w", ours}});
    const auto step = at::full({}, 1.0F);
    compare(
        "AdamW", repeats, [&] { optimizer.step(1e-3); },
        [&] { at::_fused_adamw_({peer}, {grad}, {m}, {v}, {}, {step}, 1e-3, 0.9, 0.95, 0.1, 1e-8, false, false); });
  }
  {
    const auto ours = value.clone(), peer = value.clone(), b = at::zeros_like(value);
    ours.mutable_grad() = grad;
    phalanx::Sgd optimizer({{"w", ours}}, {.momentum = 0.9, .weight_decay = 0.1});
    compare(
        "SGD with momentum", repeats, [&] { optimizer.step(1e-3); },
        [&] { at::_fused_sgd_({peer}, {grad}, {b}, 0.1, 0.9, 1e-3, 0.0, false, false, false); });
  }
  {
    // The baseline: widen the gradient, step the master weights, round them into the parameter.
    const auto ours = value.to(at::kBFloat16), peer = ours.clone(), narrow_grad = grad.to(at::kBFloat16);
    const auto master = value.clone(), m = at::zeros_like(value), v = at::zeros_like(value);
    ours.mutable_grad() = narrow_grad;
    phalanx::AdamW optimizer({{"w", ours}});
    const auto step = at::full({}, 1.0F);
    compare(
        "AdamW, bfloat16 and master", repeats, [&] { optimizer.step(1e-3); },
        [&] {
          at::_fused_adamw_({master}, {narrow_grad.to(at::kFloat)}, {m}, {v}, {}, {step}, 1e-3, 0.9, 0.95, 0.1, 1e-8,
                            false, false);
          peer.copy_(master);
        });
  }
  for (const std::int64_t row : {1, 16, 256, 1024, 4096}) {
    const auto shaped = row == 1 ? grad : grad.narrow(0, 0, elements / row * row).view({elements / row, row});
    const auto parameter = shaped.clone();
    parameter.mutable_grad() = shaped;
    const std::vector<phalanx::NamedTensor> parameters = {{"w", parameter}};
    char what[64];
    std::snprintf(what, sizeof what, "norm, rows of %lld", static_cast<long long>(row));
    volatile double sink = 0;
    compare(
        what, repeats, [&] { sink = phalanx::grad_norm(parameters).value(); }, [&] { sink = plain_norm(shaped); });
    (void)sink;
  }
  return 0;
}
