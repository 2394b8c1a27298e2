#include "phalanx/verify/layout_check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/comm/backend.h"
#include "phalanx/train/model/float8_layers.h"
#include "phalanx/train/model/precision.h"
#include "phalanx/verify/document_probe.h"
#include "phalanx/verify/expert_load_check.h"
#include "phalanx/verify/layout_cause.h"
#include "phalanx/verify/layout_origin.h"
#include "phalanx/verify/layout_side.h"
#include "phalanx/verify/parameter_comparison.h"
#include "phalanx/verify/routing_check.h"

namespace phalanx::verify {
namespace {

using nlohmann::json;

constexpr const char* kNoSimpleCause =
    "no simple mistake explains it: look at what computes it, and at values that it depends on";
constexpr const char* kRightWhenRunAgain =
    "all is right when the step is run again: what is wrong differs from run to run, such as memory that is read "
    "before it is written, or after it was let go";

constexpr const char* kOnlyRecomputed =
    "; all that differs from the run that it is held against is recomputation: what is computed again is not what was "
    "computed, or leaves something behind that the next step uses";
constexpr const char* kUnlikePlain =
    "recomputation: the same layout without it has other bits. What is computed again is not what was computed, or "
    "leaves something behind that the next step uses, such as a copy of a weight";

constexpr int kMaxHalvings = 17;  // of the loss scale: from twice the usual one to 1
// If a row is cut over two ranks, three numbers are rounded instead of one: two sums and their sum. So the layout
// is up to three times as far from float32 as one rank, and up to four times as far from one rank.
constexpr double kRoundingOfBoth = 4;
constexpr double kRoundingOfWeights = 0x1p-23;  // two sides' results of one formula, on a device
// A gradient that is zero in theory is nothing but rounding, as that of GPT-2's key biases. So a gradient whose norm is
// below this part of the model's is compared with that part.
constexpr double kLeastOfModel = 1e-4;
constexpr double kLittleToSay = 0.5;  // of a gradient's norm: with so much rounding a wrong value may go unnoticed

at::Tensor gradient_of(const NamedTensor& parameter) { return parameter.tensor.grad(); }
at::Tensor weight_of(const NamedTensor& parameter) { return parameter.tensor.detach(); }

class Comparison {
 public:
  Comparison(const config::TrainConfig& config, const LayoutCheckContext& context, const LayoutCheckOptions& options)
      : options_(options),
        world_(context.world),
        device_(context.device),
        observer_(context.observer),
        on_one_rank_(reference_config(config, world_->size())),
        parallelized_(config, context.layout_world ? context.layout_world : world_, context.device) {
    const auto alone = world_->split(world_->rank(), 0);
    if (world_->rank() == 0) {
      reference_ = std::make_unique<LayoutSide>(on_one_rank_, alone, context.device);
      const auto narrow = train::sharded_param_dtype(config);
      if (narrow && config::plan_run(config, world_->size()).parallel.is_sharded())
        reference_->compute_in(config, *narrow);
    }
    result_.layout = parallelized_.model->layout();
    result_.tolerance = options.tolerance.value_or(tolerance_for(config, world_->size(), context.device));
    is_float8_ = config::uses_float8(config);
    couples_documents_ = is_float8_ && config.float8.recipe_name == "tensorwise";
    rounds_products_ = !options.tolerance && rounds_its_own_products(config, world_->size());
    scaled_ = train::scales_loss(config);
    if (reference_) reference_->observe_routing();
    parallelized_.observe_routing();
    if (context.prepare) context.prepare(parallelized_);
    parts_ = std::make_unique<ParameterComparison>(parallelized_, reference_.get(), *world_,
                                                   [this](const std::string& name) { fail_not_finite(name); });
    is_recomputed_ = config.activation_checkpoint.mode != "none";
    if (!is_recomputed_ || world_->size() == 1 || !device_.is_cpu() ||
        !world_->backend()->traits().rank_order_reduction)
      return;
    config::TrainConfig plain = config;
    plain.activation_checkpoint = {.mode = "none"};
    plain_ = std::make_unique<LayoutSide>(plain, world_, context.device);
    plain_->observe_routing();
  }

