// Measures from how many rows on a library's product is faster than kernels/skinny_gemm.h: the value for
// kSkinnyGemmRows.
//
//   OMP_NUM_THREADS=1 few_rows [--budget-ms 200]
//
// For matrices [out, in] of small and large models and 1 to 64 rows: the medians of both, measured in turns, and how
// many times as fast skinny_gemm() is. Weights are cold: each call uses another of several matrices that together are
// larger than a cache, as the layers of a model are.
#include <ATen/Parallel.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "phalanx/kernels/row_kernels.h"
#include "phalanx/kernels/skinny_gemm.h"

namespace {

constexpr std::int64_t kColdBytes = 64 << 20;

double median_us(std::vector<double>& seconds) {
  std::ranges::sort(seconds);
  return 1e6 * seconds[seconds.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  double budget_ms = 200;
  CLI::App app("Products of few rows beside a library's");
  app.add_option("--budget-ms", budget_ms, "for each row of the table")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const c10::InferenceMode inference;
  fmt::print("{} kernels, {} threads; microseconds a product, library / few rows (times as fast)\n",
             phalanx::kernels::row_kernels().isa, at::get_num_threads());
  fmt::print("{:>12}", "rows");
  const std::vector<std::int64_t> counts = {1, 2, 4, 8, 12, 16, 24, 32, 64};
  for (const std::int64_t rows : counts) fmt::print(" {:>22}", rows);
  fmt::print("\n");
  for (const auto& [out, in] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {256, 256}, {688, 256}, {256, 688}, {4096, 256}, {2048, 2048}, {8192, 2048}, {4096, 4096}}) {
    fmt::print("{:>12}", fmt::format("{}x{}", out, in));
    std::vector<at::Tensor> weights;
    for (std::int64_t bytes = 0; bytes < kColdBytes; bytes += 4 * out * in) weights.push_back(at::randn({out, in}));
    for (const std::int64_t rows : counts) {
      const at::Tensor x = at::randn({rows, in});
      std::vector<double> library, few;
      const auto begin = std::chrono::steady_clock::now();
      const auto timed = [](const auto& body) {
        const auto start = std::chrono::steady_clock::now();
        body();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      };
      for (std::size_t i = 0; few.size() < 5 || std::chrono::steady_clock::now() - begin <
                                                    std::chrono::duration<double, std::milli>(budget_ms);
           i += 2) {
        library.push_back(timed([&] { at::linear(x, weights[i % weights.size()]); }));
        few.push_back(timed([&] { phalanx::kernels::skinny_gemm(x, weights[(i + 1) % weights.size()]); }));
      }
      const double slow = median_us(library), fast = median_us(few);
      fmt::print(" {:>22}", fmt::format("{:.0f} / {:.0f} ({:.2f})", slow, fast, slow / fast));
      std::fflush(stdout);
    }
    fmt::print("\n");
  }
  return 0;
}
