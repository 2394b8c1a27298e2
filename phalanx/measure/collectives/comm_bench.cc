#include "phalanx/measure/collectives/comm_bench.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "phalanx/base/cpu.h"
#include "phalanx/base/error.h"
#include "phalanx/base/process_stats.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/backends/local_shm/shared_tensors.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/measure/collectives/c10d_gloo_group.h"
#include "phalanx/measure/collectives/comm_bench_call.h"
#include "phalanx/measure/topology.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx::measure {
namespace {

using Clock = std::chrono::steady_clock;

// An arm of the benchmark: it can run a case. Exactly one of these is set. `copy` is the roofline.
struct Arm {
  std::string name;
  std::shared_ptr<Communicator> comm;
  std::optional<BenchBaseline> baseline;
  bool threads = false;
  bool copy = false;
  bool symmetric = false;  // with buffers in symmetric memory
  bool heap = false;       // with buffers in the shared heap
};

struct Figures {
  double p50 = 0, p99 = 0, least = 0, cpu = 0;
  int slowest_rank = 0;
  std::int64_t calls = 0;  // 0: stopped before the first call
  bool stopped = false;    // stopped before all calls were done
};

/// True on all ranks if it is true on any rank.
bool any_rank(Communicator& control, bool wish) {
  at::Tensor flag = at::zeros({1}, at::TensorOptions(c10::ScalarType::Int));
  *flag.mutable_data_ptr<std::int32_t>() = wish ? 1 : 0;
  if (control.size() > 1) control.all_reduce(flag, {.op = ReduceOp::max});
  return *flag.const_data_ptr<std::int32_t>() != 0;
}

std::int64_t sum_over_ranks(Communicator& control, std::int64_t value) {
  at::Tensor sum = at::zeros({1}, at::TensorOptions(c10::ScalarType::Long));
  *sum.mutable_data_ptr<std::int64_t>() = value;
  control.all_reduce(sum);
  return *sum.const_data_ptr<std::int64_t>();
}

/// Makes the calls in portions of a quarter of a second. After each portion the ranks agree on whether to continue. So
/// all ranks make the same number of calls; a rank that stopped alone would leave the others waiting in the next call.
class AgreedCalls {
 public:
  AgreedCalls(Communicator& control, const BenchCall& call, const std::function<bool()>& stop)
      : control_(control), call_(call), stop_(stop) {}

  /// The sorted times of `calls` calls; fewer, or none, after a stop.
  std::vector<double> run(std::int64_t calls) {
    std::vector<double> times;
    times.reserve(static_cast<std::size_t>(std::min<std::int64_t>(calls, 1 << 20)));
    while (std::ssize(times) < calls && !stopped_) {
      const auto portion = std::clamp<std::int64_t>(fitting_, 1, calls - std::ssize(times));
      const double cpu_begin = process_cpu_seconds();
      const auto portion_begin = Clock::now();
      for (std::int64_t k = 0; k < portion; ++k) {
        const auto begin = Clock::now();
        call_.run();
        times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
      }
      const std::chrono::duration<double> took = Clock::now() - portion_begin;
      cpu_seconds_ += process_cpu_seconds() - cpu_begin;
      agree(took.count() / static_cast<double>(portion));
    }
    std::ranges::sort(times);
    return times;
  }

  bool stopped() const { return stopped_; }
  /// The processor time of all calls since the last take_cpu_seconds().
  double take_cpu_seconds() { return std::exchange(cpu_seconds_, 0.0); }

 private:
  static constexpr double kPortionSeconds = 0.25;

  void agree(double once) {
    at::Tensor both = at::zeros({2}, at::TensorOptions(c10::ScalarType::Double));
    auto* data = both.mutable_data_ptr<double>();
    data[0] = stop_ && stop_() ? 1 : 0;
    data[1] = once;
    if (control_.size() > 1) control_.all_reduce(both, {.op = ReduceOp::max});
    stopped_ = data[0] > 0;
    fitting_ = static_cast<std::int64_t>(kPortionSeconds / std::max(data[1], 1e-8));
  }