  LayoutCheck run() {
    check_initial_values();
    if (!result_.finding && parallelized_.data.dataloader->separates_documents()) check_documents();
    for (std::int64_t step = 1; step <= options_.steps && !result_.finding; ++step) one_step(step);
    if (result_.finding && is_recomputed_ && world_->size() == 1 && result_.finding->step > 0) {
      result_.finding->cause += kOnlyRecomputed;
    }
    return std::move(result_);
  }

 private:
  /// The largest difference from the same layout without recomputation, which must be none.
  std::optional<LayoutFinding> unlike_plain(std::int64_t step, const std::string& what, const ValueOf& value) {
    const std::vector<ParameterCheck> checks = parts_->compare_same_parts(plain_->model->parameters(), value);
    const auto relative = [](const ParameterCheck& check) { return check.difference.relative; };
    const auto worst = std::ranges::max_element(checks, {}, relative);
    if (worst->difference.relative == 0) return std::nullopt;
    const auto wrong = std::ranges::count_if(checks, [&](const ParameterCheck& check) { return relative(check) > 0; });
    return LayoutFinding{.step = step,
                         .what = what,
                         .parameter = worst->name,
                         .rank = worst->rank,
                         .difference = worst->difference,
                         .others = wrong - 1,
                         .cause = kUnlikePlain};
  }

  /// A difference made by recomputation is the finding, or the cause of what was found.
  void add_unlike_plain(std::optional<LayoutFinding> unlike) {
    if (!unlike) return;
    if (!result_.finding) {
      result_.finding = std::move(unlike);
    } else if (result_.finding->cause.starts_with(kNoSimpleCause) || result_.finding->cause.empty()) {
      result_.finding->cause = kUnlikePlain;
    } else {
      result_.finding->cause += fmt::format("; {}", kUnlikePlain);
    }
  }

  /// Of the parameters that differ by more than `tolerance`, finds the first one or, if `order` is known, the one that
  /// the forward pass uses last, because the backward pass comes to it first. Collective, for the likely cause.
  void find_wrong(std::int64_t step, const std::string& what, const std::vector<ParameterCheck>& checks,
                  double tolerance, const ValueOf& value, const std::vector<std::string>& order = {},
                  bool loss_is_right = true) {
    if (result_.finding) return;
    std::int64_t wrong = 0;
    std::size_t first = 0;
    std::ptrdiff_t place = -1;
    for (std::size_t i = 0; i < checks.size(); ++i) {
      if (checks[i].difference.unexplained() <= tolerance) continue;
      const auto used = std::ranges::find(order, checks[i].name);
      const std::ptrdiff_t here = used == order.end() ? -1 : used - order.begin();
      if (wrong++ > 0 && here <= place) continue;
      first = i;
      place = here;
    }
    if (wrong == 0) return;
    const ParameterCheck& worst = checks[first];
    result_.finding = LayoutFinding{.step = step,
                                    .what = what,
                                    .parameter = worst.name,
                                    .rank = worst.rank,
                                    .difference = worst.difference,
                                    .tolerance = tolerance + worst.difference.explained,
                                    .others = wrong - 1};
    const at::Tensor zeros = at::zeros(parts_->shape(first), at::TensorOptions(at::kFloat));
    const at::Tensor expected = parts_->send(first, value);
    const at::Tensor before = what == "gradient" ? send_before(first) : at::Tensor();
    SuspectValue suspect;
    if (const NamedTensor* const here = parts_->here(first)) {
      const at::Tensor found = value(*here);
      const Shard* const shard = here->shard.get();
      suspect = suspect_part(found.defined() ? found : part_of(zeros, shard),
                             (expected.defined() ? expected : zeros).to(at::kDouble), before, shard);
    }
    result_.finding->cause = likely_cause(suspect, parallelized_.model->mesh(), *world_, worst.rank);
    if (!result_.finding->cause.empty()) return;
    result_.finding->cause = kNoSimpleCause;
    if (place >= 0 && loss_is_right) {
      result_.finding->cause +=
          ". The forward pass is right, and so are the gradients of what it uses after this one: look at what the "
          "backward pass hands to it";
    } else if (place >= 0) {
      result_.finding->cause += ". The loss is wrong, too, but what every layer is given is right: look at the loss";
    }
  }

