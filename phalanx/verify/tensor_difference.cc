#include "phalanx/verify/tensor_difference.h"

#include <ATen/TensorOperators.h>
#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace phalanx::verify {

using nlohmann::json;

std::int64_t ulps_between(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<std::int64_t>::max();
  // Adjacent floats have adjacent integers; 0 and -0 have the same.
  const auto place = [](float value) {
    const auto bits = std::bit_cast<std::int32_t>(value);
    return bits < 0 ? static_cast<std::int64_t>(std::numeric_limits<std::int32_t>::min()) - bits
                    : static_cast<std::int64_t>(bits);
  };
  return std::abs(place(a) - place(b));
}

TensorDifference difference_of(const at::Tensor& found, const at::Tensor& expected, double expected_norm,
                               const std::vector<std::int64_t>& offset) {
  TensorDifference result;
  if (found.numel() == 0) return result;
  const at::Tensor f = found.detach().to(at::kCPU, at::kDouble).contiguous();
  const at::Tensor e = expected.detach().to(at::kCPU, at::kDouble).contiguous();
  const auto* has = f.const_data_ptr<double>();
  const auto* should = e.const_data_ptr<double>();
  double squares = 0;
  std::int64_t worst = 0;
  double largest = -1;
  for (std::int64_t i = 0; i < f.numel(); ++i) {
    const double off = std::abs(has[i] - should[i]);
    squares += off * off;
    if (off > largest || (std::isnan(off) && !std::isnan(largest))) {
      largest = off;
      worst = i;
      if (std::isnan(off)) break;
    }
  }
  result.largest = largest;
  result.found = has[worst];
  result.expected = should[worst];
  result.ulps = ulps_between(static_cast<float>(has[worst]), static_cast<float>(should[worst]));
  const double norm = std::sqrt(squares);
  if (!std::isfinite(norm)) {
    result.relative = std::numeric_limits<double>::infinity();
  } else if (norm > 0) {
    result.relative = expected_norm > 0 ? norm / expected_norm : std::numeric_limits<double>::infinity();
  }
  result.index.resize(static_cast<std::size_t>(f.dim()));
  for (std::int64_t dim = f.dim() - 1; dim >= 0; --dim) {
    const auto d = static_cast<std::size_t>(dim);
    result.index[d] = worst % f.size(dim) + (offset.empty() ? 0 : offset[d]);
    worst /= f.size(dim);
  }
  return result;
}

std::string to_text(const TensorDifference& d) {
  // JSON has no numbers that are not finite; these are written as text.
  const auto number = [](double value) { return std::isfinite(value) ? json(value) : json(fmt::format("{}", value)); };
  const json object = {{"relative", number(d.relative)},
                       {"explained", number(d.explained)},
                       {"largest", number(d.largest)},
                       {"found", number(d.found)},
                       {"expected", number(d.expected)},
                       {"ulps", d.ulps},
                       {"index", d.index}};
  return object.dump();
}

TensorDifference difference_from_text(const std::string& text) {
  const json object = json::parse(text);
  const auto number = [&](const char* key) {
    const json& value = object.at(key);
    if (value.is_number()) return value.get<double>();
    const auto word = value.get<std::string>();
    return word == "inf"    ? std::numeric_limits<double>::infinity()
           : word == "-inf" ? -std::numeric_limits<double>::infinity()
                            : std::numeric_limits<double>::quiet_NaN();
  };
  return {.relative = number("relative"),
          .explained = number("explained"),
          .largest = number("largest"),
          .found = number("found"),
          .expected = number("expected"),
          .ulps = object.at("ulps").get<std::int64_t>(),
          .index = object.at("index").get<std::vector<std::int64_t>>()};
}

}  // namespace phalanx::verify
