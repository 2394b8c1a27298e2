// For tests with a long list of cases, such as layouts: which of them a run of the tests takes.
//
//   for (const Layout& layout : sampled(layouts(), 4)) expect_right(layout);
//   INSTANTIATE_TEST_SUITE_P(Worlds, GlooSuite, testing::ValuesIn(sampled(worlds, 2)));
//
// PHALANX_TEST_SEED, a whole number, draws them: 1 where it is not set. With PHALANX_ALL_CASES=1 (`make whole`) every
// case is taken.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <source_location>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "phalanx/base/derived_seed.h"
#include "phalanx/base/env.h"

namespace phalanx {

inline bool takes_all_cases() { return env_bool("PHALANX_ALL_CASES").value_or(false); }

inline std::uint64_t test_seed() { return static_cast<std::uint64_t>(env_int("PHALANX_TEST_SEED").value_or(1)); }

/// Indices below `size`, in ascending order: `count` of them, or all. They depend on the seed, on the test, on the
/// place of the call, and on how often the test has called from there: each pass of a loop draws others.
inline std::vector<std::size_t> sampled_indices(std::size_t size, std::size_t count,
                                                const std::source_location& place = std::source_location::current()) {
  std::vector<std::size_t> drawn(size);
  std::iota(drawn.begin(), drawn.end(), 0);
  if (takes_all_cases() || count >= size) return drawn;
  const std::string path = place.file_name();
  std::string name = path.substr(path.rfind('/') + 1) + ":" + std::to_string(place.line());
  if (const auto* test = testing::UnitTest::GetInstance()->current_test_info()) name += test->name();
  static std::map<std::string, int> calls;  // of the thread that runs the tests
  name += "#" + std::to_string(calls[name]++);
  std::uint64_t seed = test_seed();
  for (const char c : name) seed = derived_seed(seed, static_cast<unsigned char>(c));
  std::ranges::sort(drawn, {}, [&](std::size_t i) { return derived_seed(seed, i); });
  drawn.resize(count);
  std::ranges::sort(drawn);
  return drawn;
}

/// `count` of the cases, in their order, or all of them.
template <typename Case>
std::vector<Case> sampled(const std::vector<Case>& cases, std::size_t count,
                          const std::source_location& place = std::source_location::current()) {
  std::vector<Case> drawn;
  for (const std::size_t i : sampled_indices(cases.size(), count, place)) drawn.push_back(cases[i]);
  return drawn;
}

/// The first case, with which the others are compared, and `count` of the others.
template <typename Case>
std::vector<Case> first_and_sampled(std::vector<Case> cases, std::size_t count,
                                    const std::source_location& place = std::source_location::current()) {
  if (cases.empty()) return cases;
  const std::vector<Case> others = sampled(std::vector<Case>(cases.begin() + 1, cases.end()), count, place);
  cases.resize(1);
  cases.insert(cases.end(), others.begin(), others.end());
  return cases;
}

}  // namespace phalanx