  /// If the forward pass is already wrong, all gradients are wrong: then the start of the error is the finding.
  void find_wrong_gradients(const StepCheck& check, double tolerance) {
    const std::int64_t step = check.step;
    const std::vector<ParameterCheck>& checks = check.gradients;
    const auto is_wrong = [&](const ParameterCheck& p) { return p.difference.unexplained() > tolerance; };
    if (std::ranges::none_of(checks, is_wrong)) return;
    std::map<const void*, at::Tensor> gradients;  // saved, because find_origin() loses them
    std::map<std::string, at::Tensor> weights_before;
    const auto save = [&](const NamedTensor& p) {
      gradients[p.tensor.unsafeGetTensorImpl()] = p.tensor.grad().defined() ? p.tensor.grad().clone() : at::Tensor();
    };
    for (const NamedTensor& mine : parallelized_.model->parameters()) save(mine);
    for (std::size_t i = 0; reference_ && i < parts_->names().size(); ++i) {
      save(reference_->model->parameters()[i]);
      if (!weights_older_.empty()) weights_before[parts_->names()[i]] = weights_older_[i];
    }
    const LayoutTolerance& allowed = result_.tolerance;
    LayoutPath path;
    {
      const at::AutoGradMode with_gradients(true);
      path = find_origin(parallelized_, reference_.get(), *world_,
                         {.step = step - 1,
                          .weight_tolerance = allowed.weight_in_use,
                          .activation_tolerance = allowed.activation,
                          .weights_before = std::move(weights_before)});
    }
    const ValueOf saved = [&](const NamedTensor& p) { return gradients.at(p.tensor.unsafeGetTensorImpl()); };
    const bool loss_is_right =
        std::abs(check.loss - check.expected_loss) <= allowed.loss * std::abs(check.expected_loss);
    find_wrong(step, "gradient", checks, tolerance, saved, path.parameters, loss_is_right);
    if (!path.origin) {
      if (std::ranges::none_of(compare_gradients(), is_wrong)) {
        result_.finding->cause = kRightWhenRunAgain;
      }
      return;
    }
    const LayoutOrigin& origin = *path.origin;
    result_.finding = LayoutFinding{.step = step,
                                    .what = origin.what,
                                    .parameter = origin.parameter,
                                    .rank = origin.rank,
                                    .difference = origin.difference,
                                    .tolerance = origin.tolerance,
                                    .others = result_.finding->others + 1,
                                    .cause = origin.cause.empty() ? kNoSimpleCause : origin.cause};
  }

  /// The reference's gradient at the previous step, as `keep` saved it.
  at::Tensor send_before(std::size_t index) {
    const auto& kept = gradients_before_;
    const at::Tensor before =
        parts_->send(index, [&](const NamedTensor&) { return index < kept.size() ? kept[index] : at::Tensor(); });
    return before.defined() ? before.to(at::kDouble) : before;
  }

  void keep(std::vector<at::Tensor>& kept, const ValueOf& value) const {
    kept.clear();
    for (const NamedTensor& p : reference_->model->parameters()) {
      const at::Tensor whole = value(p);
      kept.push_back(whole.defined() ? whole.detach().to(at::kCPU, at::kFloat).clone() : at::Tensor());
    }
  }

