#include "phalanx/verify/routing_check.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

#include "phalanx/models/expert_bias.h"
#include "phalanx/verify/tensor_difference.h"

namespace phalanx::verify {
namespace {

using nlohmann::json;

constexpr const char* kChoosesOthers =
    "from one rank's logits this rank chooses other experts: its biases are not those of one rank, or its rule is "
    "another";
constexpr const char* kOtherLogits = "the gradients are right: look at what the router computes in the forward pass";

LayoutFinding finding_of(const json& one, double relative, int rank, const LayoutSide& layout, double tolerance) {
  const auto layer = one["layer"].get<std::int64_t>();
  const std::string gate = fmt::format("layers.{}.moe.gate.weight", layer);
  const auto wrong = one["wrong"].get<double>();
  if (wrong == 0) {
    return {.what = "router logits",
            .parameter = gate,
            .rank = rank,
            .difference = {.relative = relative},
            .tolerance = tolerance,
            .cause = kOtherLogits};
  }
  const bool has_biases = layout.model->expert_load()->biases().defined();
  return {.what = "choice of experts",
          .parameter = has_biases ? models::expert_bias_name(layer) : gate,
          .rank = rank,
          .difference = {.relative = wrong / one["tokens"].get<double>()},
          .cause = kChoosesOthers};
}

}  // namespace

RoutingCheck compare_routing(const LayoutSide& layout, Communicator& world,
                             const std::function<double(std::int64_t layer)>& tolerance) {
  // Ranks of tensor parallelism have the same tokens: the first one counts them.
  const bool counts = layout.options.rank % layout.plan.parallel.tp == 0;
  json mine = json::array();
  for (const auto& [layer, difference] : layout.routing()->differences()) {
    mine.push_back({{"layer", layer},
                    {"difference", to_text(TensorDifference{.relative = difference.relative()})},
                    {"tokens", difference.tokens},
                    {"wrong", difference.wrong},
                    {"elsewhere", difference.elsewhere},
                    {"counts", counts}});
  }
  RoutingCheck result;
  std::int64_t first = -1;  // layer in which a finding is
  int rank = 0;
  for (const std::string& text : world.all_gather_bytes(mine.dump())) {
    for (const json& one : json::parse(text)) {
      const auto layer = one["layer"].get<std::int64_t>();
      if (one["counts"].get<bool>()) {
        result.tokens += one["tokens"].get<std::int64_t>();
        result.elsewhere += one["elsewhere"].get<std::int64_t>();
      }
      const double allowed = tolerance(layer);
      const double relative = difference_from_text(one["difference"].get<std::string>()).relative;
      const bool is_wrong = one["wrong"].get<std::int64_t>() > 0 || !(relative <= allowed);
      if (!is_wrong || (first >= 0 && layer >= first)) continue;
      first = layer;
      result.finding = finding_of(one, relative, rank, layout, allowed);
    }
    ++rank;
  }
  return result;
}

}  // namespace phalanx::verify
