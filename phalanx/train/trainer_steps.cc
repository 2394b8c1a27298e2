// The steps of a run: one step, its numbers, and what is done with them.
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/log.h"
#include "phalanx/base/process_stats.h"
#include "phalanx/parallel/replica_check.h"
#include "phalanx/report/log_line.h"
#include "phalanx/train/forward_backward_step.h"
#include "phalanx/train/model/precision.h"
#include "phalanx/train/ranks/exchange_step_metrics.h"
#include "phalanx/train/trainer.h"

namespace phalanx::train {
namespace {

using Clock = std::chrono::steady_clock;
using observe::TraceSpan;

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Of a rank with `labels` of the `global_labels` by which its part of the loss was divided; NaN without labels.
double mean_loss(double part, std::int64_t labels, std::int64_t global_labels) {
  return part * static_cast<double>(global_labels) / static_cast<double>(labels);
}

using PreferenceSums = std::array<double, PreferenceLoss::kSums>;

/// On the CPU.
PreferenceSums preference_sums(const at::Tensor& sums) {
  PreferenceSums all = {};
  if (sums.defined()) std::copy_n(sums.const_data_ptr<double>(), all.size(), all.begin());
  return all;
}

std::optional<report::StepReport::Preferences> shown(const std::optional<PreferenceMetrics>& metrics) {
  if (!metrics) return std::nullopt;
  return report::StepReport::Preferences{.margin = metrics->margin(), .accuracy = metrics->accuracy};
}

std::string number_text(double value) { return std::isnan(value) ? "nan" : fmt::format("{:.5g}", value); }

}  // namespace

struct Trainer::StepOutcome {
  std::int64_t step = 0;  // counted from 1
  GlobalStepMetrics totals;
  OptimizerStep::Result optimizer_step;
  double seconds = 0;
  ExpertLoadNumbers expert_load;  // of a logged step
};

void Trainer::begin_timing() {
  comm_timer_->take();
  timed_until_ = Clock::now();
}

bool Trainer::validates_after(std::int64_t step) const {
  return data_.validator && (step == config_.training.steps || step % config_.validation.freq == 0);
}

bool Trainer::saves_after(std::int64_t step) const {
  return step == config_.training.steps || step % config_.checkpoint.interval == 0;
}

// On a device a step's numbers are read when the next step is queued, so that the device never waits for the host.
bool Trainer::do_step() {
  if (!optimizer_step_->is_on_device()) return end_step(train_step(step_++));
  QueuedStep next = queue_step(step_++);
  bool stop = false;
  if (queued_) stop = end_step(await_step(*queued_, /*is_last_queued=*/false));
  queued_.emplace(std::move(next));
  // The first step's numbers are read at once: a run that cannot work says so early.
  if (stop || !has_ended_a_step_ || validates_after(step_) || saves_after(step_) || profiler_.writes_after(step_)) {
    stop = end_step(await_step(*queued_, /*is_last_queued=*/true)) || stop;
    queued_.reset();
  }
  return stop;
}

ForwardBackwardResult Trainer::compute_gradients(std::int64_t step) {
  return forward_backward_step(*model_, *optimizer_step_, *data_.dataloader,
                               {.plan = plan_,
                                .rank = context_.world->rank(),
                                .device = context_.device,
                                .autocast = autocast_dtype(config_, plan_),
                                .profiler = &profiler_,
                                .reference = data_.reference},
                               step);
}

GlobalStepMetrics Trainer::exchange(const RankStepMetrics& of_rank, const observe::CommunicationTime& comm,
                                    Communicator& group) {
  RankStepMetrics mine = of_rank;
  const double cpu_now = process_cpu_seconds();
  mine.should_stop = context_.stop_requested && context_.stop_requested();
  mine.save_ended = checkpoints_.has_ended_save();
  mine.memory_gib = static_cast<double>(peak_device_bytes(context_.device)) / kGiB;
  mine.cpu_seconds = cpu_now - std::exchange(last_cpu_seconds_, cpu_now);
  mine.comm_seconds = comm.busy_seconds;
  mine.exposed_seconds = comm.waited_seconds;
  const TraceSpan span(profiler_.recorder(), "step metrics", "comm");
  return exchange_step_metrics(mine, group, plan_.parallel.loss_parts());
}

Trainer::StepOutcome Trainer::train_step(std::int64_t step) {
  const auto begin = Clock::now();
  StepOutcome outcome{.step = step + 1};
  const ForwardBackwardResult pass = compute_gradients(step);
  observe::CommunicationTime comm = std::exchange(comm_carry_, {});
  comm += comm_timer_->take();
  const auto told = Clock::now();
  const auto loss = pass.loss.item<double>();
  outcome.totals = exchange({.loss = loss,
                             .mean_loss = mean_loss(loss, pass.label_count, pass.global_label_count),
                             .label_count = pass.label_count,
                             .pairs = pass.pairs,
                             .preferences = preference_sums(pass.preference_sums),
                             .data_seconds = pass.data_seconds,
                             .wall_seconds = std::chrono::duration<double>(told - begin).count() + tail_seconds_},
                            comm, *context_.world);
  require_label_count(outcome, pass.global_label_count);
  require_finite_loss(outcome);
  check_replicas_before(step);
  outcome.optimizer_step = optimizer_step_->apply(step, profiler_.recorder());
  if (const ExpertLoad* const load = logged_expert_load(outcome.step)) {
    const at::Tensor counts = load->for_readback();
    outcome.expert_load =
        load->numbers_of({counts.const_data_ptr<double>(), counts.const_data_ptr<double>() + counts.numel()});
  }
  require_finite_norm(outcome);
  outcome.seconds = seconds_since(begin);
  comm_carry_ = comm_timer_->take();
  tail_seconds_ = seconds_since(told);
  return outcome;
}

Trainer::QueuedStep Trainer::queue_step(std::int64_t step) {
  const ForwardBackwardResult pass = compute_gradients(step);
  check_replicas_before(step);
  at::Tensor numbers = optimizer_step_->queue(step, pass.loss, profiler_.recorder());
  // In one copy, so that the host waits once.
  if (pass.preference_sums.defined()) numbers = at::cat({numbers, pass.preference_sums});
  QueuedStep queued{.step = step,
                    .data_seconds = pass.data_seconds,
                    .label_count = pass.label_count,
                    .global_label_count = pass.global_label_count,
                    .pairs = pass.pairs,
                    .numbers = DeviceReadback(numbers),
                    .has_preferences = pass.preference_sums.defined()};
  if (const ExpertLoad* const load = logged_expert_load(step + 1)) {
    queued.expert_counts.emplace(load->for_readback());
  }
  return queued;
}

bool Trainer::logs(std::int64_t step) const {
  return step == 1 || step % config_.metrics.log_freq == 0 || step == config_.training.steps;
}

const ExpertLoad* Trainer::logged_expert_load(std::int64_t step) const {
  ExpertLoad* const load = model_->expert_load().get();
  if (load == nullptr || !logs(step)) return nullptr;
  load->sum();
  return load;
}

// A step takes from the end of the step before to its own end, as the host sees them. So the steps between two log
// lines together take the time between the lines.
Trainer::StepOutcome Trainer::await_step(const QueuedStep& queued, bool is_last_queued) {
  StepOutcome outcome{.step = queued.step + 1};
  std::vector<double> numbers = queued.numbers.read();
  PreferenceSums preferences = {};
  if (queued.has_preferences) {
    std::copy(numbers.end() - std::ssize(preferences), numbers.end(), preferences.begin());
    numbers.resize(numbers.size() - preferences.size());
  }
  const auto now = Clock::now();
  outcome.seconds = std::chrono::duration<double>(now - std::exchange(timed_until_, now)).count();
  if (queued.expert_counts) {
    outcome.expert_load = model_->expert_load()->numbers_of(queued.expert_counts->read());
  }
  const double loss = OptimizerStep::loss_of(numbers);
  outcome.totals = exchange({.loss = loss,
                             .mean_loss = mean_loss(loss, queued.label_count, queued.global_label_count),
                             .label_count = queued.label_count,
                             .pairs = queued.pairs,
                             .preferences = preferences,
                             .data_seconds = queued.data_seconds,
                             .wall_seconds = outcome.seconds},
                            comm_timer_->take(), metrics_group_ && !is_last_queued ? *metrics_group_ : *context_.world);
  // Numbers may be garbage because the ranks' operations did not match. That is an error of the world, then.
  if (!std::isfinite(outcome.totals.loss) || !OptimizerStep::has_stepped(numbers)) context_.world->barrier();
  require_label_count(outcome, queued.global_label_count);
  require_finite_loss(outcome);
  outcome.optimizer_step = optimizer_step_->result_of(numbers);
  require_finite_norm(outcome);
  return outcome;
}

bool Trainer::end_step(const StepOutcome& outcome) {
  result_.step = outcome.step;
  result_.loss = outcome.totals.loss;
  interval_seconds_ += outcome.seconds;
  interval_wall_ += mean_of(outcome.totals.wall_seconds);
  interval_comm_ += mean_of(outcome.totals.comm_seconds);
  interval_exposed_ += mean_of(outcome.totals.exposed_seconds);
  interval_tokens_ += plan_.global_batch_size * config_.training.seq_len;
  interval_flops_ += flops_of(outcome);
  if (metrics_logger_) log_step(outcome);
  if (outcome.totals.save_ended) checkpoints_.finish();  // a failed save ends the run here
  if (!std::exchange(has_ended_a_step_, true)) context_.world->mark_started();
  return outcome.totals.stop;
}

// The loss was divided by the number that every rank has computed for itself.
void Trainer::require_label_count(const StepOutcome& outcome, std::int64_t expected) {
  if (outcome.totals.label_count == expected) return;
  throw Error(
      fmt::format("step {}: the ranks have read {} tokens with a label, or pairs, and divided the loss by {}: their "
                  "data are not what the step's number says; "
                  "expected the same files on all ranks",
                  outcome.step, outcome.totals.label_count, expected));
}

void Trainer::require_finite_loss(const StepOutcome& outcome) const {
  const double loss = outcome.totals.loss;
  if (!std::isfinite(loss)) fail_not_finite(outcome.step, "loss", loss, loss);
}

void Trainer::require_finite_norm(const StepOutcome& outcome) const {
  const OptimizerStep::Result& result = outcome.optimizer_step;
  if (result.stepped || result.loss_scale) return;
  fail_not_finite(outcome.step, "gradient norm", result.grad_norm, outcome.totals.loss);
}

// Before the optimizer step, copies of tied weights are still those that this step was computed with.
void Trainer::check_replicas_before(std::int64_t step) {
  const std::int64_t freq = config_.debug.replica_check_freq;
  if (freq == 0 || (step + 1) % freq != 0) return;
  const TraceSpan span(profiler_.recorder(), "replica check", "comm");
  TrainState state;
  optimizer_step_->collect_state(state);
  const auto weights = with_prefix("model.", model_->with_expert_biases(model_->replicated_weights()));
  state.tensors.insert(state.tensors.end(), weights.begin(), weights.end());
  const std::size_t compared =
      check_replicas(state.tensors, *context_.world, fmt::format("before the update of step {}", step + 1));
  if (compared == 0 && !said_no_replicas_) {
    log::warn_once(
        "[debug] replica_check_freq: in this layout no two ranks hold the same part of anything, so the check "
        "compares nothing");
    said_no_replicas_ = true;
  }
}

void Trainer::fail_not_finite(std::int64_t step, const std::string& what, double value, double loss) const {
  throw Error(fmt::format(
      "step {}: the {} is {} (loss {}, learning rate {:.3g}): the weights were not changed by it; {}", step, what,
      number_text(value), number_text(loss), optimizer_step_->lr_at(step - 1), advice_on_divergence()));
}

std::string Trainer::advice_on_divergence() const {
  return fmt::format("try a lower [optimizer] lr, a longer warm-up or a smaller max_norm{}",
                     checkpoints_.saved_step() >= 0
                         ? fmt::format("; the last checkpoint is of step {}", checkpoints_.saved_step())
                         : "");
}

double Trainer::flops_of(const StepOutcome& outcome) const {
  const auto tokens = static_cast<double>(plan_.global_batch_size * config_.training.seq_len);
  return tokens * flops_.per_token(outcome.totals.pairs / tokens);
}

void Trainer::log_step(const StepOutcome& outcome) {
  const std::int64_t step = outcome.step;
  const double device_tokens =
      static_cast<double>(plan_.global_batch_size * config_.training.seq_len) / static_cast<double>(plan_.world_size);
  const bool to_log = logs(step);
  StepMetrics metrics{.step = step,
                      .loss = outcome.totals.loss,
                      .max_loss = outcome.totals.max_loss,
                      .grad_norm = outcome.optimizer_step.grad_norm,
                      .lr = optimizer_step_->lr_at(step - 1),
                      .seconds = outcome.seconds,
                      .data_seconds = outcome.totals.data_seconds,
                      .tokens = plan_.global_batch_size * config_.training.seq_len,
                      .tps = device_tokens / outcome.seconds,
                      .memory_gib = outcome.totals.memory_gib,
                      .cpu_seconds = outcome.totals.cpu_seconds};
  if (plan_.world_size > 1) {
    metrics.comm_seconds = outcome.totals.comm_seconds;
    metrics.exposed_seconds = outcome.totals.exposed_seconds;
    metrics.exposed_percent = 100.0 * mean_of(metrics.exposed_seconds) / mean_of(outcome.totals.wall_seconds);
  }
  metrics.sets = data_.dataloader->progress_at(step);
  if (data_.reference.defined()) metrics.preferences = PreferenceLoss::metrics_of(outcome.totals.preferences.data());
  metrics.expert_load = outcome.expert_load.fullest;
  metrics.expert_dropped = outcome.expert_load.dropped;
  metrics.loss_scale = outcome.optimizer_step.loss_scale;
  metrics.skipped = !outcome.optimizer_step.stepped;
  metrics.tflops = flops_of(outcome) / static_cast<double>(plan_.world_size) / outcome.seconds / 1e12;
  if (peak_tflops_) metrics.mfu_percent = 100.0 * metrics.tflops / *peak_tflops_;
  metrics_logger_->write_step(metrics, to_log);
  if (metrics.skipped) {
    log_info(fmt::format(
        "step {} is skipped on all ranks: gradients are not finite with the loss scaled by {}; it is scaled "
        "by {} from now on",
        step, *outcome.optimizer_step.loss_scale, *outcome.optimizer_step.next_loss_scale));
  }
  if (!to_log) return;

  // The speed in a log line is that of all steps since the previous line.
  const double tps = static_cast<double>(interval_tokens_) / plan_.world_size / interval_seconds_;
  const double tflops = interval_flops_ / plan_.world_size / interval_seconds_ / 1e12;
  const double memory = outcome.totals.memory_gib[0];
  std::optional<report::StepReport::Exposed> exposed;
  if (plan_.world_size > 1) {
    exposed = report::StepReport::Exposed{
        .of_step = 100.0 * interval_exposed_ / interval_wall_,
        .of_communication = interval_comm_ > 0 ? 100.0 * interval_exposed_ / interval_comm_ : 0};
  }
  log_info(report::step_line(
      {.step = step,
       .loss = outcome.totals.loss,
       .grad_norm = outcome.optimizer_step.grad_norm,
       .memory_gib = memory,
       .memory_percent = device_.total_bytes ? 100.0 * memory * kGiB / static_cast<double>(device_.total_bytes) : 0,
       .tokens_per_second = tps,
       .tflops = tflops,
       .mfu_percent = peak_tflops_ ? std::optional(100.0 * tflops / *peak_tflops_) : std::nullopt,
       .loss_scale = outcome.optimizer_step.loss_scale,
       .exposed = exposed,
       .preferences = shown(metrics.preferences),
       .expert_load = metrics.expert_load.empty() ? std::nullopt : std::optional(std::ranges::max(metrics.expert_load)),
       .expert_dropped = metrics.expert_dropped}));
  interval_seconds_ = interval_wall_ = interval_comm_ = interval_exposed_ = 0;
  interval_tokens_ = 0;
  interval_flops_ = 0;
}

// Collective. If any rank was asked to stop, all ranks stop.
bool Trainer::any_asked_to_stop() const {
  if (!context_.stop_requested) return false;
  const at::Tensor asked = at::full({1}, context_.stop_requested() ? 1 : 0, at::kInt);
  context_.world->all_reduce(asked, {.op = ReduceOp::max});
  return asked.const_data_ptr<int>()[0] != 0;
}

bool Trainer::validate(bool is_asked_to_stop) {
  const TraceSpan span(profiler_.recorder(), "validation", "validation");
  std::optional<ValidationMetrics> whole;
  if (!is_asked_to_stop) {
    with_averages(config_.ema.use_in_validation, [&] {
      whole = data_.validator->run(*model_, *context_.world, step_, [this] { return any_asked_to_stop(); });
    });
  }
  if (!whole) {
    log_info(fmt::format("the validation of step {} is left out: the run was asked to stop", step_));
    return false;
  }
  const ValidationMetrics& metrics = *whole;
  result_.validation_loss = metrics.loss;
  if (!metrics_logger_) return true;
  metrics_logger_->write_validation(metrics);
  const double memory = static_cast<double>(peak_device_bytes(context_.device));
  log_info(report::validation_line(
      {.step = step_,
       .loss = metrics.loss,
       .memory_gib = memory / kGiB,
       .memory_percent = device_.total_bytes ? 100.0 * memory / static_cast<double>(device_.total_bytes) : 0,
       .tokens_per_second = static_cast<double>(metrics.tokens) / plan_.world_size / metrics.seconds,
       .preferences = shown(metrics.preferences)}));
  for (const ValidationMetrics::Set& set : metrics.sets) {
    log_info(fmt::format("validate step: {}  '{}': loss: {:.5f}  tokens: {}", step_, set.name, set.loss,
                         with_commas(set.tokens)));
  }
  return true;
}

}  // namespace phalanx::train