  Communicator& control_;
  const BenchCall& call_;
  const std::function<bool()>& stop_;
  std::int64_t fitting_ = 1;  // calls in a portion; the time of a call is not known at first
  double cpu_seconds_ = 0;
  bool stopped_ = false;
};

/// `control` is used to agree on the number of calls and to gather the results. It is not what is measured.
Figures measure(Communicator& control, const BenchCall& call, const CommBenchCase& what,
                const CommBenchOptions& options, double budget, const std::function<bool()>& stop) {
  AgreedCalls agreed(control, call, stop);
  agreed.run(options.warmup);
  std::int64_t calls = options.iterations;
  if (calls == 0 && !agreed.stopped()) {
    const double once = percentile(agreed.run(3), 50);
    calls = std::clamp<std::int64_t>(static_cast<std::int64_t>(budget / std::max(once, 1e-7)), 7, 5000);
    calls = std::stoll(control.broadcast_bytes(std::to_string(calls)));
  }
  control.barrier();
  agreed.take_cpu_seconds();
  std::vector<double> times = agreed.run(calls);
  if (times.empty()) return {.stopped = true};
  const bool stopped = std::ssize(times) < calls;
  calls = std::ssize(times);
  const double cpu = agreed.take_cpu_seconds() / static_cast<double>(calls);
  if (what.verb == BenchVerb::pingpong) {
    for (double& time : times) time = control.rank() < 2 ? time / 2 : 0;  // the other ranks are not involved
  }
  at::Tensor mine = at::zeros({4}, at::TensorOptions(c10::ScalarType::Double));
  auto* data = mine.mutable_data_ptr<double>();
  data[0] = percentile(times, 50);
  data[1] = percentile(times, 99);
  data[2] = times.front();
  data[3] = cpu;
  at::Tensor all = at::zeros({4 * control.size()}, mine.options());
  control.all_gather(all, mine);
  Figures figures{.calls = calls, .stopped = stopped};
  for (int rank = 0; rank < control.size(); ++rank) {
    const double* of_rank = all.const_data_ptr<double>() + 4 * rank;
    if (of_rank[0] > figures.p50) figures.slowest_rank = rank;
    figures.p50 = std::max(figures.p50, of_rank[0]);
    figures.p99 = std::max(figures.p99, of_rank[1]);
    figures.least = std::max(figures.least, of_rank[2]);
    figures.cpu = std::max(figures.cpu, of_rank[3]);
  }
  return figures;
}

/// Binds this process to the rank-th core of those that it may use.
void pin_to_core(int rank) {
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) == 0) return;
  int skip = rank % CPU_COUNT(&usable);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &usable) || skip-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
    return;
  }
}

std::string reachable_host(Store& store) {
  const auto* tcp = dynamic_cast<const TcpStore*>(&store);
  if (tcp == nullptr || is_loopback(tcp->server().host)) return "127.0.0.1";
  return address_towards(tcp->server());
}

std::vector<Arm> make_arms(const ProcessContext& context, const CommBenchOptions& options,
                           const std::vector<BenchBaseline>& baselines) {
  std::vector<Arm> arms;
  for (const std::string& name : options.backends) {
    Arm arm{.name = name};
    auto store = std::make_shared<PrefixStore>(context.store, "bench/" + name);
    if (name == "local") {
      if (context.world_size != context.local_world_size)
        throw UsageError("backend local joins threads of one process: it cannot stand beside ranks of other nodes");
      arm.threads = true;
    } else if (name == "c10d") {
      arm.baseline = c10d_baseline(make_gloo_group(store, context.rank, context.world_size,
                                                   reachable_host(*context.store), std::chrono::seconds(300)));
    } else if (const auto baseline = std::ranges::find(baselines, name, &BenchBaseline::name);
               baseline != baselines.end()) {
      arm.baseline = *baseline;
    } else if (name == "auto" || name == context.world->backend_name()) {
      arm.comm = context.world->split(0, context.rank, "bench");
      arm.name = arm.comm->backend_name();
    } else if (name == "shm" || name == "symmetric" || name == "heap") {
      arm.symmetric = name == "symmetric";
      arm.heap = name == "heap";
      if (arm.heap) share_large_tensors();
      arm.comm = make_shm_communicator(*store, context.rank, context.world_size, {.name = "bench"});
    } else if (name == "gloo") {
      arm.comm = make_gloo_communicator(store, context.rank, context.world_size,
                                        {.host = reachable_host(*context.store), .communicator = {.name = "bench"}});
    } else {
      throw UsageError(
          fmt::format("--backends: '{}' cannot be measured beside '{}'; expected auto, shm, symmetric (shm with "
                      "symmetric memory), heap (shm with tensors in the shared heap), gloo, local (threads), c10d "
                      "(torch's gloo), and at most one other",
                      name, context.world->backend_name()));
    }
    arms.push_back(std::move(arm));
  }
  if (options.copy) arms.push_back({.name = "memcpy", .copy = true});
  return arms;
}

