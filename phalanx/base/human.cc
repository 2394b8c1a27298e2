#include "phalanx/base/human.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <string_view>

namespace phalanx {
namespace {

/// Three significant digits, without an exponent: 9.87, 98.7, 987.
std::string three_digits(double value) {
  const double magnitude = std::abs(value);
  if (magnitude < 9.995) return fmt::format("{:.2f}", value);
  if (magnitude < 99.95) return fmt::format("{:.1f}", value);
  return fmt::format("{:.0f}", value);
}

template <std::size_t N>
std::string scaled(double value, double step, const std::array<std::string_view, N>& units) {
  std::size_t unit = 0;
  // A value that would round up to a full unit is written in the next unit: 1.00 GiB, not 1024 MiB.
  while (unit + 1 < N && std::abs(value) >= step - 0.5) {
    value /= step;
    ++unit;
  }
  const std::string number = unit == 0 ? fmt::format("{:.0f}", value) : three_digits(value);
  return units[unit].empty() ? number : fmt::format("{} {}", number, units[unit]);
}

}  // namespace

std::string human_bytes(std::uint64_t bytes) {
  static constexpr std::array<std::string_view, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  return scaled(static_cast<double>(bytes), 1024.0, kUnits);
}

std::string human_bytes_per_second(double rate) {
  static constexpr std::array<std::string_view, 5> kUnits = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"};
  return scaled(rate, 1000.0, kUnits);
}

std::string human_count(double value) {
  static constexpr std::array<std::string_view, 5> kUnits = {"", "k", "M", "B", "T"};
  return scaled(value, 1000.0, kUnits);
}

std::string human_duration(double seconds) {
  if (!std::isfinite(seconds)) return "unknown";
  if (seconds < 0) return fmt::format("-{}", human_duration(-seconds));
  if (seconds < 0.9995e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 0.9995) return three_digits(seconds * 1e3) + " ms";
  if (seconds < 59.95) return three_digits(seconds) + " s";
  if (seconds >= 1e15) return "unknown";  // too large for the integers below, and not meaningful
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{}m {:02}s", whole / 60, whole % 60);
  if (whole < 86400) return fmt::format("{}h {:02}m", whole / 3600, whole % 3600 / 60);
  return fmt::format("{}d {:02}h", whole / 86400, whole % 86400 / 3600);
}

std::string with_commas(std::int64_t value) {
  const std::string digits = fmt::format("{}", value);
  std::string result;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    const bool after_digit = i > 0 && digits[i - 1] != '-';
    if (after_digit && (digits.size() - i) % 3 == 0) result += ',';
    result += digits[i];
  }
  return result;
}

}  // namespace phalanx