  void find_wrong_number(std::int64_t step, const std::string& what, double expected, double found, double tolerance,
                         const std::string& cause) {
    const double relative = std::abs(found - expected) / std::max(std::abs(expected), 1e-30);
    if (result_.finding || relative <= tolerance) return;
    result_.finding = LayoutFinding{
        .step = step,
        .what = what,
        .difference = {.relative = std::isnan(relative) ? std::numeric_limits<double>::infinity() : relative,
                       .largest = std::abs(found - expected),
                       .found = found,
                       .expected = expected},
        .tolerance = tolerance,
        .cause = cause};
  }

  /// Called on every rank.
  [[noreturn]] static void fail_diverged(const std::string& what) {
    throw Error(
        fmt::format("verify: on one rank {}: there is nothing to compare a layout with; try a lower [optimizer] lr "
                    "or fewer steps",
                    what));
  }

  [[noreturn]] void fail_not_finite(const std::string& name) const {
    if (!scaled_) fail_diverged(fmt::format("'{}' is not finite", name));
    throw Error(
        fmt::format("verify: step {}: on one rank the scaled gradient of '{}' is not finite in float16, so the step is "
                    "skipped and there is nothing to compare a layout with: try a lower [training] initial_loss_scale, "
                    "below {:.3g}, or bfloat16",
                    result_.steps.size() + 1, name, parallelized_.optimizer_step->loss_scale()));
  }

  double from_first(double value) {
    const at::Tensor number = at::zeros({1}, at::TensorOptions(at::kDouble));
    if (world_->rank() == 0) number.fill_(value);
    world_->broadcast(number).wait();
    return number.item<double>();
  }

  double mean_over_ranks(double value) {
    const at::Tensor number = at::zeros({1}, at::TensorOptions(at::kDouble)).fill_(value);
    world_->all_reduce(number, {.op = ReduceOp::avg}).wait();
    return number.item<double>();
  }

  /// For float16: the first parameter whose gradient is not finite, and where. The same on every rank.
  std::string overflow() {
    const std::string on_one = world_->broadcast_bytes(reference_ ? reference_->first_not_finite() : "");
    if (!on_one.empty()) return fmt::format("'{}' on one rank", on_one);
    int rank = 0;
    for (const std::string& name : world_->all_gather_bytes(parallelized_.first_not_finite())) {
      if (!name.empty()) return fmt::format("'{}' on rank {}", name, rank);
      ++rank;
    }
    return "";
  }

  void scale_loss(double factor) {
    for (LayoutSide* const side : {&parallelized_, reference_.get(), plain_.get()}) {
      if (side == nullptr) continue;
      side->drop_gradients();
      side->scale_loss(factor);
    }
  }

  /// Writes both losses to `check`; returns the loss without recomputation, if there is one. If float16 overflows on
  /// either side, the step is run again with half the loss scale on all sides, as a run would do. If no loss scale
  /// helps, it is not an overflow: the step is compared as it was.
  double forward_backward(StepCheck& check) {
    double plain_loss = 0;
    const double first_scale = parallelized_.optimizer_step->loss_scale();
    const std::size_t notes = result_.notes.size();
    for (int halvings = 0;; ++halvings) {
      if (reference_ && reference_->routing()) reference_->routing()->record();
      if (reference_) check.expected_loss = reference_->forward_backward(check.step - 1);
      check.expected_loss = from_first(check.expected_loss);
      replay_routing();
      if (!std::isfinite(check.expected_loss)) {
        fail_diverged(fmt::format("the loss of step {} is not finite", check.step));
      }
      check.loss = mean_over_ranks(parallelized_.forward_backward(check.step - 1));
      if (plain_) plain_loss = mean_over_ranks(plain_->forward_backward(check.step - 1));
      if (!scaled_ || halvings > kMaxHalvings) return plain_loss;
      const std::string where = overflow();
      if (where.empty()) return plain_loss;
      const double scale = parallelized_.optimizer_step->loss_scale();
      if (halvings == kMaxHalvings) {
        result_.notes.resize(notes);
        result_.notes.push_back(fmt::format(
            "step {}: the gradient of {} is not finite with the loss scaled by {}, nor by anything down to {}",
            check.step, where, first_scale, scale));
        scale_loss(first_scale / scale);
        continue;
      }
      result_.notes.push_back(
          fmt::format("step {}: float16 overflow: the gradient of {} is not finite with the loss scaled by {}. A run "
                      "skips such a step and halves the scale; so it is compared with {}, where [training] "
                      "initial_loss_scale may begin",
                      check.step, where, scale, scale / 2));
      scale_loss(0.5);
    }
  }

