#include "phalanx/comm/testing/suite_parts.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>

#include "phalanx/base/testing/under_sanitizer.h"
#include "phalanx/comm/backend.h"

namespace phalanx::suite {

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

at::Tensor tensor_of(const std::vector<double>& values, ScalarType type) {
  at::Tensor whole =
      at::empty({static_cast<std::int64_t>(values.size())}, at::TensorOptions().dtype(ScalarType::Double));
  std::ranges::copy(values, whole.data_ptr<double>());
  return c10::isIntegralType(type, false) ? whole.to(ScalarType::Long).to(type) : whole.to(type);
}

void require_equal(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  if (at::equal(found, expected)) return;
  const at::Tensor a = found.to(ScalarType::Double).contiguous();
  const at::Tensor b = expected.to(ScalarType::Double).contiguous();
  for (std::int64_t i = 0; i < a.numel(); ++i)
    if (!(a.data_ptr<double>()[i] == b.data_ptr<double>()[i]))
      throw std::runtime_error(fmt::format("{}: element {} of {} is {}, expected {}", what, i, a.numel(),
                                           a.data_ptr<double>()[i], b.data_ptr<double>()[i]));
  throw std::runtime_error(what + ": shapes or types differ");
}

void require_mentions(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    require(text.find(part) != std::string::npos, fmt::format("'{}' is not in the error: {}", part, text));
}

double suite_value(ReduceOp op, ScalarType type, int rank, std::int64_t i) {
  if (type == ScalarType::Bool) return (i + rank) % 3 == 0 ? 1 : 0;
  if (op == ReduceOp::product) return static_cast<double>((i + rank) % 2 + 1);
  const auto value = static_cast<double>((i * 7 + rank * 3) % 11 + 1);
  return c10::isIntegralType(type, true) ? value : value - 5;
}

double suite_result(ReduceOp op, ScalarType type, int world, std::int64_t i) {
  double result = suite_value(op, type, 0, i);
  for (int r = 1; r < world; ++r) {
    const double next = suite_value(op, type, r, i);
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg:
        result = type == ScalarType::Bool ? std::max(result, next) : result + next;
        break;
      case ReduceOp::min:
        result = std::min(result, next);
        break;
      case ReduceOp::max:
        result = std::max(result, next);
        break;
      case ReduceOp::product:
        result *= next;
        break;
    }
  }
  if (op == ReduceOp::avg)
    result = type == ScalarType::Double ? result / world : static_cast<float>(result) / static_cast<float>(world);
  return result;
}

std::string label(const char* verb, ScalarType type, ReduceOp op, std::int64_t count) {
  return fmt::format("{} {} {} [{}]", verb, c10::toString(type), name_of(op), count);
}

bool is_slow(const Communicator& comm) {
  return kUnderSanitizer || comm.backend_name().ends_with("gloo") || comm.backend_name() == "nccl";
}
bool matches_in_order(const Communicator& comm) { return !comm.backend()->traits().has_tags; }

bool is_small_world(const Communicator& comm) { return comm.size() <= (is_slow(comm) ? 2 : 4); }

std::vector<std::int64_t> suite_sizes(const Communicator& comm, ScalarType type) {
  if (!is_small_world(comm))
    return type == ScalarType::Float ? std::vector<std::int64_t>{0, 7, 70'001} : std::vector<std::int64_t>{129};
  if (is_slow(comm) && type != ScalarType::Float) return {20'011};
  if (type == ScalarType::Float) return {0, 1, 7, 1000, 4097, 70'001, 1'000'003};
  return {0, 1, 129, 20'011};
}

std::vector<std::int64_t> suite_sizes(const Communicator& comm, std::vector<std::int64_t> sizes) {
  if (!is_small_world(comm)) sizes.back() = sizes.back() / 4 + 3;
  return sizes;
}

at::Tensor part_for(int from, int to, std::int64_t count, ScalarType type) {
  return make_tensor(count, type, [&](std::int64_t i) {
    const std::int64_t value = from * 5 + to * 2 + i;
    return type == ScalarType::Bool ? value / 2 % 2 : value % 120;
  });
}

std::int64_t begin_of(const std::vector<std::int64_t>& counts, int rank) {
  std::int64_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += counts[static_cast<std::size_t>(r)];
  return begin;
}
std::int64_t total_of(const std::vector<std::int64_t>& counts) {
  return begin_of(counts, static_cast<int>(counts.size()));
}
}  // namespace phalanx::suite
