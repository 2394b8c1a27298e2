#include "phalanx/measure/bandwidth.h"

#include <fmt/format.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <climits>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"

namespace phalanx::measure {
namespace {

using Clock = std::chrono::steady_clock;

/// Binds the pages of these addresses to that NUMA node. It uses the system call, since nothing else of libnuma is
/// needed.
void keep_on_node(void* memory, std::uint64_t bytes, int node) {
  constexpr std::size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  const auto at = static_cast<std::size_t>(node);
  std::vector<unsigned long> mask(at / kBits + 1, 0);
  mask[at / kBits] |= 1UL << (at % kBits);
  // The kernel reads one bit less than the given size.
  if (syscall(SYS_mbind, memory, bytes, MPOL_BIND, mask.data(), mask.size() * kBits + 1, 0) != 0)
    throw Error(fmt::format("memory of NUMA node {} cannot be had: mbind: {}", node, std::strerror(errno)));
}

/// Two page-aligned buffers, already touched, on huge pages if the system provides them. They are on one NUMA node if
/// it is given.
class CopyPair {
 public:
  explicit CopyPair(std::uint64_t bytes, std::optional<int> node = {})
      : bytes_(bytes), mapped_((2 * bytes + kHuge - 1) / kHuge * kHuge) {
    memory_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw Error("no memory for measuring copies");
    try {
      if (node) keep_on_node(memory_, mapped_, *node);
    } catch (...) {
      munmap(memory_, mapped_);
      throw;
    }
    madvise(memory_, mapped_, MADV_HUGEPAGE);
    std::memset(memory_, 1, mapped_);
  }
  ~CopyPair() { munmap(memory_, mapped_); }
  CopyPair(const CopyPair&) = delete;
  CopyPair& operator=(const CopyPair&) = delete;

  void copy() const {
    std::memcpy(static_cast<char*>(memory_) + bytes_, memory_, bytes_);
    // Prevents the compiler from removing the copy, whose result is never read.
    asm volatile("" : : "r"(memory_) : "memory");
  }

 private:
  static constexpr std::uint64_t kHuge = std::uint64_t{2} << 20;
  std::uint64_t bytes_, mapped_;
  void* memory_ = nullptr;
};

std::vector<int> usable_cpus(const Topology& machine) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return {0};
  for (const Cpu& cpu : machine.cpus) {
    if (cpu.id < CPU_SETSIZE && CPU_ISSET(cpu.id, &mask)) cpus.push_back(cpu.id);
  }
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

void bind_to(int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  sched_setaffinity(0, sizeof one, &one);  // if it fails, the thread runs on any allowed CPU
}

/// The speed of one thread's copies of `bytes` in about `time`, in bytes per second. It is that of the fastest tenth of
/// the copies, so an interruption does not count.
double copy_speed(const CopyPair& pair, std::uint64_t bytes, std::chrono::milliseconds time) {
  double best = 0;
  std::uint64_t repeats = 1;
  const auto end = Clock::now() + time;
  do {
    const auto begin = Clock::now();
    for (std::uint64_t k = 0; k < repeats; ++k) pair.copy();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (seconds > 0) best = std::max(best, static_cast<double>(repeats * bytes) / seconds);
    if (seconds < std::chrono::duration<double>(time).count() / 10) repeats *= 2;
  } while (Clock::now() < end);
  return best;
}

double speed_of(const std::vector<int>& cpus, std::uint64_t bytes, std::chrono::milliseconds time) {
  check_threads(static_cast<int>(cpus.size()));  // otherwise threads that did start would wait at the barrier forever
  std::barrier together(static_cast<std::ptrdiff_t>(cpus.size()));
  std::vector<double> speeds(cpus.size());
  std::atomic<bool> failed{false};
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < cpus.size(); ++i) {
    threads.emplace_back([&, i] {
      bind_to(cpus[i]);
      std::unique_ptr<CopyPair> pair;
      try {
        pair = std::make_unique<CopyPair>(bytes);
      } catch (const Error&) {
        failed = true;
      }
      together.arrive_and_wait();
      if (!failed) speeds[i] = copy_speed(*pair, bytes, time);
    });
  }
  threads.clear();  // joins
  if (failed) throw Error("no memory for measuring copies");
  double sum = 0;
  for (const double speed : speeds) sum += speed;
  return sum;
}

/// The number of `cpus` that share the data cache of that level with the first one.
std::size_t sharing(const Topology& machine, int level, const std::vector<int>& cpus) {
  for (const Cache& cache : machine.caches) {
    if (cache.level != level || cache.type == "Instruction") continue;
    const auto in_cache = [&](int cpu) { return std::ranges::find(cache.cpus, cpu) != cache.cpus.end(); };
    if (in_cache(cpus.front())) return static_cast<std::size_t>(std::ranges::count_if(cpus, in_cache));
  }
  return 1;
}

/// The size of one of two buffers that exceed every cache: together four times the last cache, but limited by the free
/// memory.
std::uint64_t memory_buffer_bytes(std::uint64_t last_level_cache) {
  return std::clamp<std::uint64_t>(2 * last_level_cache, 64U << 20, 256U << 20);
}

}  // namespace

