#include "phalanx/observe/memory_counters.h"

#include <fmt/format.h>

#include <atomic>
#include <mutex>
#include <type_traits>

#include "phalanx/base/human.h"

namespace phalanx::observe {
namespace {

// One object per process: libtorch has only one CPU allocator, which all ranks of the process share.
struct Counters {
  std::array<std::atomic<std::int64_t>, kMemoryCategories> bytes{};
  std::atomic<std::int64_t> shared{0}, total{0}, peak_total{0};
  std::mutex mutex;  // guards `peak`
  MemoryCounts peak;

  MemoryCounts now() const noexcept {
    MemoryCounts counts;
    for (std::size_t c = 0; c < kMemoryCategories; ++c) counts.bytes[c] = bytes[c].load(std::memory_order_relaxed);
    counts.shared = shared.load(std::memory_order_relaxed);
    return counts;
  }
};

static_assert(std::is_trivially_destructible_v<Counters>);

Counters& counters() noexcept {
  static Counters all;  // it needs no destructor, since memory is freed until the very end of the process
  return all;
}

thread_local MemoryCategory current_category = MemoryCategory::activations;

}  // namespace

std::string_view name_of(MemoryCategory category) noexcept {
  constexpr std::string_view kNames[] = {"parameters", "gradients", "optimizer", "activations", "buffers"};
  return kNames[static_cast<std::size_t>(category)];
}

std::int64_t MemoryCounts::total() const noexcept {
  std::int64_t sum = 0;
  for (const std::int64_t one : bytes) sum += one;
  return sum;
}

std::int64_t MemoryCounts::state() const noexcept {
  return (*this)[MemoryCategory::parameters] + (*this)[MemoryCategory::gradients] + (*this)[MemoryCategory::optimizer];
}

std::string MemoryCounts::text() const {
  std::string parts;
  for (std::size_t c = 0; c < kMemoryCategories; ++c) {
    parts += fmt::format("{}{} {}", c > 0 ? " + " : "", name_of(static_cast<MemoryCategory>(c)),
                         human_bytes(static_cast<std::uint64_t>(bytes[c])));
  }
  return fmt::format("{} = {}", human_bytes(static_cast<std::uint64_t>(total())), parts);
}

MemoryCounts memory_allocated() noexcept { return counters().now(); }

MemoryCounts max_memory_allocated() noexcept {
  Counters& all = counters();
  const std::lock_guard lock(all.mutex);
  return all.peak;
}

void reset_peak_memory_stats() noexcept {
  Counters& all = counters();
  const std::lock_guard lock(all.mutex);
  all.peak = all.now();
  all.peak_total = all.peak.total();
}

MemoryScope::MemoryScope(MemoryCategory category) noexcept : outer_(current_category) { current_category = category; }
MemoryScope::~MemoryScope() { current_category = outer_; }
MemoryCategory MemoryScope::current() noexcept { return current_category; }

void record_memory_allocated(MemoryCategory category, std::size_t size, bool shared) noexcept {
  Counters& all = counters();
  const auto bytes = static_cast<std::int64_t>(size);
  all.bytes[static_cast<std::size_t>(category)].fetch_add(bytes, std::memory_order_relaxed);
  if (shared) all.shared.fetch_add(bytes, std::memory_order_relaxed);
  const std::int64_t total = all.total.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (total <= all.peak_total.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(all.mutex);
  const MemoryCounts now = all.now();
  if (now.total() <= all.peak_total.load(std::memory_order_relaxed)) return;  // another thread has updated it
  all.peak = now;
  all.peak_total.store(now.total(), std::memory_order_relaxed);
}

void record_memory_freed(MemoryCategory category, std::size_t size, bool shared) noexcept {
  Counters& all = counters();
  const auto bytes = static_cast<std::int64_t>(size);
  all.bytes[static_cast<std::size_t>(category)].fetch_sub(bytes, std::memory_order_relaxed);
  if (shared) all.shared.fetch_sub(bytes, std::memory_order_relaxed);
  all.total.fetch_sub(bytes, std::memory_order_relaxed);
}

}  // namespace phalanx::observe
