#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "phalanx/base/human.h"
#include "phalanx/lecture/steps.h"
#include "phalanx/measure/bandwidth.h"
#include "phalanx/measure/comm_bench_options.h"
#include "phalanx/measure/topology.h"

namespace phalanx::lecture {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// A GPU returns from a call before it has done the work.
void synchronise(at::Device device) {
  if (device.is_cuda()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace

void measure_levels(Stage& stage) {
  const measure::Topology machine = measure::read_topology();
  const auto levels = measure::measure_memory(machine, std::chrono::milliseconds(20));
  stage.print(fmt::format("{:<16} {:>18}", "copies by one CPU", "GB/s"));
  double first = 0, last = 0;
  for (const char* name : {"L1", "L2", "L3", "memory"}) {
    const auto level = std::find_if(levels.begin(), levels.end(), [&](const auto& l) { return l.name == name; });
    const bool found = level != levels.end();
    stage.print(fmt::format("{:<16} {:>18}", name, found ? measured(level->one_cpu / 1e9) : "~-"));
    if (!found) continue;
    first = first == 0 ? level->one_cpu : first;
    last = level->one_cpu;
  }
  const auto shared = measure::measure_shared_memory(std::uint64_t{64} << 20);
  const auto loopback = measure::measure_loopback(std::uint64_t{64} << 20);
  stage.print(fmt::format("{:<16} {:>18} {:>12} us", "shared memory", measured(shared.bytes_per_second / 1e9),
                          measured(shared.latency_seconds * 1e6)));
  stage.print(fmt::format("{:<16} {:>18} {:>12} us", "loopback TCP", measured(loopback.bytes_per_second / 1e9),
                          measured(loopback.latency_seconds * 1e6)));
  stage.check(levels.size() < 2 || first > last, "the nearest cache is faster than memory");
}

void bytes_and_links(Stage& stage) {
  // What one GPU sends in a step: bf16 weights and gradients, 8 ranks, 8,192 tokens a rank.
  struct Model {
    const char* name;
    double parameters, layers, dim;
  };
  constexpr double kRanks = 8, kTokens = 8192, kBytes = 2;
  const std::vector<Model> models = {{"1B", 1.2e9, 16, 2048}, {"8B", 8.0e9, 32, 4096}, {"70B", 70.6e9, 80, 8192}};
  stage.print("sent by one GPU of 8 in a step, and the time of it in ms, if nothing is hidden");
  stage.print(fmt::format("{:<6} {:<18} {:>9} {:>13} {:>13} {:>13}", "model", "strategy", "GB", "NVLink 4",
                          "PCIe 5 x16", "400 Gbit/s"));
  double tensor_70b = 0, pipeline_70b = 0;
  for (const Model& model : models) {
    const double share = (kRanks - 1) / kRanks, hidden = kTokens * model.dim * kBytes;
    const std::vector<std::pair<const char*, double>> rows = {
        {"DDP, ZeRO-1, -2", 2 * share * model.parameters * kBytes},
        {"ZeRO-3, FSDP", 3 * share * model.parameters * kBytes},
        {"tensor", 8 * model.layers * share * hidden},
        {"pipeline", 2 * hidden}};
    for (const auto& [name, bytes] : rows) {
      stage.print(fmt::format("{:<6} {:<18} {:>9.2f} {:>13.1f} {:>13.1f} {:>13.1f}", model.name, name, bytes / 1e9,
                              bytes / 450e9 * 1e3, bytes / 63e9 * 1e3, bytes / 50e9 * 1e3));
    }
    tensor_70b = rows[2].second, pipeline_70b = rows[3].second;
  }
  stage.check(tensor_70b > 100 * pipeline_70b, "tensor parallelism sends hundreds of times what a pipeline sends");
}

void send_and_receive(Stage& stage) {
  if (stage.ranks() < 2) return stage.print("(needs two ranks)");
  stage.on_ranks(2, [](Rank& rank) {
    const at::Tensor x = rank.number() == 0 ? at::ones({10}, rank.floats()) : at::zeros({10}, rank.floats());
    rank.say("before", tensor_text(x));
    rank.number() == 0 ? rank.comm().send(x, 1) : rank.comm().recv(x, 0);
    rank.say("after rank 0's send and rank 1's recv", tensor_text(x));
    rank.check(at::equal(x, at::ones({10}, rank.floats())), "rank 1 has the ones");
  });
}

void async_and_barrier(Stage& stage) {
  if (stage.ranks() < 2) return stage.print("(needs two ranks)");
  stage.on_ranks(2, [](Rank& rank) {
    const auto other = rank.comm().split(0, rank.number(), "barriers");
    at::Tensor x = at::full({1}, rank.number() + 1.0, rank.floats());
    const std::string title = "all_reduce with the async flag; rank 1 calls it after a barrier on another communicator";
    if (rank.number() == 0) {
      const Work work = rank.comm().all_reduce(x, {.async = true});
      const bool before = !rank.device().is_cuda() && work.is_done();
      rank.say(title, fmt::format("called; done: {}", before ? "yes" : "no"));
      rank.check(!before, "it cannot be done before rank 1 has called it");
      other->barrier();
      work.wait();
      rank.say(title, fmt::format("waited; x = {}", tensor_text(x)));
    } else {
      other->barrier();
      rank.comm().all_reduce(x);
      rank.say(title, fmt::format("called and waited; x = {}", tensor_text(x)));
    }
    rank.check(x.item<double>() == 3, "after wait() both have the sum");
  });
}

namespace {

/// What a benchmark times: warmed up, begun together, and finished on the device.
double time_of(Rank& rank, const std::function<void()>& collective) {
  for (int i = 0; i < 3; ++i) collective();  // memory, connections, kernels
  synchronise(rank.device());
  rank.comm().barrier();  // all begin together
  const auto begin = Clock::now();
  collective();
  synchronise(rank.device());  // else only the launch is timed
  return seconds_since(begin);
}

}  // namespace

void benchmark(Stage& stage) {
  constexpr std::int64_t kElements = 1024 * 1024;
  for (const int n : {2, 4}) {
    if (n > stage.ranks()) continue;
    stage.on_ranks(n, [n](Rank& rank) {
      const double each = kElements * 4.0;
      at::Tensor x = at::full({kElements}, 1.0, rank.floats());
      double seconds = time_of(rank, [&] { rank.comm().all_reduce(x); });
      const auto say = [&](const char* verb, double estimate, double algbw, double busbw) {
        const std::string us = measured(seconds * 1e6);
        rank.say(fmt::format("{}, world size {}: us; GB/s as estimate, algbw, busbw", verb, n),
                 fmt::format("{:>8} {:>8} {:>8} {:>8}", us, measured(estimate / 1e9), measured(algbw / 1e9),
                             measured(busbw / 1e9)));
      };
      double estimate = 2 * (n - 1) * each / (n * seconds);  // bytes sent by all, over the time of all
      double busbw = each / seconds * measure::bus_factor(measure::BenchVerb::all_reduce, n);
      say("all_reduce", estimate, each / seconds, busbw);
      rank.check(std::abs(estimate / busbw - 1) < 1e-9, "all_reduce: the estimate is busbw");
      const at::Tensor parts = at::full({n * kElements}, 1.0, rank.floats()),
                       part = at::zeros({kElements}, rank.floats());
      seconds = time_of(rank, [&] { rank.comm().reduce_scatter(part, parts); });
      estimate = (n - 1) * each / (n * seconds);
      busbw = n * each / seconds * measure::bus_factor(measure::BenchVerb::reduce_scatter, n);  // the array is n parts
      say("reduce_scatter", estimate, n * each / seconds, busbw);
      rank.check(std::abs(estimate * n / busbw - 1) < 1e-9,
                 "reduce_scatter: the estimate is busbw over the number of ranks");
      rank.check(part[0].item<double>() == n, "the result is right");
    });
  }
}

void overlap(Stage& stage) {
  if (stage.ranks() < 2) return stage.print("(needs two ranks)");
  constexpr int kTrials = 7;
  stage.on_ranks(2, [](Rank& rank) {
    const at::Tensor a = at::full({256, 256}, 0.5, rank.floats());
    const at::Tensor message = at::full({std::int64_t{1} << 20}, 0.0, rank.floats());
    at::Tensor product;
    const auto multiply = [&] {
      for (int i = 0; i < 4; ++i) product = at::mm(a, a);
    };
    const auto transfer = [&] { rank.comm().all_reduce(message); };
    const auto both = [&] {
      const Work work = rank.comm().all_reduce(message, {.async = true});
      multiply();
      work.wait();
    };
    const auto median = [&](const std::function<void()>& what) {
      std::vector<double> trials;
      what();
      for (int i = 0; i < kTrials; ++i) {
        synchronise(rank.device());
        rank.comm().barrier();
        const auto begin = Clock::now();
        what();
        synchronise(rank.device());
        trials.push_back(seconds_since(begin) * 1e3);
      }
      std::sort(trials.begin(), trials.end());
      return trials[kTrials / 2];
    };
    const double compute = median(multiply);
    const at::Tensor alone = product.clone();
    const double send = median(transfer);
    // The mean of two orders: neither gets the warmer caches.
    const double one = median([&] { multiply(), transfer(); }), other = median([&] { transfer(), multiply(); });
    const double serial = (one + other) / 2, together = median(both);
    rank.say(
        "medians of 7 sorted trials, in ms",
        fmt::format("matmul {}  all_reduce {}  one after the other {}  both at once {}  speed-up {}", measured(compute),
                    measured(send), measured(serial), measured(together), measured(serial / together)));
    rank.check(at::equal(product, alone), "the product is the same, whatever is in flight beside it");
  });
}

}  // namespace phalanx::lecture