class CommBench {
 public:
  CommBench(const ProcessContext& context, const CommBenchOptions& options, const CommBenchHooks& hooks)
      : context_(context), options_(options), hooks_(hooks), control_(*context.world) {}

  CommBenchResult run() {
    result_.ranks = context_.world_size;
    char host[256] = "";
    ::gethostname(host, sizeof host - 1);
    result_.host = host;
    result_.cpu = cpu_model();
    result_.cores = usable_cores();
    result_.device = options_.device;
    check_options(options_, context_.world_size);
    at::set_num_threads(1);
    if (options_.pin) pin_to_core(context_.local_rank);
    arms_ = make_arms(context_, options_, hooks_.baselines);
    for (const Arm& arm : arms_) {
      if (arm.baseline) result_.baselines.push_back(arm.name);
    }
    if (context_.rank == 0 && hooks_.on_start) hooks_.on_start(result_);
    for (const CommBenchCase& what : bench_cases(options_, context_.world_size)) {
      measure_case(what);
      if (result_.stopped) break;
    }
    control_.barrier();
    return result_;
  }

 private:
  struct Running {
    const Arm* arm;
    std::unique_ptr<BenchCall> call;  // null for threads: they create their calls themselves
    std::optional<Figures> best;
    std::optional<std::int64_t> wrong;
    int rounds = 0;
  };

  c10::Device device() const { return options_.device == "cuda" ? context_.device : c10::Device(c10::kCPU); }

  void measure_case(const CommBenchCase& what) {
    std::vector<Running> all;
    for (const Arm& arm : arms_) {
      if (arm.copy && what.bytes() == 0) continue;
      Running running{.arm = &arm};
      std::optional<SharedHeap::Pause> elsewhere;
      if (!arm.heap) elsewhere.emplace();
      if (!arm.threads) {
        running.call = std::make_unique<BenchCall>(what, context_.rank, context_.world_size, device(),
                                                   arm.symmetric ? arm.comm.get() : nullptr);
        if (!prepare(running, what)) continue;
      }
      all.push_back(std::move(running));
    }
    for (int round = 0; round < options_.rounds && !result_.stopped; ++round) {
      for (Running& running : all) {
        result_.stopped = any_rank(control_, hooks_.stop_requested && hooks_.stop_requested());
        if (result_.stopped) break;
        const Figures now = running.arm->threads ? measure_threads(running, what) : measure_here(running, what);
        result_.stopped = now.stopped;
        // A measurement that was cut short counts only if there is no other.
        if (now.calls > 0 && (!running.best || (!now.stopped && now.p50 < running.best->p50))) running.best = now;
        if (now.stopped) break;
        ++running.rounds;
      }
    }
    if (context_.rank == 0) tell(what, all);
  }

