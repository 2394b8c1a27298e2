#include "phalanx/parallel/pipeline/pipeline_runtime.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <utility>

#include "phalanx/base/assert.h"
#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/comm/backend.h"
#include "phalanx/parallel/pipeline/stage_gradients.h"
#include "phalanx/parallel/pipeline/stage_p2p.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/deadlock_check.h"
#include "phalanx/schedule/posting.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/transfers.h"
#include "phalanx/schedule/validate.h"

namespace phalanx {
namespace {

using schedule::Action;
using schedule::ActionKind;
using schedule::Schedule;
using Clock = std::chrono::steady_clock;

using MadeTensors = std::map<std::pair<int, int>, at::Tensor>;  // by stage and micro-batch

enum class Mode { train, evaluate, forward };

at::Tensor take(MadeTensors& from, const std::pair<int, int>& key) {
  auto found = from.extract(key);
  PHALANX_ASSERT(!found.empty(), "a stage takes what its neighbour has made");
  return std::move(found.mapped());
}

// Computes what all ranks post, and checks that it terminates on this backend.
std::vector<schedule::Program> checked_programs(const Schedule& schedule, const Communicator& comm,
                                                const PipelineOptions& options) {
  const bool has_tags = comm.backend()->traits().has_tags;
  schedule::PostingOptions posting = schedule::posting_for(has_tags);
  posting.receives_ahead = options.receives_ahead.value_or(posting.receives_ahead);
  auto programs = schedule::post(schedule, posting);
  const auto faults = schedule::check_deadlock(schedule, programs, {.in_order = !has_tags});
  if (faults.empty()) return programs;
  const bool asked_for = options.receives_ahead.value_or(0) > 0;
  throw ConfigError(fmt::format(
      "pipeline: schedule '{}' cannot be run over {}{}{}: {}. {}", schedule.name, comm.backend_name(),
      has_tags ? "" : ", whose messages have no tags and run one after the other",
      asked_for ? fmt::format(", with receives_ahead = {}", *options.receives_ahead) : "", faults.front().text(),
      asked_for ? "Leave receives_ahead unset"
                : "Leave its SEND and RECV actions out: add_transfers() places them where they go well"));
}

Schedule with_transfers(Schedule given, const Communicator& comm) {
  if (given.ranks() != comm.size()) {
    throw ConfigError(fmt::format("pipeline: schedule '{}' is for {} ranks, and there are {}; make it for {}",
                                  given.name, given.ranks(), comm.size(), comm.size()));
  }
  if (!schedule::has_transfers(given)) given = schedule::add_transfers(given);
  schedule::check(given);
  return given;
}

at::Device device_of(const std::vector<PipelineStage>& stages) {
  for (const auto& stage : stages) {
    for (const auto& parameter : stage.module->parameters()) return parameter.device();
  }
  return at::kCPU;
}

// Checks that the stages are those of this rank. An error is sent to the other ranks, which wait for this one.
const std::vector<PipelineStage>& checked(const std::vector<PipelineStage>& stages, const Schedule& schedule,
                                          WeightSplit split, Communicator& comm) {
  std::vector<int> found;
  for (const auto& stage : stages) found.push_back(stage.index);
  std::ranges::sort(found);
  const auto expected = schedule.stages_of(comm.rank());
  std::string wrong;
  if (found != expected) {
    wrong = fmt::format("pipeline: in schedule '{}' rank {} has the stages [{}], and was given [{}]", schedule.name,
                        comm.rank(), fmt::join(expected, ", "), fmt::join(found, ", "));
  }
  for (const auto& stage : stages) {
    if (!stage.sharding || split != WeightSplit::graph) continue;
    wrong = fmt::format(
        "pipeline: stage {} is sharded, and a walk over the graph would find its weights let go of; use "
        "WeightSplit::automatic, or leave it unsharded",
        stage.index);
  }
  for (const auto& stage : stages) {
    if (stage.index != schedule.stages() - 1 || stage.loss || !schedule::any_action(schedule, schedule::makes_gradient))
      continue;
    wrong = fmt::format(
        "pipeline: stage {}, the last one, has no loss; make it by make_stage(index, module, loss) or "
        "make_loss_stage(index, module)",
        stage.index);
  }
  if (wrong.empty()) return stages;
  comm.abort(wrong);
  throw ConfigError(wrong);
}

void warn_of_lazy_loading(const Communicator& comm) {
  const BackendTraits traits = comm.backend()->traits();
  if (!traits.stream_ordered || traits.cuda_device < 0 || env_string("CUDA_MODULE_LOADING") == "EAGER") return;
  log::warn_once(
      "a pipeline over NCCL: CUDA loads each kernel at its first use here, which can wait for ever for a message that "
      "is under way. Set InitOptions::loads_kernels_at_start, or CUDA_MODULE_LOADING=EAGER in the environment");
}

std::vector<at::Tensor> cut(const at::Tensor& batch, int count, const char* what) {
  if (!batch.defined()) return {};
  if (batch.dim() == 0 || batch.size(0) % count != 0) {
    throw Error(fmt::format("pipeline: {} of shape [{}] cannot be cut into {} equal micro-batches: {}", what,
                            fmt::join(batch.sizes(), ", "), count,
                            batch.dim() == 0 ? std::string("they have no dimension 0")
                                             : fmt::format("{} is no multiple of {}", batch.size(0), count)));
  }
  return batch.chunk(count, 0);
}

}  // namespace

double PipelineResult::loss() const {
  const double sum = std::accumulate(losses.begin(), losses.end(), 0.0);
  return losses.empty() || reduction == PipelineLoss::sum ? sum : sum / static_cast<double>(losses.size());
}

struct PipelineRuntime::Impl {
  Impl(std::shared_ptr<Communicator> communicator, Schedule given, std::vector<PipelineStage> given_stages,
       PipelineOptions given_options);

