// What mpi_ranks_test.cc, whose functions the ranks under mpirun run, and mpi_backend_test.cc, which starts them and
// reads what they print, agree on; and how both say what is wrong. Tests only.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace phalanx::mpi_ranks {

constexpr std::int64_t kDeathCount = 1'000'000;  // elements of a call in which a rank dies
constexpr int kHierarchicalVictim = 2;           // who dies beside NCCL
constexpr std::chrono::milliseconds kShortHeartbeat{2'000};

inline void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

inline void expect_in(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    expect(text.find(part) != std::string::npos, fmt::format("'{}' is not in: {}", part, text));
}

}  // namespace phalanx::mpi_ranks
