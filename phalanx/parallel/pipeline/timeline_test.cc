// When passes run: the runtime's timeline against the simulator's.

#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/kernels/deferred_weights.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/parallel/pipeline/testing/pipeline_test_support.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/timeline.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx {
namespace {

using pipeline_testing::random_rows;
using pipeline_testing::squared_error;
using schedule::Timeline;

// The workload of a pass: waiting time that needs no core, so that there may be more ranks than cores.
void wait_for(double milliseconds) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
}

// y = x after a wait; the backward pass waits for the input's gradient, and again for that of the weight, which is 0.
struct WaitingFunction : torch::autograd::Function<WaitingFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            double milliseconds) {
    wait_for(milliseconds);
    ctx->save_for_backward({weight});
    ctx->saved_data["milliseconds"] = milliseconds;
    kernels::save_queue_for_backward(*ctx);
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const at::Tensor weight = ctx->get_saved_variables()[0];
    const double milliseconds = ctx->saved_data["milliseconds"].toDouble();
    const auto write = [milliseconds](const WeightGradient& dweight) {
      wait_for(milliseconds);
      if (dweight.beta == 0.0) dweight.out.zero_();
    };
    wait_for(milliseconds);
    if (const auto ref = kernels::queue_for(*ctx, weight); ref.queue) {
      ref.queue->put(ref.key, weight, write);
      return {grads[0], at::Tensor(), at::Tensor()};
    }
    const WeightGradient dweight = weight_gradient(weight);
    write(dweight);
    return {grads[0], dweight.returned, at::Tensor()};
  }
};

struct Waiting : nn::Module {
  Waiting(int stage, const double& milliseconds) : nn::Module("Waiting"), milliseconds(milliseconds) {
    weight = make_parameter("weight" + std::to_string(stage), {1}, {}, Init::constant(0.0));
  }
  at::Tensor forward(const at::Tensor& x) { return WaitingFunction::apply(x, weight, milliseconds); }

  at::Tensor weight;
  const double& milliseconds;
};

// Stages that wait, with `step_milliseconds` for all forward passes of a rank. The second step counts, because the
// first one exchanges shapes.
Timeline executed_waiting(const schedule::Schedule& plan, double milliseconds) {
  const auto ranks = static_cast<std::size_t>(plan.ranks());
  std::vector<std::vector<ExecutedPass>> passes(ranks);
  std::vector<int> live(ranks);
  run_local_ranks(plan.ranks(), [&](const std::shared_ptr<Communicator>& comm) {
    const auto rank = static_cast<std::size_t>(comm->rank());
    double now = 0.0;
    std::vector<PipelineStage> stages;
    for (const int s : plan.stages_of(comm->rank())) {
      const auto part = std::make_shared<Waiting>(s, now);
      stages.push_back(s + 1 == plan.stages() ? make_stage(s, part, squared_error) : make_stage(s, part));
    }
    PipelineRuntime pipeline(comm, plan, stages);
    const at::Tensor x = random_rows(plan.micro_batches, "x").set_requires_grad(false);
    pipeline.step(x, x);
    now = milliseconds;
    pipeline.step(x, x);
    const double began = std::chrono::duration<double>(pipeline.statistics().began.time_since_epoch()).count();
    for (const ExecutedPass& pass : pipeline.statistics().passes) {
      passes[rank].push_back({pass.action, began + pass.start, began + pass.end});
    }
    live[rank] = pipeline.statistics().peak_live_activations;
  });
  EXPECT_EQ(live, schedule::peak_live_activations(plan));
  return schedule::make_timeline(plan, passes);
}

// Other programs on the machine make ranks wake up late, by varying times. If the delay is too large, the test tries
// waits twice as long.
TEST(PipelineTimeline, ExecutedAsSimulated) {
  constexpr double kTolerance = 0.10;
  constexpr int kSteps = 6;
  for (const int ranks : {4, 8}) {
    for (const auto& name : schedule::schedule_names()) {
      SCOPED_TRACE(name + " over " + std::to_string(ranks));
      const int micro_batches = name == "DualPipeV" ? 2 * ranks : ranks;
      const auto plan = schedule::make_schedule({.name = name, .ranks = ranks, .micro_batches = micro_batches});
      double milliseconds = 4.0 * ranks / plan.stages();
      for (int step = 1; step <= kSteps; ++step, milliseconds *= 2.0) {
        const Timeline timeline = executed_waiting(plan, milliseconds);
        const bool is_close = std::abs(timeline.ratio() - 1.0) <= kTolerance;
        if (std::getenv("PHALANX_PRINT_TIMELINES") != nullptr) {
          printf("%s, %d ranks: executed %.1f ms, simulated %.1f (without transfers %.1f, replayed %.1f)\n",
                 name.c_str(), ranks, 1e3 * timeline.executed.makespan, 1e3 * timeline.simulated.makespan,
                 1e3 * timeline.without_transfers, 1e3 * timeline.replayed);
        }
        // The times are those of the waits, not invented by the simulator.
        for (const auto& of : timeline.times.by_stage) EXPECT_GE(of.forward, 0.999e-3 * milliseconds);
        if (is_close) break;
        if (step == kSteps) ADD_FAILURE() << "in none of " << kSteps << " steps\n" << schedule::to_text(timeline);
      }
    }
  }
}

}  // namespace
}  // namespace phalanx