  /// The effect of rounding to 16 bits alone on this step on one rank; known to all ranks.
  void measure_rounding(const StepCheck& check) {
    if (!rounds_products_) return;
    json told;
    if (reference_) {
      const LayoutSide::Rounding rounding = reference_->rounding_of_gradients(check.step - 1, check.expected_loss);
      told = {{"loss", rounding.loss}, {"gradients", rounding.gradients}, {"routers", rounding.routers}};
    }
    told = json::parse(world_->broadcast_bytes(told.dump()));
    rounding_ = {.loss = told["loss"], .gradients = told["gradients"], .routers = told["routers"]};
    const auto most = std::ranges::max_element(rounding_.gradients);
    if (most == rounding_.gradients.end() || kRoundingOfBoth * *most < kLittleToSay) return;
    result_.notes.push_back(
        fmt::format("step {}: rounding to {} alone changes the gradient of '{}' on one rank by {:.2g} of its "
                    "norm, so this step "
                    "says little of it: a lower [optimizer] lr, fewer steps or float32 say more",
                    check.step, is_float8_ ? "float8" : "16 bits",
                    parts_->names()[static_cast<std::size_t>(most - rounding_.gradients.begin())], *most));
  }

  double beside_rounding(double tolerance, double rounding) const {
    return std::max(0.0, kRoundingOfBoth * rounding - tolerance);
  }
  Explain rounding_of_products() const {
    return [this](std::size_t index, double) {
      return rounding_.gradients.empty() ? 0 : beside_rounding(result_.tolerance.gradient, rounding_.gradients[index]);
    };
  }

  /// Collective.
  std::vector<ParameterCheck> compare_gradients() {
    double squares = 0;
    for (std::size_t i = 0; reference_ && i < parts_->names().size(); ++i) {
      const at::Tensor& gradient = reference_->model->parameters()[i].tensor.grad();
      if (!gradient.defined()) continue;
      const double norm = gradient.to(at::kCPU, at::kDouble).norm().item<double>();
      if (std::isfinite(norm)) squares += norm * norm;
    }
    return parts_->compare(gradient_of, rounding_of_products(), kLeastOfModel * from_first(std::sqrt(squares)));
  }

  void observe(std::int64_t step) const {
    if (observer_) observer_(step, parallelized_.model->parameters());
  }

  void check_initial_values() {
    observe(0);
    const at::NoGradGuard no_grad;
    find_wrong(0, "initial value", parts_->compare(weight_of), 0, weight_of);
    if (reference_) keep(weights_before_, weight_of);
    keep_before_update();
  }

