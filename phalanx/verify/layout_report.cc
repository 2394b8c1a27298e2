#include "phalanx/verify/layout_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "phalanx/base/human.h"

namespace phalanx::verify {
namespace {

double relative_loss(const StepCheck& step) {
  return std::abs(step.loss - step.expected_loss) / std::max(std::abs(step.expected_loss), 1e-30);
}

std::string element_text(const ParameterCheck& check) {
  const TensorDifference& d = check.difference;
  if (d.largest == 0) return "the same bits";
  return fmt::format("rank {} [{}] {} ulp{}", check.rank, fmt::join(d.index, ", "), with_commas(d.ulps),
                     d.ulps == 1 ? "" : "s");
}

struct Worst {
  double loss = 0, gradient = 0, update = 0;
  std::string of_gradient = "-", of_update = "-";
};

Worst worst_of(const LayoutCheck& check) {
  Worst worst;
  const auto take = [](const std::vector<ParameterCheck>& checks, double& most, std::string& whose) {
    for (const auto& [name, rank, difference] : checks) {
      if (difference.relative <= most) continue;
      most = difference.relative;
      whose = name;
    }
  };
  for (const StepCheck& step : check.steps) {
    worst.loss = std::max(worst.loss, relative_loss(step));
    take(step.gradients, worst.gradient, worst.of_gradient);
    take(step.updates, worst.update, worst.of_update);
  }
  return worst;
}

nlohmann::json to_record(const ParameterCheck& check) {
  const auto number = [](double value) {
    return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(fmt::format("{}", value));
  };
  return {{"name", check.name},
          {"rank", check.rank},
          {"relative", number(check.difference.relative)},
          {"largest", number(check.difference.largest)},
          {"index", check.difference.index},
          {"ulps", check.difference.ulps}};
}

constexpr double k16Bits = 0x1p-8;  // twice the largest relative error of rounding to bfloat16

bool is_float32(const config::TrainConfig& config) {
  return config.training.mixed_precision_param == "float32" && config.training.mixed_precision_reduce == "float32";
}

/// Every product of the layout is one of the reference's, with as many rows: only the order of sums differs.
bool has_products_of_one_rank(const config::TrainConfig& config, std::int64_t ranks) {
  const ParallelPlan plan = config::plan_run(config, ranks).parallel;
  // One rank then has the rows of all ranks in one product (reference_config()).
  const bool joins_rows = config::counts_load_over_data_ranks(config);
  return plan.tp == 1 && plan.cp == 1 && (!joins_rows || plan.data_parallel_size() == 1);
}

bool rounds_to_float8(const config::TrainConfig& config, std::int64_t ranks) {
  return config::uses_float8(config) && ranks > 1;
}

/// The type in which gradients of ranks and passes are summed.
std::string type_of_sums(const config::TrainConfig& config, std::int64_t ranks) {
  const bool is_sharded = config::plan_run(config, ranks).parallel.is_sharded();
  return is_sharded ? config.training.mixed_precision_reduce : config.training.dtype;
}

bool averages_in_16_bits(const config::TrainConfig& config, std::int64_t ranks) {
  return type_of_sums(config, ranks) != "float32";
}

}  // namespace

LayoutTolerance tolerance_for(const config::TrainConfig& config, std::int64_t ranks, at::Device device) {
  if (ranks == 1 && device.is_cpu()) {
    return {.loss = 0, .gradient = 0, .update = 0, .weight_in_use = 0, .activation = 0};
  }
  if (is_float32(config)) return {};
  if (has_products_of_one_rank(config, ranks) && !averages_in_16_bits(config, ranks) &&
      !rounds_to_float8(config, ranks)) {
    return {.loss = 1e-3, .gradient = 5e-3, .weight_in_use = k16Bits, .activation = 1e-2};
  }
  return {.loss = 1e-2, .gradient = 2e-2, .weight_in_use = k16Bits, .activation = 1e-1};
}

bool rounds_its_own_products(const config::TrainConfig& config, std::int64_t ranks) {
  return config.training.mixed_precision_param != "float32" &&
         (!has_products_of_one_rank(config, ranks) || rounds_to_float8(config, ranks));
}

std::string tolerance_text(const config::TrainConfig& config, std::int64_t ranks, const LayoutTolerance& tolerance) {
  if (tolerance.gradient == 0) return "expected of one rank: the same bits";
  const std::string& param = config.training.mixed_precision_param;
  const std::string reduce = type_of_sums(config, ranks);
  const std::string text = fmt::format(
      "loss within {:.2g} of its value, gradients within {:.2g} of their norm, from equal weights; updates within "
      "{:.2g} "
      "of theirs, from equal gradients",
      tolerance.loss, tolerance.gradient, tolerance.update);
  if (is_float32(config)) return "expected: " + text;
  const std::string averaged =
      averages_in_16_bits(config, ranks) ? fmt::format("{}, summed in {}", param, reduce) : param;
  if (rounds_to_float8(config, ranks)) {
    return fmt::format(
        "expected in float8 ({}) and {}: {}; or, where that is more, within four times what rounding to float8 changes "
        "on "
        "one rank, which is measured at each step: a value that is off by a rounding of {} may become the next number "
        "of "
        "float8",
        config.float8.recipe_name, averaged, text, param);
  }
  if (rounds_its_own_products(config, ranks)) {
    return fmt::format(
        "expected in {}, of tensor and context parallelism: {}; or, where that is more, within four times what "
        "rounding to 16 bits "
        "changes on one rank, which is measured at each step: sums over a part of a row, or of a sequence, are "
        "rounded before they are added up",
        averaged, text);
  }
  if (averages_in_16_bits(config, ranks)) {
    return fmt::format("expected in {}: {}; that much because sums are rounded to {}", averaged, text, reduce);
  }
  return fmt::format(
      "expected in {}, of replicas, shards and stages: {}; that much because a sum that is off by a rounding of "
      "float32 "
      "may be rounded to the next number of {}",
      param, text, param);
}

std::string LayoutFinding::text() const {
  std::string text = fmt::format("step {}: the {}", step, what);
  if (!parameter.empty()) text += fmt::format(" of '{}' is wrong on rank {}", parameter, rank);
  if (parameter.empty()) text += what == "batch" ? fmt::format(" is wrong on rank {}", rank) : " is wrong";
  text += fmt::format(": {:.3g} of its {} off, {:.3g} allowed", difference.relative,
                      parameter.empty() ? "value" : "norm", tolerance);
  if (!difference.index.empty()) {
    text += fmt::format("; most at [{}]: expected {:.9g}, found {:.9g}", fmt::join(difference.index, ", "),
                        difference.expected, difference.found);
    if (what != "batch") text += fmt::format(", {} ulps", difference.ulps);
  } else if (parameter.empty()) {
    text += fmt::format("; expected {:.9g}, found {:.9g}", difference.expected, difference.found);
  }
  const bool is_listed = what == "gradient" || what == "update" || what == "initial value";
  if (others > 0 && is_listed) {
    text += fmt::format("; {} more parameter{} wrong, too", others, others == 1 ? " is" : "s are");
  } else if (others > 0) {
    text += fmt::format("; so {} gradient{} wrong", others, others == 1 ? " is" : "s are");
  }
  if (!cause.empty()) text += fmt::format("\n  likely cause: {}", cause);
  return text;
}

std::string layout_table(const LayoutCheck& check) {
  std::string text = fmt::format("{} beside one rank\n", check.layout);
  for (const std::string& note : check.notes) text += note + "\n";
  for (const StepCheck& step : check.steps) {
    text += fmt::format("step {}: loss {:.7f}, on one rank {:.7f}: {:.2g} off\n", step.step, step.loss,
                        step.expected_loss, relative_loss(step));
    text += fmt::format("  {:<38} {:>8}  {:<36} {:>8}  {}\n", "parameter", "gradient", "most at", "update", "most at");
    for (std::size_t i = 0; i < step.gradients.size(); ++i) {
      const ParameterCheck& gradient = step.gradients[i];
      text +=
          fmt::format("  {:<38} {:>8.2g}  {:<36}", gradient.name, gradient.difference.relative, element_text(gradient));
      if (i < step.updates.size()) {
        text += fmt::format(" {:>8.2g}  {}", step.updates[i].difference.relative, element_text(step.updates[i]));
      }
      while (text.ends_with(' ')) text.pop_back();
      text += "\n";
    }
  }
  return text;
}

std::string layout_line(const std::string& name, const LayoutCheck& check, double seconds) {
  const Worst worst = worst_of(check);
  std::string line = fmt::format("{:<5} {:<40}", check.finding ? "WRONG" : "ok", name);
  if (check.finding) {
    line += " " + check.finding->text();
  } else {
    line += fmt::format(" loss {:.1e}  gradient {:.1e} ({})  update {:.1e} ({})  {:.1f} s", worst.loss, worst.gradient,
                        worst.of_gradient, worst.update, worst.of_update, seconds);
  }
  for (const std::string& note : check.notes) line += "\n      " + note;
  return line;
}

nlohmann::json layout_record(const std::string& name, const LayoutCheck& check) {
  nlohmann::json record = {{"layout", name}, {"right", !check.finding}, {"steps", nlohmann::json::array()}};
  if (check.finding) record["finding"] = check.finding->text();
  if (!check.notes.empty()) record["notes"] = check.notes;
  if (check.documents_compared) record["documents_compared"] = *check.documents_compared;
  for (const StepCheck& step : check.steps) {
    nlohmann::json one = {{"step", step.step},
                          {"loss", step.loss},
                          {"expected_loss", step.expected_loss},
                          {"grad_norm", step.norm},
                          {"expected_grad_norm", step.expected_norm},
                          {"gradients", nlohmann::json::array()},
                          {"updates", nlohmann::json::array()}};
    for (const auto& gradient : step.gradients) one["gradients"].push_back(to_record(gradient));
    for (const auto& update : step.updates) one["updates"].push_back(to_record(update));
    record["steps"].push_back(std::move(one));
  }
  return record;
}

}  // namespace phalanx::verify
