// Measures the experts of a layer beside one dense feed-forward net that does as many operations.
//
//   OMP_NUM_THREADS=2 experts_speed [--dim 512] [--hidden 1024] [--repeats 5]
//
// For 8 and 64 experts and 32 to 1,024 tokens each: the medians of forward and backward pass of both, measured in
// turns, their GFLOP/s, and the experts' rate by the dense net's.
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <vector>

#include "phalanx/nn/init.h"
#include "phalanx/nn/mixture_of_experts.h"

namespace {

using phalanx::nn::call;

double median(std::vector<double>& seconds) {
  std::ranges::sort(seconds);
  return seconds[seconds.size() / 2];
}

double timed(const auto& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) {
  std::int64_t dim = 512, hidden = 1024, repeats = 5;
  CLI::App app("Experts of a layer beside a dense feed-forward net");
  app.add_option("--dim", dim)->capture_default_str();
  app.add_option("--hidden", hidden, "of each expert, and of the dense net")->capture_default_str();
  app.add_option("--repeats", repeats)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  fmt::print("{} threads, dim {}, hidden {}; forward and backward pass, GFLOP/s\n", at::get_num_threads(), dim, hidden);
  fmt::print("{:>8} {:>7} {:>10} {:>10} {:>6}\n", "experts", "tokens", "experts", "dense", "ratio");
  for (const std::int64_t count : {8, 64}) {
    phalanx::nn::Experts experts({.dim = dim, .hidden = hidden, .experts = count, .experts_per_token = 1}, {});
    phalanx::nn::FeedForward dense(dim, hidden);
    phalanx::nn::initialise(experts, 1);
    phalanx::nn::initialise(dense, 1);
    for (const std::int64_t tokens : {32, 128, 256, 1024}) {
      const std::vector<std::int64_t> counts(static_cast<std::size_t>(count), tokens);
      const at::Tensor x = at::randn({count * tokens, dim}).requires_grad_(), dy = at::randn({count * tokens, dim});
      std::vector<double> of_experts, of_dense;
      for (std::int64_t i = 0; i <= repeats; ++i) {
        const double a = timed([&] { call(experts, x, counts).backward(dy); });
        const double b = timed([&] { call(dense, x).backward(dy); });
        if (i == 0) continue;  // the first pass makes gradients
        of_experts.push_back(a);
        of_dense.push_back(b);
      }
      const double flops = 3.0 * 2 * 3 * static_cast<double>(count * tokens * dim * hidden) / 1e9;
      const double fast = flops / median(of_experts), full = flops / median(of_dense);
      fmt::print("{:>8} {:>7} {:>10.1f} {:>10.1f} {:>6.2f}\n", count, tokens, fast, full, fast / full);
      std::fflush(stdout);
    }
  }
  return 0;
}
