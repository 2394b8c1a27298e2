// Common parts of the test suite for all backends (tests only): values with exact sums, sizes that fit the backend, and
// checks that throw std::runtime_error. The cases are in these files:
//   backend_suite.cc          data movement and reductions
//   suite_types.cc            every type
//   suite_nothing.cc          ranks without data
//   suite_groups.cc           groups and order
//   suite_refusals.cc         wrong calls
//   backend_failure_suite.cc  failures
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/comm/testing/fault_world.h"

namespace phalanx::suite {

using c10::ScalarType;

inline constexpr std::array kTypes{ScalarType::Float, ScalarType::Double, ScalarType::Half, ScalarType::BFloat16,
                                   ScalarType::Int,   ScalarType::Long,   ScalarType::Byte, ScalarType::Bool};
inline constexpr std::array kOps{ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::product};

void require(bool condition, const std::string& what);
void require_equal(const at::Tensor& found, const at::Tensor& expected, const std::string& what);
void require_mentions(const std::string& text, std::initializer_list<const char*> parts);

/// Converts float64 values to a tensor of the type. It converts through int64, so values that do not fit in a byte
/// wrap.
at::Tensor tensor_of(const std::vector<double>& values, ScalarType type);
/// value(i) as a tensor of the type.
template <class Value>
at::Tensor make_tensor(std::int64_t count, ScalarType type, Value value) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) values[static_cast<std::size_t>(i)] = static_cast<double>(value(i));
  return tensor_of(values, type);
}

/// The input of rank r at element i. It is small, so that every sum and product is exact in every type.
double suite_value(ReduceOp op, ScalarType type, int rank, std::int64_t i);
double suite_result(ReduceOp op, ScalarType type, int world, std::int64_t i);

/// Calls body(type, op) for all supported reductions.
template <class Body>
void for_each_reduction(Body body) {
  for (ScalarType type : kTypes)
    for (ReduceOp op : kOps)
      if (op != ReduceOp::avg || !c10::isIntegralType(type, true)) body(type, op);
}

std::string label(const char* verb, ScalarType type, ReduceOp op, std::int64_t count);

/// True for TCP, for fake streams, which are threads, and under a sanitizer.
bool is_slow(const Communicator& comm);
/// True if messages between two ranks match in the order of issue, whatever their tags.
bool matches_in_order(const Communicator& comm);
/// True for up to 4 ranks, or up to 2 with a slow backend. Only there the ranks have enough cores for large data and
/// many repeats. Larger worlds test what depends on their size.
bool is_small_world(const Communicator& comm);
/// Sizes that are small, above the one-shot limit, and (for float32) larger than all slots of a segment.
std::vector<std::int64_t> suite_sizes(const Communicator& comm, ScalarType type);
/// Sizes of the other verbs: the last is large.
std::vector<std::int64_t> suite_sizes(const Communicator& comm, std::vector<std::int64_t> sizes);

/// The data of rank `from` for rank `to`; exact in every type.
at::Tensor part_for(int from, int to, std::int64_t count, ScalarType type);
/// The concatenated parts of all ranks; part(rank) is a tensor.
template <class Part>
at::Tensor parts_of(const Communicator& comm, Part part) {
  std::vector<at::Tensor> parts;
  for (int r = 0; r < comm.size(); ++r) parts.push_back(part(r));
  return at::cat(parts);
}

/// The offset of the part of `rank`, and the total of all parts.
std::int64_t begin_of(const std::vector<std::int64_t>& counts, int rank);
std::int64_t total_of(const std::vector<std::int64_t>& counts);

/// require_error<CommError> for ranks that call at the same time. The error must come within a second (fault_world.h).
template <class Body>
std::string prompt_error_of(Communicator& comm, Body body, const std::string& what) {
  comm.barrier();
  const LoadedTime begin = LoadedTime::now();
  std::string text = require_error<CommError>(body, what);
  const std::string how_late = late(begin, std::chrono::seconds(1));
  require(how_late.empty(), fmt::format("{}: late: {}", what, how_late));
  return text;
}

// --- cases that the table in backend_suite.cc names ------------------------------------------------------------------

void suite_every_type(Communicator& comm);
void suite_every_type_async(Communicator& comm);
void suite_mixed_batch(Communicator& comm);
void suite_nothing(Communicator& comm);
void suite_bytes(Communicator& comm);
void suite_split(Communicator& comm);
void suite_async(Communicator& comm);
void suite_opposite_order(Communicator& comm);
void suite_same_bits(Communicator& comm);
void suite_rank_order(Communicator& comm);
void suite_soak(Communicator& comm);
void suite_non_contiguous(Communicator& comm);
void suite_refusals(Communicator& comm);

}  // namespace phalanx::suite