  /// Of both sides, on this rank. At the end of a step, so that a weight that anything else than the optimizer changes
  /// before the next one is found, too.
  void keep_before_update() {
    for (LayoutSide* const side : {&parallelized_, reference_.get()}) {
      if (side == nullptr) continue;
      for (const NamedTensor& p : side->model->parameters()) {
        before_update_[p.tensor.unsafeGetTensorImpl()] =
            p.tensor.detach().to(at::kCPU, p.tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
      }
    }
  }

  /// Of this rank's part.
  double norm_of_weight(std::size_t index) const {
    const NamedTensor* const part = parts_->here(index);
    return part == nullptr ? 0 : part->tensor.detach().to(at::kCPU, at::kDouble).norm().item<double>();
  }

  /// Tensorwise scales are of all documents of a micro-batch, so each token changes the rounding of all others.
  DocumentProbe probe_without_shared_scales() {
    if (!couples_documents_) return probe_documents(parallelized_);
    result_.notes.push_back(
        "whether documents see each other was looked at without float8: tensorwise scales are those of all documents "
        "of a "
        "micro-batch, so a token of one changes how another is rounded");
    const train::WithoutFloat8 without(parallelized_.modules());
    return probe_documents(parallelized_);
  }

  /// No document sees another one.
  void check_documents() {
    const DocumentProbe mine = probe_without_shared_scales();
    json told = {{"compared", mine.compared}};
    if (mine.leak) {
      told["leak"] = {{"before", mine.leak->before}, {"after", mine.leak->after}, {"text", mine.leak->text()}};
    }
    int rank = 0;
    result_.documents_compared = 0;
    for (const std::string& text : world_->all_gather_bytes(told.dump())) {
      const json found = json::parse(text);
      *result_.documents_compared += found.at("compared").get<std::int64_t>();
      if (found.contains("leak") && !result_.finding) {
        const json& leak = found["leak"];
        const double before = leak["before"], after = leak["after"];
        result_.finding = LayoutFinding{.what = "loss of another document",
                                        .rank = rank,
                                        .difference = {.relative = std::abs(after - before) / std::abs(before),
                                                       .largest = std::abs(after - before),
                                                       .found = after,
                                                       .expected = before},
                                        .cause = leak["text"]};
      }
      ++rank;
    }
    if (*result_.documents_compared > 0) return;
    result_.notes.push_back(
        "no sequence of the first batch holds two documents with labels: whether documents see each other was not "
        "looked at; shorter documents, or longer sequences, say it");
  }

  /// All sides send tokens where the reference has sent them.
  void replay_routing() {
    if (!parallelized_.routing()) return;
    const auto table = share_routing(reference_ ? reference_->routing() : nullptr, *world_);
    for (LayoutSide* const side : {&parallelized_, reference_.get(), plain_.get()}) {
      if (side != nullptr) side->routing()->replay(table);
    }
  }
  void check_routing(std::int64_t step) {
    if (!parallelized_.routing()) return;
    const double allowed = result_.tolerance.activation;
    RoutingCheck found = compare_routing(parallelized_, *world_, [&](std::int64_t layer) {
      const auto rounding = rounding_.routers.find(layer);
      return allowed + (rounding == rounding_.routers.end() ? 0 : beside_rounding(allowed, rounding->second));
    });
    if (found.elsewhere > 0) {
      result_.notes.push_back(fmt::format(
          "step {}: rounding alone would have sent {} of {} tokens to other experts than on one rank, all of them near "
          "ties; they went where one rank sends them",
          step, found.elsewhere, found.tokens));
    }
    if (!found.finding) return;
    found.finding->step = step;
    result_.finding = std::move(found.finding);
  }
  void check_expert_biases(std::int64_t step) {
    const auto& load = parallelized_.model->expert_load();
    if (!load) return;
    auto found = compare_expert_biases(*load, reference_ ? reference_->model->expert_load().get() : nullptr, *world_);
    if (!found || result_.finding) return;
    found->step = step;
    result_.finding = std::move(found);
  }

  void one_step(std::int64_t step) {
    const LayoutTolerance& allowed = result_.tolerance;
    StepCheck check{.step = step};
    const double plain_loss = forward_backward(check);
    observe(step);
    measure_rounding(check);
    std::optional<LayoutFinding> unlike;
    if (plain_) {
      const at::NoGradGuard no_grad;
      unlike = unlike_plain(step, "gradient", gradient_of);
    }
    {
      const at::NoGradGuard no_grad;
      check.gradients = compare_gradients();
      find_wrong_gradients(check, allowed.gradient);
      if (reference_ && !result_.finding) keep(gradients_before_, gradient_of);
    }
    if (!result_.finding) check_routing(step);
    find_wrong_number(step, "loss", check.expected_loss, check.loss,
                      allowed.loss + beside_rounding(allowed.loss, rounding_.loss),
                      "the gradients are right: the losses of the ranks are not put together as they should be");
    add_unlike_plain(std::move(unlike));
    if (plain_) find_wrong_number(step, "loss", plain_loss, check.loss, 0, kUnlikePlain);
    if (result_.finding) {
      result_.steps.push_back(std::move(check));
      return;
    }
    {
      const at::NoGradGuard no_grad;
      parts_->take_gradients_of_layout();
    }
    if (reference_) check.expected_norm = reference_->optimizer_step->apply(step - 1).grad_norm;
    check.expected_norm = from_first(check.expected_norm);
    check.norm = parallelized_.optimizer_step->apply(step - 1).grad_norm;
    if (plain_) plain_->optimizer_step->apply(step - 1);
    {
      const at::NoGradGuard no_grad;
      const ValueOf update_of = [this](const NamedTensor& p) {
        const at::Tensor now = p.tensor.detach().to(at::kCPU, at::kDouble);
        return (now - before_update_.at(p.tensor.unsafeGetTensorImpl())).to(at::kFloat);  // as it is sent
      };
      check.updates = parts_->compare(update_of, [&](std::size_t i, double norm) {
        return device_.is_cpu() ? 0 : kRoundingOfWeights * norm_of_weight(i) / norm;
      });
      find_wrong_number(step, "gradient norm", check.expected_norm, check.norm, allowed.update,
                        "the gradients are right: the norm counts some of them twice, or not at all");
      find_wrong(step, "update", check.updates, allowed.update, update_of);
      check_expert_biases(step);
      if (plain_) add_unlike_plain(unlike_plain(step, "weight", weight_of));
      parts_->take_weights_of_layout();
      weights_older_ = weights_before_;
      if (reference_) keep(weights_before_, weight_of);
      keep_before_update();
    }
    result_.steps.push_back(std::move(check));
  }

  LayoutCheckOptions options_;
  std::shared_ptr<Communicator> world_;
  at::Device device_;
  std::function<void(std::int64_t, const std::vector<NamedTensor>&)> observer_;
  config::TrainConfig on_one_rank_;  // before the layout is built: what no run on one rank computes is refused first
  LayoutSide parallelized_;
  std::unique_ptr<LayoutSide> reference_;  // on rank 0
  std::unique_ptr<LayoutSide> plain_;      // the layout without recomputation, if the bits must be the same
  bool is_recomputed_ = false, scaled_ = false, rounds_products_ = false, is_float8_ = false;
  bool couples_documents_ = false;
  std::unique_ptr<ParameterComparison> parts_;
  LayoutSide::Rounding rounding_;  // of the step; nothing if the layout's products are those of one rank
  std::map<const void*, at::Tensor> before_update_;  // weights of both sides, by their tensors
  std::vector<at::Tensor> gradients_before_, weights_before_, weights_older_;  // on rank 0: the reference's
  LayoutCheck result_;
};

}  // namespace

LayoutCheck check_layout(const config::TrainConfig& config, const LayoutCheckContext& context,
                         const LayoutCheckOptions& options) {
  config::TrainConfig parallelized = config;
  parallelized.validation.enable = false;
  parallelized.checkpoint.enable = false;
  // Both sides have the same global batch, even if the configuration derives it from the number of ranks.
  parallelized.training.global_batch_size = config::plan_run(parallelized, context.world->size()).global_batch_size;
  return Comparison(parallelized, context, options).run();
}

}  // namespace phalanx::verify
