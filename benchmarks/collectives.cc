// Latency and bandwidth of the collectives, ours and c10d's gloo in one run.
//
//   collectives --ranks 2 --sizes 4K,64K,1M,64M --ops all_reduce
//   collectives --ranks 8 --backends shm,c10d --sizes 16K --json out.json
//   collectives --ranks 2 --backends shm,mpi,c10d,openmpi
//
// Forks the ranks on this machine, or has mpirun start them where `mpi` (our backend) or `openmpi` (Open MPI's own
// blocking calls, the peer) is asked for; without `mpi`, openmpi runs for one thread, as it is fastest. Sizes and
// bus-bandwidth factors are nccl-tests': `bytes` is the larger buffer a rank holds, algbw = bytes / time, busbw = algbw
// * factor. Every call is timed alone on every rank; a row's figures are the slowest rank's. The backends take turns
// within a row, --rounds times, and the round with the smallest median stands for the row: the one that other programs
// disturbed least. `ok` says that one call on known values gave what it must.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "benchmarks/open_mpi_peer.h"
#include "phalanx/comm/gloo.h"
#include "phalanx/comm/gloo_group.h"
#include "phalanx/comm/mpi.h"
#include "phalanx/comm/shm.h"
#include "phalanx/comm/tcp_store.h"
#include "phalanx/comm/wait.h"

