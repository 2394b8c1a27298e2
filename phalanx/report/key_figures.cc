#include "phalanx/report/key_figures.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "phalanx/base/human.h"
#include "phalanx/report/run_json.h"

namespace phalanx::report {
namespace {

double sum_of(const Curve& curve) {
  double sum = 0;
  for (const double value : curve.values) sum += std::isfinite(value) ? value : 0;
  return sum;
}

/// Beyond this, a number has more digits than anybody reads, and may not fit into 64 bits.
constexpr double kMost = 1e15;

std::string whole_text(double value) {
  return std::abs(value) < kMost ? with_commas(static_cast<std::int64_t>(value)) : fmt::format("{:.6g}", value);
}

std::string decimal_text(double value, int digits) {
  if (!std::isfinite(value)) return "not finite";
  return std::abs(value) < kMost ? fmt::format("{:.{}f}", value, digits) : fmt::format("{:.6g}", value);
}

std::string duration_text(double seconds) {
  if (!(seconds < kMost)) return fmt::format("{:.6g} s", seconds);
  const auto whole = static_cast<std::int64_t>(seconds);
  if (whole >= 3600) return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
  return whole >= 60 ? fmt::format("{} min {:02} s", whole / 60, whole % 60) : fmt::format("{:.1f} s", seconds);
}

std::string steps_text(std::int64_t done, std::optional<double> planned) {
  const bool is_all = !planned || *planned == static_cast<double>(done);
  return is_all ? with_commas(done) : fmt::format("{} of {}", with_commas(done), whole_text(*planned));
}

}  // namespace

NamedValues key_figures(const RunFolder& run) {
  const MetricsFile& metrics = run.metrics;
  NamedValues figures;
  const std::string unit = run.loss_unit();
  if (!metrics.steps.empty()) {
    const std::int64_t done = metrics.steps.back();
    figures.emplace_back("steps", steps_text(done, json_number(run.run, "steps")));
    const Curve& loss = metrics.curve("loss");
    if (!loss.empty()) figures.emplace_back("training loss, " + unit, decimal_text(loss.values.back(), 4));
  }
  if (!metrics.validation_loss.empty()) {
    const double loss = metrics.validation_loss.values.back();
    figures.emplace_back("validation loss, " + unit, decimal_text(loss, 4));
    // Only a loss of tokens has one.
    if (std::isfinite(loss) && unit == kNatsPerToken) {
      figures.emplace_back("validation perplexity, no unit", decimal_text(std::exp(loss), 2));
    }
  }
  if (const auto entropy = json_number(run.run, "unigram_entropy")) {
    figures.emplace_back("unigram entropy of the validation text, nats per token", decimal_text(*entropy, 4));
  }
  const double seconds = sum_of(metrics.curve("seconds")), tokens = sum_of(metrics.curve("tokens"));
  if (tokens > 0) figures.emplace_back("tokens", whole_text(tokens));
  if (seconds > 0) {
    figures.emplace_back("tokens/s, all ranks", whole_text(tokens / seconds));
    figures.emplace_back("time in steps", duration_text(seconds));
  }
  if (const auto parameters = json_number(run.run, "parameters")) {
    figures.emplace_back("parameters", whole_text(*parameters));
  }
  return figures;
}

std::string utc_text(double seconds_since_epoch) {
  constexpr double kYear9999 = 253402300800.0;
  if (!(seconds_since_epoch > 0 && seconds_since_epoch < kYear9999)) return "";
  return fmt::format("{:%Y-%m-%d %H:%M:%S} UTC", fmt::gmtime(static_cast<std::time_t>(seconds_since_epoch)));
}

}  // namespace phalanx::report
