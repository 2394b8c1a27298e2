// Two independent operations, one after the other and at the same time: how much of the shorter one is hidden?
//
// On the CPU: an all_reduce, and matrix products sized to take as long.
//
//   $ phalanx launch --nproc-per-node 2 -- overlap --device cpu --backend gloo
//   matmul (512^3, 4 times)                          10.74 ms
//   all_reduce (16777216 bytes, gloo)                12.43 ms
//   one after the other                              23.95 ms  1.93 x the longer one
//   both at once                                     28.24 ms  2.27 x the longer one, speed-up 0.85
//
// Two ranks on two cores gain nothing here: their products fill both cores, and through loopback or shared memory an
// all_reduce is nothing but computing (copies and sums), so each takes from the other what it needs. There is a gain
// where something else than the cores is the slow part, or with a core to spare for each rank. Over a network both at
// once take about as long as one: benchmarks/overlap_slow_link.sh shows this on two cores over a link held to 1 Gbit/s,
// where one after the other takes 1.9 times the longer one, and both at once 1.1 times.
//
//   overlap --device cuda      one GPU: a 16384 x 16384 matmul and a copy to the GPU, on two streams
//
// --trace FILE writes a trace (rank 0's; on a GPU with the times of the GPU), which opens in ui.perfetto.dev.
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <thread>

#include "phalanx/base/file.h"
#include "phalanx/observe/trace.h"
#include "recipes/recipe.h"
#include "recipes/traced_stream.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Pair {
  std::string first_name, second_name;
  std::function<void()> first, second, both;
};

/// The time of the slowest rank, the least of some rounds: other programs disturb it least.
double timed(phalanx::Communicator& world, int rounds, const std::function<void()>& what,
             phalanx::observe::TraceRecorder* trace = nullptr, const char* name = "") {
  double best = 1e9;
  for (int round = 0; round < rounds; ++round) {
    world.barrier();
    const phalanx::observe::TraceSpan span(trace, name, "phase");
    const auto begin = Clock::now();
    what();
    at::Tensor time = at::full({1}, std::chrono::duration<double>(Clock::now() - begin).count(), at::kDouble);
    world.all_reduce(time, {.op = phalanx::ReduceOp::max});
    best = std::min(best, *time.const_data_ptr<double>());
  }
  return best;
}

Pair matmul_and_all_reduce(phalanx::Communicator& world, phalanx::observe::TraceRecorder& trace, std::int64_t bytes) {
  at::set_num_threads(1);  // the other cores are for the transfer
  const at::Tensor a = at::full({512, 512}, 0.5F), message = at::full({bytes / 4}, 0.0F);
  const auto count = std::make_shared<std::int64_t>(1);
  const auto products = [=, &trace] {
    const phalanx::observe::TraceSpan span(&trace, "matmul", "compute");
    for (std::int64_t k = 0; k < *count; ++k) at::mm(a, a);
  };
  const auto transfer = [=, &world, &trace] {
    const phalanx::observe::TraceSpan span(&trace, "all_reduce", "comm");
    world.all_reduce(message);
  };
  for (int fit = 0; fit < 4; ++fit) {
    const double ratio = timed(world, 3, transfer) / timed(world, 3, products);
    *count = std::max<std::int64_t>(1, std::llround(static_cast<double>(*count) * ratio));
  }
  return {.first_name = fmt::format("matmul (512^3, {} times)", *count),
          .second_name = fmt::format("all_reduce ({} bytes, {})", bytes, world.backend_name()),
          .first = products,
          .second = transfer,
          .both = [=, &world, &trace] {
            const phalanx::Work work = world.all_reduce(message, {.async = true});
            const std::jthread waiter([&, begin = Clock::now()] {  // gives the transfer its own row
              while (!work.is_done()) std::this_thread::sleep_for(std::chrono::microseconds(200));
              trace.span("all_reduce", "comm", begin, Clock::now());
            });
            products();
            work.wait();
          }};
}

Pair matmul_and_copy(c10::Device device, phalanx::observe::TraceRecorder& trace, std::int64_t size) {
  const at::TensorOptions options(at::kFloat);
  const at::Tensor a = at::full({size, size}, 0.5F, options.device(device)), target = at::empty_like(a);
  const at::Tensor host = at::full({size, size}, 1.0F, options.pinned_memory(true));
  // They wait for everything that has begun: `a` was filled on another stream.
  const auto compute = std::make_shared<TracedStream>(device, "GPU compute", trace);
  const auto copy = std::make_shared<TracedStream>(device, "GPU copy", trace);
  const auto multiply = [=] { compute->run("matmul", "compute", [=] { at::mm(a, a); }); };
  const auto upload = [=] { copy->run("copy", "comm", [=] { target.copy_(host, /*non_blocking=*/true); }); };
  const auto finish = [=] { compute->finish(), copy->finish(); };
  return {.first_name = fmt::format("matmul ({0} x {0})", size),
          .second_name = fmt::format("copy to the GPU ({} bytes)", host.nbytes()),
          .first = [=] { multiply(), finish(); },
          .second = [=] { upload(), finish(); },
          .both = [=] { multiply(), upload(), finish(); }};
}

struct Options {
  std::string trace_file;
  std::int64_t bytes = std::int64_t{16} << 20, size = 16384;
  int rounds = 5;
};

bool measure(const phalanx::ProcessContext& context, const Options& options) {
  const bool on_gpu = !context.device.is_cpu();
  if (!on_gpu && context.world_size < 2) throw phalanx::UsageError("start two ranks: phalanx launch -n 2 ...");
  phalanx::observe::TraceRecorder trace({.rank = context.rank});
  const Pair pair = on_gpu ? matmul_and_copy(context.device, trace, options.size)
                           : matmul_and_all_reduce(*context.world, trace, options.bytes);
  pair.both();
  const auto time_of = [&](const char* name, const std::function<void()>& what) {
    return timed(*context.world, options.rounds, what, &trace, name);
  };
  const double first = time_of("the first alone", pair.first), second = time_of("the second alone", pair.second);
  const double serial = time_of("one after the other", [&] { pair.first(), pair.second(); });
  const double both = time_of("both at once", pair.both), one = std::max(first, second);
  if (context.rank != 0) return true;
  if (!options.trace_file.empty()) phalanx::write_file(options.trace_file, trace.to_json());
  fmt::print("{:<44} {:9.2f} ms\n{:<44} {:9.2f} ms\n", pair.first_name, first * 1e3, pair.second_name, second * 1e3);
  fmt::print("{:<44} {:9.2f} ms  {:.2f} x the longer one\n", "one after the other", serial * 1e3, serial / one);
  fmt::print("{:<44} {:9.2f} ms  {:.2f} x the longer one, speed-up {:.2f}\n", "both at once", both * 1e3, both / one,
             serial / both);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  recipe::Program program;
  program.add_option("--backend", program.init().backend, "of the all_reduce: auto, shm, gloo, ...");
  program.add_option("--bytes", options.bytes, "of the all_reduce")->check(CLI::Range(4, 1 << 30));
  program.add_option("--size", options.size, "of the matrices on the GPU")->check(CLI::Range(16, 65536));
  program.add_option("--rounds", options.rounds, "the least time counts")->check(CLI::Range(1, 1000));
  program.add_option("--trace", options.trace_file, "Chrome trace of rank 0");
  return program.run(argc, argv, [&](const auto& context) { return measure(context, options); });
}
