// Memory counters: how much memory this process has allocated, by category, now and at its peak.
//
// Code that allocates memory for a long time gives its category with a MemoryScope. All other memory counts as
// activations, which are short-lived. CPU tensors are counted after install_counting_allocator()
// (tensor/counting_allocator.h). Memory shared between ranks is counted where it is created
// (comm/backends/local_shm/shm_windows.h); a rank counts its own part. The counters belong to the process, as the heap
// does: ranks that are threads of one process count together. Torch-free. Any thread may call; one count costs some
// tens of nanoseconds.
//
//   const MemoryScope scope(MemoryCategory::optimizer);
//   AdamW optimizer(parameters);
//   ...
//   log::info(max_memory_allocated().text());
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace phalanx::observe {

enum class MemoryCategory : std::uint8_t { parameters, gradients, optimizer, activations, buffers };
inline constexpr std::size_t kMemoryCategories = 5;
std::string_view name_of(MemoryCategory category) noexcept;

struct MemoryCounts {
  std::array<std::int64_t, kMemoryCategories> bytes{};
  std::int64_t shared = 0;  // the part of all these that is in memory shared with other processes

  std::int64_t operator[](MemoryCategory category) const noexcept { return bytes[static_cast<std::size_t>(category)]; }
  std::int64_t& operator[](MemoryCategory category) noexcept { return bytes[static_cast<std::size_t>(category)]; }
  std::int64_t total() const noexcept;
  /// Memory that does not change from step to step: parameters, gradients and optimizer.
  std::int64_t state() const noexcept;
  std::string text() const;  // "812 MiB = parameters 192 MiB + gradients 192 MiB + ..."
};

MemoryCounts memory_allocated() noexcept;
/// The counts at the highest total since the last reset_peak_memory_stats().
MemoryCounts max_memory_allocated() noexcept;
void reset_peak_memory_stats() noexcept;

/// During its lifetime, memory that this thread allocates is counted in that category.
class [[nodiscard]] MemoryScope {
 public:
  explicit MemoryScope(MemoryCategory category) noexcept;
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

  static MemoryCategory current() noexcept;

 private:
  MemoryCategory outer_;
};

// For allocators. Memory must be freed with the category that it was allocated with.
void record_memory_allocated(MemoryCategory category, std::size_t bytes, bool shared = false) noexcept;
void record_memory_freed(MemoryCategory category, std::size_t bytes, bool shared = false) noexcept;

}  // namespace phalanx::observe
