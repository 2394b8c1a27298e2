#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <memory>

#include "phalanx/base/human.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/lecture/flow.h"
#include "phalanx/lecture/levels.h"
#include "phalanx/lecture/ring.h"
#include "phalanx/lecture/steps.h"
#include "phalanx/lecture/timeline.h"
#include "phalanx/measure/bandwidth.h"
#include "phalanx/measure/collectives/comm_bench.h"
#include "phalanx/measure/comm_bench_options.h"
#include "phalanx/measure/gpu_links.h"
#include "phalanx/measure/topology.h"
#include "phalanx/store/hash_store.h"

namespace phalanx::lecture {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

constexpr std::int64_t kElements = 1024 * 1024, kBenchCalls = 40;

/// A GPU returns from a call before it has done the work.
void synchronise(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace

namespace {

std::string text_of_caches(const measure::Topology& machine) {
  std::string text;
  for (int level = 1; level <= 3; ++level) {
    const std::uint64_t bytes = machine.cpus.empty() ? 0 : machine.cache_bytes(level, machine.cpus.front().id);
    if (bytes > 0) text += fmt::format("{}L{} {}", text.empty() ? "" : ", ", level, human_bytes(bytes));
  }
  return text;
}

std::string text_of_nodes(const measure::Topology& machine) {
  std::string text = fmt::format("{}", machine.nodes.size());
  for (const measure::NumaNode& node : machine.nodes) {
    text += fmt::format("; {}: {} CPUs, {}", node.id, node.cpus.size(), human_bytes(node.bytes));
  }
  return text;
}

std::string text_of_network(const measure::Topology& machine) {
  std::string text;
  for (const measure::NetworkDevice& device : machine.network) {
    if (device.kind == "virtual") continue;
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", device.name, device.kind);
  }
  for (const measure::InfinibandPort& port : machine.infiniband) {
    text += fmt::format(", {} port {} ({})", port.device, port.port, port.rate);
  }
  return text;
}

std::string text_of_gpus() {
  const measure::GpuLinks gpus = measure::read_gpu_links();
  if (gpus.gpus.empty()) return "none: " + gpus.problem;
  return fmt::format("{} x {}, PCIe {}", gpus.gpus.size(), gpus.gpus.front().name, gpus.gpus.front().pcie);
}

}  // namespace

void machine_facts(Stage& stage) {
  const measure::Topology machine = measure::read_topology();
  const auto row = [&](const char* what, const std::string& fact) {
    stage.print(fmt::format("{:<12} ~ {}", what, fact.empty() ? "not known" : fact));
  };
  row("processor", fmt::format("{}, {} socket(s), {} cores, {} CPUs", machine.cpu_model, machine.packages(),
                               machine.cores(), machine.cpus.size()));
  row("caches", text_of_caches(machine));
  row("NUMA nodes", text_of_nodes(machine));
  row("network", text_of_network(machine));
  row("GPUs", text_of_gpus());
}

namespace {

/// "####": the logarithm of a rate, 0.1 GB/s and 10 TB/s being the ends of the scale.
double logarithmic(double bytes_per_second) { return std::log10(std::max(bytes_per_second, 1e8) / 1e8) / 5; }
std::string bar_text(double length) { return std::string(static_cast<std::size_t>(1 + 30 * length), '#'); }

}  // namespace

void measure_levels(Stage& stage) {
  const measure::Topology machine = measure::read_topology();
  std::vector<Bar> bars;
  const auto row = [&](const std::string& name, double rate, const std::string& latency) {
    bars.push_back({name, logarithmic(rate), fmt::format("{:.3g} GB/s{}", rate / 1e9, latency), "t0"});
    stage.print(fmt::format("{:<14} ~ {:>6.3g} GB/s {}{}", name, rate / 1e9, bar_text(bars.back().length), latency));
  };
  const auto link = [&](const char* name, const measure::LinkSpeed& speed) {
    row(name, speed.bytes_per_second, fmt::format(", {:.3g} us", speed.latency_seconds * 1e6));
  };
  stage.print("copies by one CPU, messages of 64 MiB; bars are logarithms");
  const std::vector<measure::MemoryLevel> levels =
      fastest_of_measurements([&] { return measure::measure_memory(machine, std::chrono::milliseconds(20)); });
  for (const char* name : {"L1", "L2", "L3", "memory"}) {
    const auto level = std::find_if(levels.begin(), levels.end(), [&](const auto& l) { return l.name == name; });
    if (level == levels.end()) {
      stage.print(fmt::format("{:<14} ~ not known", name));
    } else if (!is_told_apart(levels, static_cast<std::size_t>(level - levels.begin()))) {
      stage.print(fmt::format("{:<14} ~ not told apart from what lies behind it", name));
    } else {
      row(name, level->one_cpu, "");
    }
  }
  link("shared memory", measure::measure_shared_memory(std::uint64_t{64} << 20));
  link("loopback TCP", measure::measure_loopback(std::uint64_t{64} << 20));
  stage.show({picture_of_bars("measured on this machine, by logarithms", bars)});
  stage.check(levels.size() < 2 || levels.front().one_cpu > levels.back().one_cpu,
              "the nearest cache is faster than memory");
}

void bytes_and_links(Stage& stage) {
  // What one GPU sends in a step of 8 x 8,192 tokens: bf16 weights, gradients and activations. Each rank of data
  // parallelism has 8,192 of the tokens; with the others all go through all ranks, 8,192 at a time.
  struct Model {
    const char* name;
    double parameters, layers, dim;
  };
  constexpr double kRanks = 8, kTokens = 8192, kBytes = 2;
  const std::vector<Model> models = {{"1B", 1.2e9, 16, 2048}, {"8B", 8.0e9, 32, 4096}, {"70B", 70.6e9, 80, 8192}};
  stage.print("sent by one of 8 GPUs in a step of 65,536 tokens; ms if nothing is hidden");
  stage.print(fmt::format("{:<6} {:<18} {:>9} {:>13} {:>13} {:>13}", "model", "strategy", "GB", "NVLink 4",
                          "PCIe 5 x16", "400 Gbit/s"));
  double least = 1e9, most = 0;  // of tensor parallelism, by what a pipeline sends
  for (const Model& model : models) {
    const double share = (kRanks - 1) / kRanks, hidden = kRanks * kTokens * model.dim * kBytes;
    const std::vector<std::pair<const char*, double>> rows = {{"DDP, ZeRO-1/2", 2 * share * model.parameters * kBytes},
                                                              {"ZeRO-3/FSDP", 3 * share * model.parameters * kBytes},
                                                              {"tensor", 8 * model.layers * share * hidden},
                                                              {"pipeline", 2 * hidden}};
    for (const auto& [name, bytes] : rows) {
      stage.print(fmt::format("{:<6} {:<18} {:>9.2f} {:>13.1f} {:>13.1f} {:>13.1f}", model.name, name, bytes / 1e9,
                              bytes / 450e9 * 1e3, bytes / 63e9 * 1e3, bytes / 50e9 * 1e3));
    }
    const double ratio = rows[2].second / rows[3].second;
    least = std::min(least, ratio), most = std::max(most, ratio);
  }
  stage.print(fmt::format("tensor sends {:.0f} to {:.0f} times what a pipeline sends", least, most));
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
  Timeline timeline = Timeline::of_ranks(2);
  stage.on_ranks(2, [&](Rank& rank) {
    const auto other = rank.comm().split(0, rank.number(), "barriers");
    at::Tensor x = at::full({1}, rank.number() + 1.0, rank.floats());
    const std::string title = "all_reduce, async; rank 1 calls it later";
    const auto meet = [&] { other->barrier(); };
    if (rank.number() == 0) {
      Work work;
      timeline.run(0, "call", "t0", [&] { work = rank.comm().all_reduce(x, {.async = true}); });
      const bool before = rank.device().is_cpu() && work.is_done();
      rank.say(title, fmt::format("called; done: {}", before ? "yes" : "no"));
      rank.check(!before, "it is not done before rank 1 has called it");
      timeline.run(0, "barrier", "plain", meet);
      timeline.run(0, "wait", "t0", [&] { work.wait(); });
      rank.say(title, fmt::format("waited; x = {}", tensor_text(x)));
    } else {
      timeline.run(1, "barrier", "plain", meet);
      timeline.run(1, "all_reduce", "t1", [&] { rank.comm().all_reduce(x); });
      rank.say(title, fmt::format("called and waited; x = {}", tensor_text(x)));
    }
    rank.check(x.item<double>() == 3, "after wait() both have the sum");
  });
  stage.show({});
  timeline.show(stage, "c: call, b: barrier, w: wait, a: all_reduce and wait");
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

struct Bandwidths {
  double estimate, algbw, busbw;  // bytes a second
};

/// With the estimate of lectures.
Bandwidths bandwidths(measure::BenchVerb verb, int ranks, double seconds) {
  const bool is_split = verb == measure::BenchVerb::reduce_scatter;
  const double each = kElements * 4.0, array = is_split ? ranks * each : each;
  const double sent = (is_split ? 1 : 2) * (ranks - 1) * each, algbw = array / seconds;
  return {sent / (ranks * seconds), algbw, algbw * measure::bus_factor(verb, ranks)};
}

/// Bytes that this rank sends in an all-reduce as a ring. Half of them are sent by its reduce-scatter.
double sent_by_ring(Rank& rank, std::int64_t elements) {
  const at::Tensor x = at::ones({elements}, rank.floats());
  return 4.0 * static_cast<double>(ring_all_reduce(rank.comm(), x, [](const std::string&) {}));
}

/// The time in us, then GB/s.
std::string figures_of(double seconds, const Bandwidths& found) {
  return fmt::format("{:>8} {:>8} {:>8} {:>8}", measured(seconds * 1e6), measured(found.estimate / 1e9),
                     measured(found.algbw / 1e9), measured(found.busbw / 1e9));
}

}  // namespace

void benchmark(Stage& stage) {
  struct Run {
    std::string label, figures;
    double seconds = 0;
  };
  if (stage.ranks() < 2) return stage.print("(needs two ranks)");
  std::map<std::string, std::vector<Run>> runs;  // by title, then rank
  stage.print("us; GB/s as estimate, algbw, busbw");
  for (const int n : {2, 4}) {
    if (n > stage.ranks()) continue;
    std::vector<Run> of_all_reduce(static_cast<std::size_t>(n)), of_reduce_scatter(static_cast<std::size_t>(n));
    const auto title = [n](measure::BenchVerb verb) { return fmt::format("{}, {} ranks", measure::name_of(verb), n); };
    stage.on_ranks(n, [&](Rank& rank) {
      const auto say = [&](measure::BenchVerb verb, std::vector<Run>& of_ranks, double seconds) {
        const std::string figures = figures_of(seconds, bandwidths(verb, n, seconds));
        rank.say(title(verb), figures);
        of_ranks[static_cast<std::size_t>(rank.number())] = {fmt::format("rank {}", rank.number()), figures, seconds};
      };
      at::Tensor x = at::full({kElements}, 1.0, rank.floats());
      say(measure::BenchVerb::all_reduce, of_all_reduce, time_of(rank, [&] { rank.comm().all_reduce(x); }));
      const at::Tensor parts = at::full({n * kElements}, 1.0, rank.floats()),
                       part = at::zeros({kElements}, rank.floats());
      say(measure::BenchVerb::reduce_scatter, of_reduce_scatter,
          time_of(rank, [&] { rank.comm().reduce_scatter(part, parts); }));
      rank.check(x[0].item<double>() == std::pow(n, 4) && part[0].item<double>() == n, "the results are right");
      const Bandwidths whole = bandwidths(measure::BenchVerb::all_reduce, n, 1.0),
                       half = bandwidths(measure::BenchVerb::reduce_scatter, n, 1.0);
      const double sent = sent_by_ring(rank, kElements), sent_of_parts = sent_by_ring(rank, n * kElements) / 2;
      rank.check(sent == whole.busbw && sent == whole.estimate, "a ring sends what estimate and busbw count");
      rank.check(sent_of_parts == half.busbw && sent_of_parts == n * half.estimate,
                 "its reduce-scatter sends what busbw counts, n times the estimate");
    });
    runs[title(measure::BenchVerb::all_reduce)] = of_all_reduce;
    runs[title(measure::BenchVerb::reduce_scatter)] = of_reduce_scatter;
  }
  double longest = 1e-9;
  for (const auto& [title, of_ranks] : runs) {
    for (const Run& run : of_ranks) longest = std::max(longest, run.seconds);
  }
  std::vector<Picture> pictures;
  for (const auto& [title, of_ranks] : runs) {
    std::vector<Bar> bars;
    for (const Run& run : of_ranks) bars.push_back({run.label, run.seconds / longest, run.figures});
    pictures.push_back(picture_of_bars(title + ": us; GB/s as estimate, algbw, busbw", bars));
  }
  stage.show(std::move(pictures));
}

namespace {

/// The same array, and what an estimate counts of it.
struct BenchedArray {
  measure::BenchVerb verb;
  int ranks;
  std::int64_t bytes() const { return kElements * 4 * (verb == measure::BenchVerb::all_reduce ? 1 : ranks); }
  double estimate(double busbw) const { return verb == measure::BenchVerb::all_reduce ? busbw : busbw / ranks; }
};

measure::CommBenchRow bench_comm(Rank& rank, const BenchedArray& array) {
  const ProcessContext context{.rank = rank.number(),
                               .world_size = rank.ranks(),
                               .local_rank = rank.number(),
                               .local_world_size = rank.ranks(),
                               .device = rank.device(),
                               .store = std::make_shared<HashStore>(),  // of this rank alone: nobody meets there
                               .world = rank.world()};
  const measure::CommBenchOptions options{.verbs = {array.verb},
                                          .sizes = {array.bytes()},
                                          .places = {measure::Place::in},
                                          .iterations = kBenchCalls,
                                          .rounds = 1,
                                          .copy = false,
                                          .device = rank.device().is_cuda() ? "cuda" : "cpu"};
  const measure::CommBenchResult result = measure::run_comm_bench(context, options);
  return result.rows.empty() ? measure::CommBenchRow() : result.rows.front();  // of rank 0
}

}  // namespace

void benchmark_command(Stage& stage) {
  if (stage.ranks() < 2) return stage.print("(needs two ranks)");
  const int threads = at::get_num_threads();  // the benchmark takes one
  stage.print(fmt::format("bench comm, median of {} calls: us; GB/s as estimate, algbw, busbw", kBenchCalls));
  for (const int n : {2, 4}) {
    if (n > stage.ranks()) continue;
    for (const BenchedArray& array :
         {BenchedArray{measure::BenchVerb::all_reduce, n}, BenchedArray{measure::BenchVerb::reduce_scatter, n}}) {
      measure::CommBenchRow row;
      stage.on_ranks(n, [&](Rank& rank) {
        const measure::CommBenchRow mine = bench_comm(rank, array);
        if (rank.number() == 0) row = mine;
      });
      stage.print(fmt::format("{:<16} {} ranks, {:>3} {:>8} {:>8} {:>8} {:>8}", measure::name_of(array.verb), n,
                              measure::size_text(array.bytes()), measured(row.p50 * 1e6),
                              measured(array.estimate(row.busbw())), measured(row.algbw()), measured(row.busbw())));
      stage.check(row.calls == kBenchCalls && row.wrong == 0, "no element is wrong");
    }
  }
  at::set_num_threads(threads);
}

void overlap(Stage& stage) {
  if (stage.ranks() < 2) return stage.print("(needs two ranks)");
  constexpr int kTrials = 7;
  Flow flow(2);
  Timeline timeline({"one after the other", "both at once: matmul", "both at once: all_reduce"});
  stage.on_ranks(2, [&](Rank& rank) {
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
    const auto begin_together = [&] {
      synchronise(rank.device());
      rank.comm().barrier();
      return Clock::now();
    };
    const auto median = [&](const std::function<void()>& what) {
      std::vector<double> trials;
      what();
      for (int i = 0; i < kTrials; ++i) {
        const auto begin = begin_together();
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
    flow.add(rank, "matmul", measured(compute));
    flow.add(rank, "all_reduce", measured(send));
    flow.add(rank, "one after the other", measured(serial));
    flow.add(rank, "both at once", measured(together));
    flow.add(rank, "speed-up", measured(serial / together));
    rank.check(at::equal(product, alone), "the product is the same");
    // Each once more, for the picture; that of both as if it had begun when the other ended.
    const auto serial_begin = begin_together();
    multiply();
    synchronise(rank.device());
    const auto multiplied = Clock::now();
    transfer();
    synchronise(rank.device());
    const auto serial_end = Clock::now(), begin = begin_together();
    const Work work = rank.comm().all_reduce(message, {.async = true});
    multiply();
    synchronise(rank.device());
    const auto computed = Clock::now();
    work.wait();
    synchronise(rank.device());
    if (rank.number() != 0) return;
    const auto moved = [&](Clock::time_point time) { return time - (begin - serial_begin); };
    timeline.add(0, "matmul", "t0", serial_begin, multiplied);
    timeline.add(0, "all_reduce", "t1", multiplied, serial_end);
    timeline.add(1, "matmul", "t0", serial_begin, moved(computed));
    timeline.add(2, "all_reduce", "t1", serial_begin, moved(Clock::now()));
  });
  stage.print(fmt::format("medians of {} sorted trials, in ms", kTrials));
  flow.print(stage);
  stage.show({});
  timeline.show(stage, "a trial of rank 0");
}

namespace {

struct CopyTimes {
  double copying = 0, sending = 0;  // seconds
};

/// Copies 4 MiB within the rank's memory, and sends them to the next rank.
CopyTimes copy_and_send(Rank& rank) {
  const int n = rank.ranks();
  const int next = (rank.number() + 1) % n;
  const int previous = (rank.number() + n - 1) % n;
  const at::Tensor mine = at::full({kElements}, rank.number(), rank.floats());
  const at::Tensor copy = at::zeros_like(mine);
  const at::Tensor arrived = at::full_like(mine, -1);
  const auto text = [&] { return fmt::format("{} {}", copy[0].item<float>(), arrived[0].item<float>()); };
  rank.say("before: copied, arrived", text());
  CopyTimes times;
  times.copying = time_of(rank, [&] { copy.copy_(mine); });
  times.sending = time_of(rank, [&] {
    if (n == 1) return void(arrived.copy_(mine));
    rank.comm().batch_isend_irecv(
        {{.is_send = true, .tensor = mine, .peer = next}, {.is_send = false, .tensor = arrived, .peer = previous}});
  });
  const auto rate = [](double seconds) { return measured(kElements * 4 / seconds / 1e9); };
  rank.say("after; GB/s of both", fmt::format("{}; {} {}", text(), rate(times.copying), rate(times.sending)));
  rank.check(at::equal(arrived, at::full_like(mine, previous)), "each has what the one before sent");
  return times;
}

}  // namespace

void local_or_sent(Stage& stage) {
  std::vector<std::vector<Bar>> bars(static_cast<std::size_t>(stage.ranks()));
  stage.on_ranks(stage.ranks(), [&](Rank& rank) {
    const CopyTimes times = copy_and_send(rank);
    const auto bar = [&](const char* what, double seconds, const char* style) {
      const double rate = kElements * 4 / seconds;
      return Bar{fmt::format("rank {} {}", rank.number(), what), logarithmic(rate),
                 fmt::format("{:.3g} GB/s", rate / 1e9), style};
    };
    bars[static_cast<std::size_t>(rank.number())] = {bar("copied", times.copying, "t0"),
                                                     bar("sent", times.sending, "t1")};
  });
  std::vector<Bar> all;
  for (const auto& of_rank : bars) all.insert(all.end(), of_rank.begin(), of_rank.end());
  stage.show({picture_of_bars("within a rank's memory, and to the next rank, by logarithms", all)});
}

}  // namespace phalanx::lecture
