#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "phalanx/lecture/flow.h"
#include "phalanx/lecture/small_net.h"
#include "phalanx/lecture/steps.h"
#include "phalanx/lecture/timeline.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/simulate.h"

namespace phalanx::lecture {
namespace {

std::string title_of(const schedule::Schedule& schedule, const schedule::Simulation& simulated) {
  return fmt::format("{}, {} micro-batch(es): {:.0f} % waiting", schedule.name, schedule.micro_batches,
                     100 * simulated.bubble);
}

Span span_of(const schedule::Action& action, double begin, double end) {
  const bool forward = action.kind == schedule::ActionKind::forward;
  return {begin, end, fmt::format("{}{}", forward ? 'F' : 'B', action.micro_batch), forward ? "t0" : "t1"};
}

Picture picture_of(const schedule::Schedule& schedule, const schedule::Simulation& simulated) {
  std::vector<Lane> lanes;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    lanes.push_back({fmt::format("rank {}", rank), {}, fmt::format("{} alive", simulated.peak_live_activations[rank])});
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const auto& span = simulated.spans[rank][i];
      lanes.back().spans.push_back(span_of(schedule.actions[rank][i], span.start, span.end));
    }
  }
  return picture_of_spans(title_of(schedule, simulated), lanes, 25);
}

/// Two characters a unit of time: F0 and its backward pass B0 of twice the length.
void print_schedule(Stage& stage, const schedule::Schedule& schedule, const schedule::Simulation& simulated) {
  stage.print(title_of(schedule, simulated));
  const auto length = static_cast<std::size_t>(std::lround(simulated.makespan));
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    std::string line;
    for (std::size_t unit = 0; unit < length; ++unit) line += "..";
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const schedule::Action& action = schedule.actions[rank][i];
      const auto begin = static_cast<std::size_t>(std::lround(simulated.spans[rank][i].start));
      const bool forward = action.kind == schedule::ActionKind::forward;
      const std::string cell =
          forward ? fmt::format("F{}", action.micro_batch) : fmt::format("B{}--", action.micro_batch);
      line.replace(2 * begin, cell.size(), cell);
    }
    stage.print(fmt::format("  rank {} |{}|{}", rank, line, simulated.peak_live_activations[rank]));
  }
}

}  // namespace

void draw_schedules(Stage& stage) {
  std::vector<Picture> pictures;
  for (const auto& [name, micro_batches] :
       {std::pair("GPipe", 1), std::pair("GPipe", 4), std::pair("1F1B", 4), std::pair("1F1B", 8)}) {
    const auto schedule = schedule::make_schedule({.name = name, .ranks = 4, .micro_batches = micro_batches});
    const schedule::Simulation simulated = schedule::simulate(schedule);
    print_schedule(stage, schedule, simulated);
    pictures.push_back(picture_of(schedule, simulated));
    const double expected = 3.0 / (micro_batches + 3);
    stage.check(std::abs(simulated.bubble - expected) < 1e-9, "ranks wait (p-1)/(m+p-1) of the step");
  }
  stage.show(std::move(pictures));
}

namespace {

/// One rank's stage of the small net, and the runtime over all ranks.
struct Pipeline {
  Pipeline(Rank& rank, const std::string& name, int micro_batches, std::int64_t repeat = 1) {
    const int each = kLayers / rank.ranks(), begin = rank.number() * each;
    part = std::make_shared<SmallNet>(rank.device(), begin, begin + each);
    nn::initialise(*part, kSeed);
    PipelineStage stage{.index = rank.number(), .module = part};
    stage.forward = [net = part.get(), repeat](at::Tensor x) {
      for (std::int64_t i = 0; i < repeat; ++i) x = nn::call(*net, x);
      return x;
    };
    if (rank.number() + 1 == rank.ranks()) {
      stage.loss = [forward = stage.forward](const at::Tensor& x, const at::Tensor&) { return loss_of(forward(x)); };
    }
    runtime = std::make_unique<PipelineRuntime>(
        rank.world(), schedule::make_schedule({.name = name, .ranks = rank.ranks(), .micro_batches = micro_batches}),
        std::vector<PipelineStage>{stage});
  }
  std::shared_ptr<SmallNet> part;
  std::unique_ptr<PipelineRuntime> runtime;
};

}  // namespace

namespace {

/// The passes of the last step as they were executed, on the clock that all ranks share.
void add_passes(Timeline& timeline, const Rank& rank, const PipelineStatistics& statistics) {
  const auto at = [&](double seconds) {
    return statistics.began +
           std::chrono::duration_cast<Timeline::Clock::duration>(std::chrono::duration<double>(seconds));
  };
  for (const auto& pass : statistics.passes) {
    const Span span = span_of(pass.action, 0, 0);
    timeline.add(rank.number(), span.text, span.style, at(pass.start), at(pass.end));
  }
}

}  // namespace