  /// `bring` sets inputs and targets. If it throws, all ranks get the error, too.
  /// The losses go to the result, after a wait; or to `queued_losses`, if that is not null.
  PipelineResult run(Mode how, const std::function<void()>& bring, at::Tensor* queued_losses = nullptr);
  void bring(const at::Tensor& batch, const at::Tensor& batch_targets) {
    inputs = cut(batch, schedule.micro_batches, "inputs");
    targets = cut(batch_targets, schedule.micro_batches, "targets");
  }
  void run_all();
  void run_step(const schedule::Step& step);
  void run_action(const Action& action);
  void forward_pass(const Action& action);
  void backward_pass(const Action& action);
  void weight_pass(const Action& action);
  at::Tensor made_for(const Action& send);
  void shard(const Action& action);
  void ran(const Action& action, Clock::time_point start);
  at::Tensor shared_losses();
  void check_inputs() const;
  void give_up(const char* why) noexcept;

  int last_stage() const { return schedule.stages() - 1; }
  bool is_here(int stage) const { return runs.contains(stage); }
  bool is_last_of_stage(const Action& action) const;

  std::shared_ptr<Communicator> comm;
  Schedule schedule;
  PipelineOptions options;
  at::Device device;
  std::map<int, StageExecutor> runs;
  std::vector<StageSharding*> shardings;  // of the stages that are sharded
  StageGradients gradients;
  schedule::Program program, forward_program;  // this rank's
  std::map<int, Action> last_weights;          // by stage: the last B or W
  StageP2P messages, forward_messages;
  bool is_connected = false;