std::uint64_t copy_buffer_bytes(std::uint64_t level_bytes, std::size_t sharing) {
  const std::uint64_t bytes = level_bytes / (4 * std::max<std::size_t>(1, sharing));
  return std::max<std::uint64_t>(1024, bytes / 64 * 64);
}

std::vector<MemoryLevel> measure_memory(const Topology& machine, std::chrono::milliseconds each) {
  const std::vector<int> cpus = usable_cpus(machine);
  std::vector<MemoryLevel> levels;
  std::uint64_t last_level_cache = 0;
  for (int level = 1; level <= 4; ++level) {
    const std::uint64_t bytes = machine.cache_bytes(level, cpus.front());
    if (bytes == 0) continue;
    last_level_cache = bytes;
    const std::uint64_t alone = copy_buffer_bytes(bytes, 1);
    const std::uint64_t shared = copy_buffer_bytes(bytes, sharing(machine, level, cpus));
    levels.push_back({"L" + std::to_string(level), alone, speed_of({cpus.front()}, alone, each),
                      speed_of(cpus, shared, each), static_cast<int>(cpus.size())});
  }
  const std::uint64_t all_memory = std::uint64_t{1} << 30;
  const std::uint64_t alone = memory_buffer_bytes(last_level_cache);
  const std::uint64_t shared = std::max<std::uint64_t>(16U << 20, std::min(alone, all_memory / 2 / cpus.size()));
  levels.push_back({"memory", alone, speed_of({cpus.front()}, alone, 2 * each), speed_of(cpus, shared, 2 * each),
                    static_cast<int>(cpus.size())});
  return levels;
}

NumaSpeeds measure_numa(const Topology& machine, std::chrono::milliseconds each) {
  const std::vector<int> usable = usable_cpus(machine);
  NumaSpeeds speeds;
  std::vector<int> cpus;  // one CPU of each node in cpu_nodes
  for (const NumaNode& node : machine.nodes) {
    if (node.bytes > 0) speeds.memory_nodes.push_back(node.id);
    const auto cpu =
        std::ranges::find_if(usable, [&](int id) { return std::ranges::find(node.cpus, id) != node.cpus.end(); });
    if (cpu == usable.end()) continue;
    speeds.cpu_nodes.push_back(node.id);
    cpus.push_back(*cpu);
  }
  std::uint64_t last_level_cache = 0;
  for (int level = 1; level <= 4; ++level)
    last_level_cache = std::max(last_level_cache, machine.cache_bytes(level, usable.front()));
  const std::uint64_t bytes = memory_buffer_bytes(last_level_cache);
  std::exception_ptr failure;
  for (const int cpu : cpus) {
    std::vector<double>& row = speeds.bytes_per_second.emplace_back();
    start_thread("a measurement of memory", [&] {
      bind_to(cpu);
      try {
        for (const int node : speeds.memory_nodes) row.push_back(copy_speed(CopyPair(bytes, node), bytes, each));
      } catch (const Error&) {
        failure = std::current_exception();
      }
    }).join();
    if (failure) std::rethrow_exception(failure);
  }
  return speeds;
}

}  // namespace phalanx::measure