namespace {

std::vector<std::string> passes_of(const PipelineStatistics& statistics) {
  std::vector<std::string> passes;
  for (const auto& pass : statistics.passes) passes.push_back(schedule::to_text(pass.action));
  return passes;
}

/// Those of the schedule, without its transfers.
std::vector<std::string> passes_of(const schedule::Schedule& schedule, int rank) {
  std::vector<std::string> passes;
  for (const schedule::Action& action : schedule.actions[static_cast<std::size_t>(rank)]) {
    if (action.kind == schedule::ActionKind::forward || action.kind == schedule::ActionKind::backward) {
      passes.push_back(schedule::to_text(action));
    }
  }
  return passes;
}

}  // namespace

void naive_pipeline(Stage& stage) {
  const int n = stage.ranks();
  Timeline timeline = Timeline::of_ranks(n);
  stage.on_ranks(n, [&](Rank& rank) {
    Pipeline pipeline(rank, "GPipe", 1, /*repeat=*/40);
    const at::Tensor x = batch_rows(rank.device()).repeat({8, 1});
    double busy = 0, longest = 0;
    for (int step = 0; step < 5; ++step) {
      rank.comm().barrier();
      pipeline.runtime->step(x, x);
      const auto& passes = pipeline.runtime->statistics().passes;
      double own = 0, last = 0;
      for (const auto& pass : passes) own += pass.end - pass.start, last = std::max(last, pass.end);
      at::Tensor end = at::full({1}, last, rank.floats().dtype(at::kDouble));
      rank.comm().all_reduce(end, {.op = ReduceOp::max});
      busy += own, longest += end.item<double>();
    }
    add_passes(timeline, rank, pipeline.runtime->statistics());
    at::Tensor share = at::full({1}, 100 * (1 - busy / longest), rank.floats().dtype(at::kDouble));
    rank.say("idle share of 5 steps", fmt::format("{} %", measured(share.item<double>())));
    rank.comm().all_reduce(share, {.op = ReduceOp::avg});
    if (rank.number() == 0) {
      rank.say("mean of the ranks",
               fmt::format("{} %; (p-1)/p = {:.0f} %", measured(share.item<double>()), 100.0 * (n - 1) / n));
    }
    rank.check(share.item<double>() >= 100.0 * (n - 1) / n - 2, "the mean is at least (p-1)/p, less 2 %");
  });
  stage.show({});
  timeline.show(stage, "the last of these steps, as it ran");
}

void pipeline_training(Stage& stage) {
  const std::vector<double> alone = losses_of_one_rank(stage.device());
  std::vector<Picture> pictures;
  Flow alive(stage.ranks());
  for (const int n : stage.worlds()) {
    for (const char* name : {"GPipe", "1F1B"}) {
      Timeline timeline = Timeline::of_ranks(n);
      stage.on_ranks(n, [&](Rank& rank) {
        Pipeline pipeline(rank, name, 4);
        const at::Tensor x = batch_rows(rank.device());
        AdamW optimizer(nn::named_parameters(*pipeline.part), {.weight_decay = 0.01});
        std::vector<double> losses;
        for (int step = 0; step < kTrainingSteps; ++step) {
          losses.push_back(pipeline.runtime->step(x, x).loss());
          optimizer.step(1e-3);
          optimizer.zero_grad();
        }
        const auto& statistics = pipeline.runtime->statistics();
        if (n == stage.ranks()) alive.add(rank, name, std::to_string(statistics.peak_live_activations));
        rank.check(passes_of(pipeline.runtime->schedule(), rank.number()) == passes_of(statistics),
                   "passes ran in the schedule's order");
        if (n == stage.ranks()) {  // for the picture a step with longer passes
          Pipeline longer(rank, name, 4, /*repeat=*/40);
          rank.comm().barrier();
          longer.runtime->step(x.repeat({8, 1}), x.repeat({8, 1}));
          add_passes(timeline, rank, longer.runtime->statistics());
        }
        rank.check(same_losses(losses, alone), "the losses are those of one rank");
        const int expected = name[0] == 'G' ? 4 : std::min(4, n - rank.number());
        rank.check(statistics.peak_live_activations == expected, "GPipe keeps 4 micro-batches alive, 1F1B p - rank");
      });
      if (n == stage.ranks()) pictures.push_back(timeline.picture(fmt::format("{}, as it ran", name)));
    }
  }
  stage.print("micro-batches alive");
  alive.print(stage);
  stage.show({});
  stage.show(std::move(pictures));
}

}  // namespace phalanx::lecture