namespace {

using phalanx::Communicator;
using Clock = std::chrono::steady_clock;

struct Options {
  int ranks = 2;
  int rounds = 3;
  double budget_seconds = 0.2;  // per row, backend and round
  std::vector<std::string> backends{"shm", "c10d"};
  std::vector<std::string> verbs{"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "pingpong"};
  std::vector<std::int64_t> sizes{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
  bool pin = false;  // rank r to core r: for tuning on a busy machine; unfair to backends with helper threads
  std::string json;
};

double bus_factor(const std::string& verb, int ranks) {
  const double n = ranks;
  if (verb == "all_reduce") return 2 * (n - 1) / n;
  if (verb == "broadcast" || verb == "pingpong") return 1;
  return (n - 1) / n;
}

// One verb on buffers of its own. run() does it once.
struct Bench {
  at::Tensor whole;
  at::Tensor part;
  at::Tensor received;
  std::function<void()> run;
};

Bench make_buffers(std::int64_t bytes, int ranks) {
  Bench bench;
  bench.whole = at::full({bytes / 4}, 0.0F);
  bench.part = at::full({bytes / 4 / ranks}, 0.0F);
  bench.received = at::full({bytes / 4}, 0.0F);
  return bench;
}

Bench bench_of(Communicator& comm, const std::string& verb, std::int64_t bytes, bool is_symmetric) {
  Bench b = make_buffers(bytes, comm.size());
  if (is_symmetric)
    for (at::Tensor* tensor : {&b.whole, &b.part, &b.received})
      *tensor = comm.symmetric_empty(tensor->sizes(), tensor->options()).zero_();
  at::Tensor whole = b.whole;
  at::Tensor part = b.part;
  at::Tensor received = b.received;
  if (verb == "all_reduce") b.run = [=, &comm] { comm.all_reduce(whole); };
  if (verb == "all_gather") b.run = [=, &comm] { comm.all_gather(whole, part); };
  if (verb == "reduce_scatter") b.run = [=, &comm] { comm.reduce_scatter(part, whole); };
  if (verb == "broadcast") b.run = [=, &comm] { comm.broadcast(whole); };
  if (verb == "all_to_all") b.run = [=, &comm] { comm.all_to_all(received, whole); };
  if (verb == "pingpong") {
    b.run = [=, &comm] {
      if (comm.rank() == 0) {
        comm.send(whole, 1);
        comm.recv(whole, 1);
      } else if (comm.rank() == 1) {
        comm.recv(whole, 0);
        comm.send(whole, 0);
      }
    };
  }
  return b;
}

Bench bench_of(c10d::Backend& group, const std::string& verb, std::int64_t bytes) {
  Bench b = make_buffers(bytes, group.getSize());
  at::Tensor whole = b.whole;
  at::Tensor part = b.part;
  at::Tensor received = b.received;
  std::vector<at::Tensor> list{whole};
  if (verb == "all_reduce") b.run = [=, &group]() mutable { group.allreduce(list)->wait(); };
  if (verb == "all_gather") b.run = [=, &group]() mutable { group._allgather_base(whole, part)->wait(); };
  if (verb == "reduce_scatter") b.run = [=, &group]() mutable { group._reduce_scatter_base(part, whole)->wait(); };
  if (verb == "broadcast") b.run = [=, &group]() mutable { group.broadcast(list)->wait(); };
  if (verb == "all_to_all") {
    b.run = [=, &group]() mutable {
      std::vector<std::int64_t> even;
      group.alltoall_base(received, whole, even, even)->wait();
    };
  }
  if (verb == "pingpong") {
    b.run = [=, &group]() mutable {
      if (group.getRank() == 0) {
        group.send(list, 1, 0)->wait();
        group.recv(list, 1, 0)->wait();
      } else if (group.getRank() == 1) {
        group.recv(list, 0, 0)->wait();
        group.send(list, 0, 0)->wait();
      }
    };
  }
  return b;
}

Bench bench_of_open_mpi(const std::string& verb, std::int64_t bytes, int ranks) {
  Bench b = make_buffers(bytes, ranks);
  b.run = phalanx::benchmarks::open_mpi_call(verb, {b.whole.mutable_data_ptr<float>(), b.part.mutable_data_ptr<float>(),
                                                    b.received.mutable_data_ptr<float>(), b.whole.numel()});
  return b;
}

// One call on known values: rank r brings r + 1 everywhere.
bool is_right(Bench& bench, const std::string& verb, int rank, int ranks) {
  const float mine = static_cast<float>(rank + 1);
  bench.whole.fill_(verb == "broadcast" ? (rank == 0 ? 7.0F : 0.0F) : mine);
  bench.part.fill_(mine);
  bench.run();
  const auto all = [](const at::Tensor& t, float value) {
    const auto* data = t.const_data_ptr<float>();
    return std::all_of(data, data + t.numel(), [value](float x) { return x == value; });
  };
  const float sum = static_cast<float>(ranks * (ranks + 1)) / 2;
  bool right = true;
  if (verb == "all_reduce") right = all(bench.whole, sum);
  if (verb == "reduce_scatter") right = all(bench.part, sum);
  if (verb == "broadcast") right = all(bench.whole, 7.0F);
  if (verb == "pingpong") right = rank > 1 || all(bench.whole, 1.0F);
  if (verb == "all_gather" || verb == "all_to_all") {
    const at::Tensor& out = verb == "all_gather" ? bench.whole : bench.received;
    const std::int64_t count = out.numel() / ranks;
    for (int r = 0; r < ranks; ++r) right = right && all(out.narrow(0, r * count, count), static_cast<float>(r + 1));
  }
  for (at::Tensor* t : {&bench.whole, &bench.part, &bench.received}) t->zero_();
  return right;
}

struct Figures {
  double p50 = 0, p99 = 0, least = 0;
  double cpu = 0;  // processor time of the whole process for one call: steadier than wall time on a busy machine
  std::int64_t calls = 0;
  bool ok = true;
};

std::vector<double> time_calls(const std::function<void()>& run, std::int64_t calls) {
  std::vector<double> times;
  times.reserve(static_cast<std::size_t>(calls));
  for (std::int64_t k = 0; k < calls; ++k) {
    const auto begin = Clock::now();
    run();
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::ranges::sort(times);
  return times;
}

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// `control` agrees on counts and gathers figures; it is not what is measured.
Figures measure(Communicator& control, Bench& bench, const std::string& verb, double budget) {
  Figures figures;
  figures.ok = is_right(bench, verb, control.rank(), control.size());
  control.barrier();
  const double once = time_calls(bench.run, 3).at(1);
  std::int64_t calls = std::clamp<std::int64_t>(static_cast<std::int64_t>(budget / std::max(once, 1e-7)), 7, 5000);
  const std::string agreed = control.broadcast_bytes(std::to_string(calls));
  calls = std::stoll(agreed);
  control.barrier();
  const double cpu_begin = processor_seconds();
  std::vector<double> times = time_calls(bench.run, calls);
  const double cpu = (processor_seconds() - cpu_begin) / static_cast<double>(calls);
  if (verb == "pingpong")
    for (double& time : times) time = control.rank() < 2 ? time / 2 : 0;
  const auto at = [&](double share) { return times[static_cast<std::size_t>(share * static_cast<double>(calls - 1))]; };
  at::Tensor mine = at::empty({5});
  auto* data = mine.mutable_data_ptr<float>();
  data[0] = static_cast<float>(at(0.5));
  data[1] = static_cast<float>(at(0.99));
  data[2] = static_cast<float>(times.front());
  data[3] = figures.ok ? 0.0F : 1.0F;
  data[4] = static_cast<float>(cpu);
  control.all_reduce(mine, {.op = phalanx::ReduceOp::max});
  figures.p50 = data[0];
  figures.p99 = data[1];
  figures.least = data[2];
  figures.ok = data[3] == 0;
  figures.cpu = data[4];
  figures.calls = calls;
  return figures;
}

std::string size_text(std::int64_t bytes) {
  if (bytes % (1 << 20) == 0) return fmt::format("{}M", bytes >> 20);
  if (bytes % (1 << 10) == 0) return fmt::format("{}K", bytes >> 10);
  return fmt::format("{}", bytes);
}

void run_rank(const Options& options, int rank, const phalanx::HostPort& server) {
  at::set_num_threads(1);
  if (options.pin) {
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(rank % phalanx::available_cores(), &core);
    sched_setaffinity(0, sizeof(core), &core);
  }
  auto store = std::make_shared<phalanx::TcpStore>(server);
  auto control = phalanx::make_shm_communicator(*store, rank, options.ranks, {.name = "control"});
  std::shared_ptr<Communicator> shm;
  std::shared_ptr<Communicator> gloo;
  std::shared_ptr<Communicator> mpi;
  c10::intrusive_ptr<c10d::Backend> c10d_group;
  for (const std::string& name : options.backends) {
    if (name == "shm" || name == "symmetric") {
      if (!shm) shm = phalanx::make_shm_communicator(*store, rank, options.ranks, {.name = "shm"});
    } else if (name == "gloo") {
      gloo =
          phalanx::make_gloo_communicator(std::make_shared<phalanx::PrefixStore>(store, "gloo"), rank, options.ranks);
    } else if (name == "mpi") {
      mpi = phalanx::make_mpi_communicator(std::make_shared<phalanx::PrefixStore>(store, "mpi"), rank, options.ranks);
    } else if (name == "openmpi") {
      continue;
    } else if (name == "c10d") {
      c10d_group = phalanx::make_gloo_group(std::make_shared<phalanx::PrefixStore>(store, "c10d"), rank, options.ranks,
                                            "127.0.0.1", std::chrono::seconds(300));
    } else {
      throw std::runtime_error(fmt::format(
          "no backend '{}': shm, symmetric (shm, symmetric memory), gloo, mpi (ours), c10d (torch's gloo) or openmpi",
          name));
    }
  }
  const auto bench_for = [&](const std::string& name, const std::string& verb, std::int64_t bytes) {
    if (name == "c10d") return bench_of(*c10d_group, verb, bytes);
    if (name == "openmpi") return bench_of_open_mpi(verb, bytes, options.ranks);
    const bool is_symmetric = name == "symmetric";
    return bench_of(name == "shm" || is_symmetric ? *shm : name == "mpi" ? *mpi : *gloo, verb, bytes, is_symmetric);
  };
  std::vector<std::string> peers;
  for (const std::string& name : options.backends)
    if (name == "c10d" || name == "openmpi") peers.push_back(name);
  std::string json;
  if (rank == 0) {
    fmt::print("{:<15}{:>6} {:<8}{:>12}{:>12}{:>12}{:>12}{:>10}{:>10}  ok", "verb", "bytes", "", "p50 us", "p99 us",
               "min us", "cpu us", "algbw", "busbw");
    for (const std::string& peer : peers) fmt::print("{:>12}", "vs " + peer);
    fmt::print("\n");
  }
  for (const std::string& verb : options.verbs) {
    for (std::int64_t bytes : options.sizes) {
      std::map<std::string, Figures> best;
      std::map<std::string, Bench> benches;
      for (const std::string& name : options.backends) benches[name] = bench_for(name, verb, bytes);
      for (int round = 0; round < options.rounds; ++round) {
        for (const std::string& name : options.backends) {
          const Figures now = measure(*control, benches[name], verb, options.budget_seconds);
          Figures& known = best[name];
          const bool ok = now.ok && (round == 0 || known.ok);
          if (round == 0 || now.p50 < known.p50) known = now;
          known.ok = ok;
        }
      }
      if (rank != 0) continue;
      for (const std::string& name : options.backends) {
        const Figures& f = best[name];
        const double algbw = static_cast<double>(bytes) / f.p50 / 1e9;
        const double busbw = algbw * bus_factor(verb, options.ranks);
        fmt::print("{:<15}{:>6} {:<8}{:>12.2f}{:>12.2f}{:>12.2f}{:>12.2f}{:>10.3f}{:>10.3f}  {:<2}", verb,
                   size_text(bytes), name, f.p50 * 1e6, f.p99 * 1e6, f.least * 1e6, f.cpu * 1e6, algbw, busbw,
                   f.ok ? "ok" : "NO");
        for (const std::string& peer : peers)
          fmt::print("{:>12}", name == peer ? "" : fmt::format("{:.1f}x", best[peer].p50 / f.p50));
        fmt::print("\n");
        std::fflush(stdout);
        json += fmt::format(
            "{}{{\"op\": \"{}\", \"bytes\": {}, \"ranks\": {}, \"backend\": \"{}\", \"p50_us\": {:.3f}, "
            "\"p99_us\": {:.3f}, \"min_us\": {:.3f}, \"cpu_us\": {:.3f}, "
            "\"algbw_gbs\": {:.4f}, \"busbw_gbs\": {:.4f}, \"calls\": {}, "
            "\"ok\": {}}}",
            json.empty() ? "" : ",\n ", verb, bytes, options.ranks, name, f.p50 * 1e6, f.p99 * 1e6, f.least * 1e6,
            f.cpu * 1e6, algbw, busbw, f.calls, f.ok);
      }
    }
  }
  if (rank == 0 && !options.json.empty()) std::ofstream(options.json) << "[" << json << "]\n";
  control->barrier();
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> items;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    items.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return items;
}

std::int64_t parse_size(const std::string& text) {
  std::size_t digits = 0;
  const std::int64_t value = std::stoll(text, &digits);
  const std::string unit = text.substr(digits);
  if (unit.empty()) return value;
  if (unit == "K") return value << 10;
  if (unit == "M") return value << 20;
  throw std::runtime_error(fmt::format("size '{}': a number of bytes, or with K or M", text));
}

constexpr const char* kUsage =
    "usage: collectives [--ranks N] [--rounds N] [--budget-s SECONDS] [--backends shm,gloo,mpi,c10d,openmpi]\n"
    "                   [--ops VERB,...] [--sizes 4K,1M,...] [--pin 1] [--json FILE]";

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") {
      fmt::print("{}\n", kUsage);
      std::exit(0);
    }
    if (i + 1 == argc) throw std::runtime_error(fmt::format("{} needs a value", flag));
    const std::string value = argv[i + 1];
    if (flag == "--ranks") {
      options.ranks = std::stoi(value);
    } else if (flag == "--rounds") {
      options.rounds = std::stoi(value);
    } else if (flag == "--budget-s") {
      options.budget_seconds = std::stod(value);
    } else if (flag == "--backends") {
      options.backends = split_list(value);
    } else if (flag == "--ops") {
      options.verbs = split_list(value);
    } else if (flag == "--sizes") {
      options.sizes.clear();
      for (const std::string& size : split_list(value)) options.sizes.push_back(parse_size(size));
    } else if (flag == "--pin") {
      options.pin = value == "1";
    } else if (flag == "--json") {
      options.json = value;
    } else {
      throw std::runtime_error(fmt::format("unknown flag {}\n{}", flag, kUsage));
    }
  }
  return options;
}

// What forks nothing: the ranks, each for itself, when mpirun has started them.
constexpr const char* kStoreVariable = "PHALANX_BENCHMARK_STORE";

bool needs_mpirun(const Options& options) {
  return std::ranges::any_of(options.backends,
                             [](const std::string& name) { return name == "mpi" || name == "openmpi"; });
}

int run_mpirun(const Options& options, char** argv) {
  phalanx::TcpStoreServer server;
  const std::string count = std::to_string(options.ranks);
  std::vector<std::string> words{"mpirun", "-np", count, "--oversubscribe", "--bind-to", "none"};
  words.push_back(std::filesystem::read_symlink("/proc/self/exe"));
  for (char** word = argv + 1; *word != nullptr; ++word) words.emplace_back(*word);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    setenv(kStoreVariable, server.address().text().c_str(), 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    execvp("mpirun", pointers.data());
    fmt::print(stderr, "collectives: mpirun cannot be started: {}\n", std::strerror(errno));
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse(argc, argv);
    if (const char* rank = std::getenv("OMPI_COMM_WORLD_RANK"); rank != nullptr && std::getenv(kStoreVariable)) {
      run_rank(options, std::atoi(rank), phalanx::parse_host_port(std::getenv(kStoreVariable), kStoreVariable));
      return 0;
    }
    if (needs_mpirun(options)) return run_mpirun(options, argv);
    phalanx::TcpStoreServer server;
    std::vector<pid_t> children;
    for (int rank = 0; rank < options.ranks; ++rank) {
      const pid_t child = fork();
      if (child != 0) {
        children.push_back(child);
        continue;
      }
      int status = 0;
      try {
        run_rank(options, rank, server.address());
      } catch (const std::exception& e) {
        fmt::print(stderr, "rank {}: {}\n", rank, e.what());
        status = 1;
      }
      std::fflush(stdout);
      _exit(status);
    }
    bool failed = false;
    for (const pid_t child : children) {
      int status = 0;
      waitpid(child, &status, 0);
      failed |= status != 0;
    }
    return failed ? 1 : 0;
  } catch (const std::exception& e) {
    fmt::print(stderr, "collectives: {}\n", e.what());
    return 2;
  }
}
