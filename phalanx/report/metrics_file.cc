#include "phalanx/report/metrics_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx::report {
namespace {

constexpr double kNotFinite = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t kCurves = 10;

/// One line of the file, with its ranks' memory in a pool.
struct MetricsLine {
  std::int64_t step = 0;
  std::array<double, kCurves> values{};
  std::array<bool, kCurves> is_there{};
  std::size_t memory_begin = 0, memory_count = 0;
  bool is_validation = false;
  std::optional<double> validation_loss;
};

/// Takes what is charted from the events of a JSON parser. It looks at the keys of the outer object, and into the list
/// "memory_gib".
class LineReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit LineReader(std::vector<float>& memory) : memory_(memory) {}

  /// Nothing if the line is not an object with an integer "step".
  std::optional<MetricsLine> read(const std::string& text) {
    const auto wrong_before = std::pair(wrong_, wrong_validations_);
    line_ = {.memory_begin = memory_.size()};
    depth_ = 0;
    has_step_ = is_object_ = false;
    field_ = Field::other;
    const bool parsed = nlohmann::json::sax_parse(text, this);
    if (!parsed || !is_object_ || !has_step_) {
      memory_.resize(line_.memory_begin);
      std::tie(wrong_, wrong_validations_) = wrong_before;
      return std::nullopt;
    }
    line_.memory_count = memory_.size() - line_.memory_begin;
    return line_;
  }

  /// How many values of each curve were of another type.
  const std::array<std::size_t, kCurves>& wrong() const noexcept { return wrong_; }
  std::size_t wrong_validations() const noexcept { return wrong_validations_; }

  bool null() override { return take(kNotFinite); }
  bool boolean(bool) override { return take(std::nullopt); }
  bool number_integer(std::int64_t value) override { return take_integer(value); }
  bool number_unsigned(std::uint64_t value) override {
    constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    return value <= kMost ? take_integer(static_cast<std::int64_t>(value)) : take(static_cast<double>(value));
  }
  bool number_float(double value, const std::string&) override { return take(value); }
  bool string(std::string&) override { return take(std::nullopt); }
  bool binary(nlohmann::json::binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(/*is_object=*/true); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(/*is_object=*/false); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override { return false; }

  bool key(std::string& name) override {
    if (depth_ != 1) return true;
    const auto& keys = curve_keys();
    const auto curve = std::ranges::find(keys, std::string_view(name));
    curve_ = static_cast<std::size_t>(curve - keys.begin());
    field_ = curve != keys.end()         ? Field::curve
             : name == "step"            ? Field::step
             : name == "memory_gib"      ? Field::memory
             : name == "validation_loss" ? Field::validation
                                         : Field::other;
    return true;
  }

 private:
  enum class Field : std::uint8_t { other, step, curve, memory, validation };

  bool open(bool is_object) {
    if (depth_ == 0) is_object_ = is_object;
    if (depth_ == 1) take(std::nullopt);
    ++depth_;
    return true;
  }
  bool close() {
    --depth_;
    return true;
  }
  bool take_integer(std::int64_t value) {
    if (depth_ == 1 && field_ == Field::step) {
      line_.step = value;
      has_step_ = true;
    }
    return take(static_cast<double>(value));
  }

  /// A number, or nothing for a value of another type.
  bool take(std::optional<double> value) {
    if (field_ == Field::memory && value && (depth_ == 1 || depth_ == 2)) {
      memory_.push_back(static_cast<float>(*value));
    }
    if (depth_ != 1) return true;
    if (value && !std::isfinite(*value)) value = kNotFinite;
    if (field_ == Field::curve) {
      line_.is_there[curve_] = value.has_value();
      line_.values[curve_] = value.value_or(0);
      if (!value) ++wrong_[curve_];
    } else if (field_ == Field::validation) {
      line_.is_validation = true;
      line_.validation_loss = value;
      if (!value) ++wrong_validations_;
    }
    return true;
  }

  std::vector<float>& memory_;
  MetricsLine line_;
  int depth_ = 0;
  bool has_step_ = false, is_object_ = false;
  Field field_ = Field::other;
  std::size_t curve_ = 0;
  std::array<std::size_t, kCurves> wrong_{};
  std::size_t wrong_validations_ = 0;
};

/// The numbers that JSON does not have, but other writers write, become null.
std::string with_null_for_not_finite(const std::string& line) {
  std::string text;
  bool in_string = false;
  for (std::size_t i = 0; i < line.size();) {
    if (line[i] == '"') in_string = !in_string;
    if (line[i] == '\\' && i + 1 < line.size()) text += line[i++];
    const std::string_view rest = std::string_view(line).substr(i);
    std::size_t length = 0;
    for (const std::string_view name : {"-Infinity", "Infinity", "-NaN", "NaN"}) {
      if (!in_string && rest.starts_with(name)) length = std::max(length, name.size());
    }
    text += length > 0 ? std::string("null") : std::string(1, line[i]);
    i += std::max<std::size_t>(length, 1);
  }
  return text;
}

/// By rising steps, the last one of each step.
void sort_by_step(std::vector<MetricsLine>& lines) {
  const auto by_step = [](const MetricsLine& a, const MetricsLine& b) { return a.step < b.step; };
  if (!std::ranges::is_sorted(lines, by_step)) std::ranges::stable_sort(lines, by_step);
  std::size_t kept = 0;
  for (const MetricsLine& line : lines) {
    if (kept > 0 && lines[kept - 1].step == line.step) --kept;
    lines[kept++] = line;
  }
  lines.resize(kept);
}

void add_memory(MetricsFile& metrics, std::int64_t step, const float* values, std::size_t count) {
  if (count == 0) return;
  const auto less = [](float a, float b) { return a < b || (std::isnan(b) && !std::isnan(a)); };
  const auto greater = [](float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); };
  metrics.memory_lowest.add(step, *std::min_element(values, values + count, less));
  metrics.memory_highest.add(step, *std::min_element(values, values + count, greater));
  metrics.ranks.add(step, static_cast<double>(count));
  metrics.memory_by_rank.resize(std::max(metrics.memory_by_rank.size(), std::min(count, kRanksShown + 1)));
  for (std::size_t rank = 0; rank < std::min(count, kRanksShown); ++rank) {
    metrics.memory_by_rank[rank].add(step, values[rank]);
  }
}

