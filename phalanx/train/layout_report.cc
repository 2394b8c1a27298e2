#include "phalanx/train/layout_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "phalanx/base/human.h"

namespace phalanx::train {
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
  double loss = 0, gradient = 0, weight = 0;
  std::string of_gradient = "-", of_weight = "-";
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
    take(step.weights, worst.weight, worst.of_weight);
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

bool is_float32(const TrainConfig& config) {
  return config.training.mixed_precision_param == "float32" && config.training.mixed_precision_reduce == "float32";
}

/// Every product of the layout is one of the reference's, with as many rows: what differs is the order of sums.
bool has_products_of_one_rank(const TrainConfig& config, std::int64_t ranks) {
  const ParallelPlan parallel = plan_run(config, ranks).parallel;
  return parallel.dp_shard == 1 && parallel.tp == 1;
}

}  // namespace

LayoutTolerance tolerance_for(const TrainConfig& config, std::int64_t ranks, at::Device device) {
  if (ranks == 1 && device.is_cpu()) return {.loss = 0, .gradient = 0, .weight = 0, .drift = 0, .activation = 0};
  if (is_float32(config)) return {};
  if (has_products_of_one_rank(config, ranks))
    return {.loss = 1e-3, .gradient = 5e-3, .weight = 2e-3, .drift = 1, .activation = 1e-2};
  return {.loss = 1e-2, .gradient = 2e-2, .weight = 5e-2, .drift = 1, .activation = 1e-1};
}

std::string tolerance_text(const TrainConfig& config, std::int64_t ranks, const LayoutTolerance& tolerance) {
  if (tolerance.gradient == 0) return "expected of one rank: the same bits";
  const auto& training = config.training;
  std::string text = fmt::format(
      "loss within {:.2g} of its value, gradients within {:.2g} of their norm at step 1 and {:.2g} more "
      "with each further one, weights within {:.2g} with each step",
      tolerance.loss, tolerance.gradient, tolerance.drift * tolerance.gradient, tolerance.weight);
  if (is_float32(config)) return "expected: " + text;
  const bool narrow_products = training.mixed_precision_param != "float32";
  if (narrow_products && has_products_of_one_rank(config, ranks)) {
    return fmt::format(
        "expected in {}, of replicas and stages: {}; that much because a weight that is off by a rounding of float32 "
        "may be cast to the next number of {}",
        training.mixed_precision_param, text, training.mixed_precision_param);
  }
  return fmt::format(
      "expected in {}, averaged in {}, of weights that are cut: {}; that much because sums of products are rounded "
      "where the weights are cut, to 2^-8 of their value in 16 bits, and on one rank they are not",
      training.mixed_precision_param, training.mixed_precision_reduce, text);
}

std::string layout_table(const LayoutCheck& check) {
  std::string text = fmt::format("{} beside one rank\n", check.layout);
  for (const StepCheck& step : check.steps) {
    text += fmt::format("step {}: loss {:.7f}, on one rank {:.7f}: {:.2g} off\n", step.step, step.loss,
                        step.expected_loss, relative_loss(step));
    text += fmt::format("  {:<38} {:>8}  {:<36} {:>8}  {}\n", "parameter", "gradient", "most at", "weight", "most at");
    for (std::size_t i = 0; i < step.gradients.size(); ++i) {
      const ParameterCheck& gradient = step.gradients[i];
      text +=
          fmt::format("  {:<38} {:>8.2g}  {:<36}", gradient.name, gradient.difference.relative, element_text(gradient));
      if (i < step.weights.size()) {
        text += fmt::format(" {:>8.2g}  {}", step.weights[i].difference.relative, element_text(step.weights[i]));
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
  if (check.finding) return fmt::format("{} {}", line, check.finding->text());
  return fmt::format("{} loss {:.1e}  gradient {:.1e} ({})  weight {:.1e} ({})  {:.1f} s", line, worst.loss,
                     worst.gradient, worst.of_gradient, worst.weight, worst.of_weight, seconds);
}

nlohmann::json layout_record(const std::string& name, const LayoutCheck& check) {
  nlohmann::json record = {{"layout", name}, {"right", !check.finding}, {"steps", nlohmann::json::array()}};
  if (check.finding) record["finding"] = check.finding->text();
  for (const StepCheck& step : check.steps) {
    nlohmann::json one = {{"step", step.step},
                          {"loss", step.loss},
                          {"expected_loss", step.expected_loss},
                          {"grad_norm", step.norm},
                          {"expected_grad_norm", step.expected_norm},
                          {"gradients", nlohmann::json::array()},
                          {"weights", nlohmann::json::array()}};
    for (const auto& gradient : step.gradients) one["gradients"].push_back(to_record(gradient));
    for (const auto& weight : step.weights) one["weights"].push_back(to_record(weight));
    record["steps"].push_back(std::move(one));
  }
  return record;
}

}  // namespace phalanx::train
