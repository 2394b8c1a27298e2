// How much memory this process has taken, by what it is for: now, and at the moment when it was most.
//
// Whoever takes memory for long says what for by a MemoryScope around it; everything else counts as activations, which
// come and go. Tensors on the CPU are counted once install_counting_allocator() has been called
// (tensor/counting_allocator.h), memory shared between ranks where it is made (comm/backends/local_shm/shm_windows.h): a rank counts its
// own part. The counters are those of the process, as the heap is: ranks that are threads of one process count
// together. Torch-free. Any thread; a count costs some tens of nanoseconds.
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
  std::int64_t shared = 0;  // of all these, in memory that other processes see, too

  std::int64_t operator[](MemoryCategory category) const noexcept { return bytes[static_cast<std::size_t>(category)]; }
  std::int64_t& operator[](MemoryCategory category) noexcept { return bytes[static_cast<std::size_t>(category)]; }
  std::int64_t total() const noexcept;
  /// What does not change from step to step: parameters, gradients and optimizer.
  std::int64_t state() const noexcept;
  std::string text() const;  // "812 MiB = parameters 192 MiB + gradients 192 MiB + ..."
};

MemoryCounts memory_allocated() noexcept;
/// When the total was highest, since the last reset_peak_memory_stats().
MemoryCounts max_memory_allocated() noexcept;
void reset_peak_memory_stats() noexcept;

/// Until its end, memory that this thread takes is counted there.
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

// For those who hand out memory; freed with the category it was taken in.
void record_memory_allocated(MemoryCategory category, std::size_t bytes, bool shared = false) noexcept;
void record_memory_freed(MemoryCategory category, std::size_t bytes, bool shared = false) noexcept;

}  // namespace phalanx::observe