/// By rising steps, each step once.
struct MetricsLines {
  std::vector<MetricsLine> steps, validations;
};

MetricsLines read_lines(const std::string& path, LineReader& reader, std::vector<std::string>& notes) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw DataError(fmt::format("'{}' cannot be read ({}): expected the run's metrics, written by `phalanx train`",
                                path, std::strerror(errno)));
  }
  MetricsLines lines;
  std::string text;
  for (std::int64_t number = 1; std::getline(file, text); ++number) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    auto line = reader.read(text);
    if (!line) line = reader.read(with_null_for_not_finite(text));
    if (!line && file.peek() == std::ifstream::traits_type::eof()) {
      notes.push_back(fmt::format(
          "metrics.jsonl:{}: the last line is incomplete and left out (the run may be writing it)", number));
      break;
    }
    if (!line) throw DataError(fmt::format("{}:{}: expected a JSON object with an integer \"step\"", path, number));
    (line->is_validation ? lines.validations : lines.steps).push_back(*line);
  }
  sort_by_step(lines.steps);
  sort_by_step(lines.validations);
  return lines;
}

void note_wrong_types(const LineReader& reader, std::vector<std::string>& notes) {
  const auto note = [&](std::string_view key, std::size_t count) {
    if (count == 0) return;
    notes.push_back(fmt::format("metrics.jsonl: \"{}\" is no number in {} line{}: left out there", key, count,
                                count == 1 ? "" : "s"));
  };
  for (std::size_t i = 0; i < kCurves; ++i) note(curve_keys()[i], reader.wrong()[i]);
  note("validation_loss", reader.wrong_validations());
}

}  // namespace

void Curve::add(std::int64_t step, double value) {
  steps.push_back(step);
  values.push_back(value);
}

const std::vector<std::string_view>& curve_keys() {
  static const std::vector<std::string_view> keys = {"loss",
                                                     "lr",
                                                     "grad_norm",
                                                     "tps",
                                                     "exposed_percent",
                                                     "mfu_percent",
                                                     "seconds",
                                                     "tokens",
                                                     "expert_load_max",
                                                     "expert_load_mean"};
  return keys;
}

const Curve& MetricsFile::curve(std::string_view key) const {
  static const Curve none;
  const auto& keys = curve_keys();
  const auto at = static_cast<std::size_t>(std::ranges::find(keys, key) - keys.begin());
  return at < curves.size() ? curves[at] : none;
}

MetricsFile read_metrics(const std::string& path) {
  MetricsFile metrics;
  std::vector<float> memory;
  LineReader reader(memory);
  const MetricsLines lines = read_lines(path, reader, metrics.notes);
  note_wrong_types(reader, metrics.notes);
  for (const MetricsLine& line : lines.steps) {
    metrics.steps.push_back(line.step);
    for (std::size_t i = 0; i < kCurves; ++i) {
      if (line.is_there[i]) metrics.curves[i].add(line.step, line.values[i]);
    }
    add_memory(metrics, line.step, memory.data() + line.memory_begin, line.memory_count);
  }
  if (metrics.memory_by_rank.size() > kRanksShown) metrics.memory_by_rank.clear();
  for (const MetricsLine& line : lines.validations) {
    if (line.validation_loss) metrics.validation_loss.add(line.step, *line.validation_loss);
  }
  return metrics;
}

}  // namespace phalanx::report