  /// Prepares the call for the arm and checks it. Returns false if a baseline library refused it on some rank.
  bool prepare(Running& running, const CommBenchCase& what) {
    const Arm& arm = *running.arm;
    std::string refusal;
    try {
      if (arm.copy) {
        running.call->use_copy();
        return true;
      }
      if (arm.comm) {
        running.call->use(*arm.comm);
      } else {
        running.call->use(*arm.baseline);
      }
      if (options_.check) running.wrong = running.call->check();
    } catch (const std::exception& error) {
      if (!arm.baseline) throw;
      refusal = std::string(error.what()).substr(0, std::string(error.what()).find('\n'));
    }
    if (arm.baseline && any_rank(control_, !refusal.empty())) {
      const std::string note =
          fmt::format("{} left out for {} of {}{}: {}", arm.name, name_of(what.verb), name_of(what.type),
                      reduces(what.verb) ? fmt::format(", {}", name_of(what.op)) : "",
                      refusal.empty() ? "another rank refused it" : refusal);
      if (std::ranges::find(result_.notes, note) == result_.notes.end()) result_.notes.push_back(note);
      return false;
    }
    if (running.wrong) running.wrong = sum_over_ranks(control_, *running.wrong);
    return true;
  }

  double budget_of(const Arm& arm) const { return arm.copy ? options_.budget_seconds / 4 : options_.budget_seconds; }

  Figures measure_here(const Running& running, const CommBenchCase& what) {
    control_.barrier();
    const CommBenchCase timed = running.arm->copy ? CommBenchCase{.verb = BenchVerb::broadcast} : what;
    return measure(control_, *running.call, timed, options_, budget_of(*running.arm), hooks_.stop_requested);
  }

  /// Measures with threads of rank 0 as ranks, while the other processes sleep.
  Figures measure_threads(Running& running, const CommBenchCase& what) {
    Figures figures;
    if (context_.rank == 0) {
      std::int64_t wrong = 0;
      run_local_ranks(context_.world_size, [&](const std::shared_ptr<Communicator>& comm) {
        if (options_.pin) pin_to_core(comm->rank());
        BenchCall call(what, comm->rank(), comm->size(), device());
        call.use(*comm);
        if (options_.check) {
          const std::int64_t all_wrong = sum_over_ranks(*comm, call.check());
          if (comm->rank() == 0) wrong = all_wrong;
        }
        const Figures now = measure(*comm, call, what, options_, budget_of(*running.arm), hooks_.stop_requested);
        if (comm->rank() == 0) figures = now;
      });
      if (options_.check) running.wrong = running.wrong.value_or(0) + wrong;
    }
    figures.stopped = any_rank(control_, figures.stopped);
    return figures;
  }

  void tell(const CommBenchCase& what, const std::vector<Running>& all) {
    std::optional<double> copy;
    std::map<std::string, double> baselines;
    for (const Running& running : all) {
      if (!running.best) continue;
      if (running.arm->copy) copy = running.best->p50;
      if (running.arm->baseline) baselines[running.arm->name] = running.best->p50;
    }
    for (const Running& running : all) {
      if (running.arm->copy || !running.best) continue;
      const Figures& best = *running.best;
      result_.rows.push_back({.what = what,
                              .backend = running.arm->name,
                              .ranks = context_.world_size,
                              .p50 = best.p50,
                              .p99 = best.p99,
                              .least = best.least,
                              .cpu = best.cpu,
                              .slowest_rank = best.slowest_rank,
                              .calls = best.calls,
                              .rounds = running.rounds,
                              .wrong = running.wrong,
                              .copy_seconds = copy,
                              .baselines = baselines});
      if (hooks_.on_row) hooks_.on_row(result_.rows.back(), result_.baselines);
    }
  }

  const ProcessContext& context_;
  const CommBenchOptions& options_;
  const CommBenchHooks& hooks_;
  Communicator& control_;
  std::vector<Arm> arms_;
  CommBenchResult result_;
};

}  // namespace

CommBenchResult run_comm_bench(const ProcessContext& context, const CommBenchOptions& options,
                               const CommBenchHooks& hooks) {
  return CommBench(context, options, hooks).run();
}

std::string world_backend(const CommBenchOptions& options, const std::vector<BenchBaseline>& baselines) {
  // A backend that this file does not create is the world's. init_from_environment() checks its name.
  std::vector<std::string> own{"auto", "shm", "symmetric", "heap", "gloo", "local", "c10d"};
  for (const BenchBaseline& baseline : baselines) own.push_back(baseline.name);
  for (const std::string& name : options.backends) {
    if (std::ranges::find(own, name) == own.end()) return name;
  }
  return "auto";
}

}  // namespace phalanx::measure