  double gradient_scale = 1.0;
  at::Tensor gradient_scale_tensor;  // one more factor; undefined: none
  // State of the current step.
  Mode mode = Mode::train;
  std::vector<at::Tensor> inputs, targets;
  std::vector<at::Tensor> losses;  // by micro-batch, on the last stage's rank
  MadeTensors outputs;             // until the next stage takes them
  MadeTensors dinputs;             // gradients of inputs, until the previous stage takes them
  std::vector<at::Tensor> returned;
  TensorShape first_input;
  Clock::time_point begin;
  PipelineStatistics statistics;
};

PipelineRuntime::Impl::Impl(std::shared_ptr<Communicator> communicator, Schedule given,
                            std::vector<PipelineStage> given_stages, PipelineOptions given_options)
    : comm(std::move(communicator)),
      schedule(with_transfers(std::move(given), *comm)),
      options(std::move(given_options)),
      device(device_of(given_stages)),
      gradients(checked(given_stages, schedule, options.weight_split, *comm), comm),
      messages(comm, schedule, device),
      forward_messages(comm, schedule, device) {
  const auto rank = static_cast<std::size_t>(comm->rank());
  program = checked_programs(schedule, *comm, options)[rank];
  forward_program = checked_programs(schedule::forward_only(schedule), *comm, options)[rank];
  for (const auto& step : program) {
    if (step.transfers.empty() && schedule::ends_micro_batch(step.action.kind)) {
      last_weights[step.action.stage] = step.action;
    }
  }
  for (auto& stage : given_stages) {
    const int index = stage.index;
    if (stage.sharding) shardings.push_back(stage.sharding.get());
    runs.emplace(index, StageExecutor(std::move(stage), options.weight_split));
  }
}

bool PipelineRuntime::Impl::is_last_of_stage(const Action& action) const {
  const auto found = last_weights.find(action.stage);
  return found != last_weights.end() && found->second == action;
}

void PipelineRuntime::Impl::check_inputs() const {
  const auto count = static_cast<std::size_t>(schedule.micro_batches);
  const auto check = [&](const std::vector<at::Tensor>& given, const char* what, int stage) {
    if (given.size() == count && std::ranges::all_of(given, [](const auto& t) { return t.defined(); })) return;
    throw Error(fmt::format("pipeline: this rank holds stage {} and needs the {} of {} micro-batches, found {}", stage,
                            what, count, given.size()));
  };
  if (is_here(0)) check(inputs, "inputs", 0);
  if (is_here(last_stage()) && mode != Mode::forward) check(targets, "targets", last_stage());
}

PipelineResult PipelineRuntime::Impl::run(Mode how, const std::function<void()>& bring, at::Tensor* queued_losses) {
  mode = how;
  begin = Clock::now();
  losses.assign(static_cast<std::size_t>(schedule.micro_batches), at::Tensor());
  returned.assign(mode == Mode::forward && is_here(last_stage()) ? losses.size() : 0, at::Tensor());
  statistics.passes.clear();
  statistics.began = begin;
  if (mode == Mode::train) statistics.peak_live_activations = 0;
  PipelineResult result{.reduction = options.loss};
  try {
    bring();
    check_inputs();
    if (!std::exchange(is_connected, true)) {
      warn_of_lazy_loading(*comm);
      messages.connect();
    }
    run_all();
    if (mode != Mode::forward) {
      const at::Tensor shared = shared_losses();
      if (queued_losses != nullptr) {
        *queued_losses = shared;
      } else {
        const at::Tensor all = shared.to(at::kCPU);
        result.losses.assign(all.const_data_ptr<double>(), all.const_data_ptr<double>() + schedule.micro_batches);
      }
    }
  } catch (const std::exception& error) {
    give_up(error.what());
    throw;
  }
  inputs.clear();
  targets.clear();
  statistics.sent_bytes = messages.sent_bytes() + forward_messages.sent_bytes();
  result.outputs = std::exchange(returned, {});
  return result;
}

// The other ranks wait for data that will not come.
void PipelineRuntime::Impl::give_up(const char* why) noexcept {
  try {
    comm->abort(why);
  } catch (...) {
    // It has already failed, which is all we wanted.
  }
  gradients.end_step();
  for (StageSharding* sharding : shardings) sharding->abandon_step();
  for (auto& [index, run] : runs) run.clear_runtime_states();
  messages.clear_runtime_states();
  forward_messages.clear_runtime_states();
  inputs.clear();
  targets.clear();
  losses.clear();
  outputs.clear();
  dinputs.clear();
}

void PipelineRuntime::Impl::run_all() {
  const bool trains = mode == Mode::train;
  StageP2P& channel = trains ? messages : forward_messages;
  channel.begin(/*forgets_shapes=*/!trains);
  if (trains) {
    for (StageSharding* sharding : shardings) sharding->begin_step();
    gradients.begin_step();
  }
  for (const auto& step : trains ? program : forward_program) run_step(step);
  if (trains) {
    for (StageSharding* sharding : shardings) sharding->show_gradients();
    gradients.reduce_tied_gradients();
    gradients.end_step();
    for (StageSharding* sharding : shardings) sharding->end_step();
  }
  channel.wait_sends();
  PHALANX_ASSERT(outputs.empty() && dinputs.empty() && !channel.has_posted(),
                 "a step takes all tensors that it made and received");
  PHALANX_ASSERT(std::ranges::all_of(runs, [](const auto& run) { return run.second.live() == 0; }),
                 "a step runs all backward passes of its forward passes");
}

void PipelineRuntime::Impl::run_step(const schedule::Step& step) {
  Action now = step.transfers.empty() ? step.action : step.transfers.front();
  try {
    if (step.transfers.empty()) return run_action(now);
    StageP2P& channel = mode == Mode::train ? messages : forward_messages;
    channel.post(step, [&](const Action& send) {
      now = send;
      return made_for(send);
    });
  } catch (const CommError&) {
    throw;  // it names the rank that failed, and its action
  } catch (const std::exception& error) {
    throw Error(fmt::format("pipeline stage {}, rank {}, {}: {}", now.stage, comm->rank(), schedule::to_text(now),
                            error.what()));
  }
}

void PipelineRuntime::Impl::run_action(const Action& action) {
  switch (action.kind) {
    case ActionKind::forward:
      return forward_pass(action);
    case ActionKind::backward:
    case ActionKind::backward_input:
      return backward_pass(action);
    case ActionKind::backward_weight:
      return weight_pass(action);
    default:
      return shard(action);
  }
}

void PipelineRuntime::Impl::forward_pass(const Action& action) {
  const int stage = action.stage, micro_batch = action.micro_batch;
  const auto at_batch = static_cast<std::size_t>(micro_batch);
  at::Tensor input;
  if (stage == 0) {
    input = inputs[at_batch];
    const TensorShape found = TensorShape::of(input);
    if (micro_batch > 0 && found != first_input) {
      throw Error(fmt::format("micro-batch {}: the input of stage 0 is {}, expected {} as in the first micro-batch",
                              micro_batch, found.text(), first_input.text()));
    }
    first_input = found;
  } else if (is_here(stage - 1)) {
    input = take(outputs, {stage - 1, micro_batch});
  } else {
    StageP2P& channel = mode == Mode::train ? messages : forward_messages;
    input = channel.wait_recv({stage, ActionKind::recv_forward, micro_batch, {}});
  }
  const auto start = Clock::now();
  const bool is_last = stage == last_stage(), trains = mode == Mode::train;
  const at::Tensor target = is_last && mode != Mode::forward ? targets[at_batch] : at::Tensor();
  at::Tensor output = runs.at(stage).forward(micro_batch, input, target, trains);
  if (is_last) {
    (mode == Mode::forward ? returned : losses)[at_batch] = std::move(output);
  } else {
    outputs[{stage, micro_batch}] = std::move(output);
  }
  ran(action, start);
}

void PipelineRuntime::Impl::backward_pass(const Action& action) {
  const int stage = action.stage, micro_batch = action.micro_batch;
  at::Tensor gradient;
  if (stage == last_stage()) {
    const at::Tensor& loss = losses[static_cast<std::size_t>(micro_batch)];
    const double factor = options.loss == PipelineLoss::mean ? 1.0 / static_cast<double>(schedule.micro_batches) : 1.0;
    gradient = at::full(loss.sizes(), factor * gradient_scale, loss.options());
    if (gradient_scale_tensor.defined()) gradient.mul_(gradient_scale_tensor);
  } else if (is_here(stage + 1)) {
    gradient = take(dinputs, {stage + 1, micro_batch});
  } else {
    gradient = messages.wait_recv({stage, ActionKind::recv_backward, micro_batch, {}});
  }
  const auto start = Clock::now();
  StageExecutor& run = runs.at(stage);
  const bool is_last = is_last_of_stage(action);
  StageSharding* const sharding = run.stage().sharding.get();
  if (sharding) sharding->begin_backward();
  at::Tensor dx;
  if (action.kind == ActionKind::backward_input) {
    dx = run.backward_input(micro_batch, gradient);
  } else {
    dx = run.backward(micro_batch, gradient, /*defers_weights=*/is_last);
  }
  if (sharding) sharding->end_backward();
  gradient = at::Tensor();
  if (is_last) {
    gradients.before_last(stage);
    run.backward_weight(micro_batch);
  }
  if (stage > 0) dinputs[{stage, micro_batch}] = std::move(dx);
  ran(action, start);
  if (is_last) gradients.after_last(stage);
  if (sharding) sharding->collect_gradients();
}

void PipelineRuntime::Impl::weight_pass(const Action& action) {
  const auto start = Clock::now();
  const bool is_last = is_last_of_stage(action);
  if (is_last) gradients.before_last(action.stage);
  runs.at(action.stage).backward_weight(action.micro_batch);
  ran(action, start);
  if (is_last) gradients.after_last(action.stage);
  if (const auto& sharding = runs.at(action.stage).stage().sharding) sharding->collect_gradients();
}

// The next stage's input, or the gradient for the previous stage.
at::Tensor PipelineRuntime::Impl::made_for(const Action& send) {
  return take(send.kind == ActionKind::send_forward ? outputs : dinputs, {send.stage, send.micro_batch});
}

void PipelineRuntime::Impl::shard(const Action& action) {
  StageSharding* const sharding = runs.at(action.stage).stage().sharding.get();
  if (sharding && action.kind == ActionKind::unshard) sharding->unshard();
  if (sharding && action.kind == ActionKind::reshard) sharding->reshard();
  const auto& hook = action.kind == ActionKind::unshard   ? options.unshard
                     : action.kind == ActionKind::reshard ? options.reshard
                                                          : options.reduce_gradients;
  if (hook) hook(action.stage);
}

void PipelineRuntime::Impl::ran(const Action& action, Clock::time_point start) {
  const auto seconds = [&](Clock::time_point when) { return std::chrono::duration<double>(when - begin).count(); };
  statistics.passes.push_back({action, seconds(start), seconds(Clock::now())});
  int live = 0;
  for (const auto& [index, run] : runs) live += run.live();
  if (mode == Mode::train) statistics.peak_live_activations = std::max(statistics.peak_live_activations, live);
}

// Of each micro-batch, float64 on the device. The last stage's rank broadcasts them to all.
at::Tensor PipelineRuntime::Impl::shared_losses() {
  at::Tensor shared;
  if (is_here(last_stage())) {
    const at::NoGradGuard no_grad;
    shared = at::stack(losses).to(at::kDouble).reshape({schedule.micro_batches});
  } else {
    shared = at::zeros({schedule.micro_batches}, at::TensorOptions(at::kDouble).device(device));
  }
  comm->broadcast(shared, {.root = schedule.rank_of_stage.back()});
  losses.clear();
  return shared;
}

PipelineRuntime::PipelineRuntime(std::shared_ptr<Communicator> comm, schedule::Schedule schedule,
                                 std::vector<PipelineStage> stages, PipelineOptions options)
    : impl_(std::make_unique<Impl>(std::move(comm), std::move(schedule), std::move(stages), std::move(options))) {}

PipelineRuntime::~PipelineRuntime() = default;

PipelineResult PipelineRuntime::step(const at::Tensor& inputs, const at::Tensor& targets) {
  return impl_->run(Mode::train, [&] { impl_->bring(inputs, targets); });
}

PipelineResult PipelineRuntime::step(std::vector<at::Tensor> inputs, std::vector<at::Tensor> targets) {
  return impl_->run(Mode::train, [&] {
    impl_->inputs = std::move(inputs);
    impl_->targets = std::move(targets);
  });
}

at::Tensor PipelineRuntime::queue_step(const at::Tensor& inputs, const at::Tensor& targets) {
  at::Tensor losses;
  impl_->run(
      Mode::train, [&] { impl_->bring(inputs, targets); }, &losses);
  return impl_->options.loss == PipelineLoss::mean ? losses.mean() : losses.sum();
}

PipelineResult PipelineRuntime::evaluate(const at::Tensor& inputs, const at::Tensor& targets) {
  return impl_->run(Mode::evaluate, [&] { impl_->bring(inputs, targets); });
}

PipelineResult PipelineRuntime::forward(const at::Tensor& inputs) {
  return impl_->run(Mode::forward, [&] { impl_->bring(inputs, at::Tensor()); });
}

void PipelineRuntime::scale_gradients(double factor) {
  impl_->gradient_scale = factor;
  impl_->gradient_scale_tensor.reset();
}

void PipelineRuntime::scale_gradients(at::Tensor factor) {
  impl_->gradient_scale = 1.0;
  impl_->gradient_scale_tensor = std::move(factor);
}

const schedule::Schedule& PipelineRuntime::schedule() const noexcept { return impl_->schedule; }
const PipelineStatistics& PipelineRuntime::statistics() const noexcept { return impl_->statistics; }
std::vector<std::string> PipelineRuntime::tied_names() const { return impl_->gradients.tied_names(); }

}  // namespace phalanx
