// The trainer on simulated devices waits for nothing between a step's batch and its optimizer, and reads a step's
// numbers one step later. Steps that are not finite change nothing, and are named by their own number.
#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/testing/sim_device/torch/testing/sim_ranks.h"
#include "phalanx/train/ranks/exchange_step_metrics.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {
namespace {

using Counts = std::map<std::string, std::uint64_t>;
using Bytes = std::map<std::string, std::string>;  // of tensors, by rank and name

Counts difference(Counts all, const Counts& part) {
  for (const auto& [name, count] : part) all[name] -= count;
  std::erase_if(all, [](const auto& one) { return one.second == 0; });
  return all;
}

struct RunOptions {
  bool over_nccl = true;
  bool on_cpu = false;
  std::function<bool(int rank)> stop = {};
  std::function<void(Trainer& trainer)> prepare = {};
  std::function<void(Trainer& trainer, int rank)> finish = {};  // called whether or not the run has failed
};

class TrainerWaits : public TrainerTest {
 protected:
  // Returns the error of rank 0; "" if there was none.
  std::string run(const config::TrainConfig& config, int ranks, const RunOptions& options = {}) {
    sim_.runtime.clear_races();
    sim_.runtime.host_waits().clear();
    sim_.runtime.clear_launches();
    std::vector<std::string> errors(static_cast<std::size_t>(ranks));
    const auto body = [&](const std::shared_ptr<Communicator>& world) {
      const int rank = world->rank();
      const at::Device device = options.on_cpu ? at::Device(at::kCPU) : sim_device::SimBackend::device(rank);
      Trainer trainer(config, {.world = world,
                               .device = device,
                               .stop_requested = [&options, rank] { return options.stop && options.stop(rank); },
                               .quiet = true});
      if (options.prepare) options.prepare(trainer);
      errors[static_cast<std::size_t>(rank)] = error_text([&] { result_ = trainer.run(); });
      if (options.finish) options.finish(trainer, rank);
    };
    if (options.on_cpu) {
      run_local_ranks(ranks, body);
    } else {
      run_sim_ranks(ranks, options.over_nccl, body);
    }
    for (const std::string& error : errors) EXPECT_EQ(error, errors[0]);
    EXPECT_THAT(sim_.runtime.races(), IsEmpty());
    return errors[0];
  }

  // All that a checkpoint would hold of a rank's tensors.
  static void add_state(Bytes& state, Trainer& trainer, int rank) {
    for (const auto& [name, tensor, shard] : trainer.collect_state().tensors) {
      const at::Tensor values = tensor.detach().to(at::kCPU).contiguous();
      state[fmt::format("{} of rank {}", name, rank)] =
          std::string(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
    }
  }

  static constexpr const char* kRead = "phalanx::DeviceReadback::read";
  sim_device::SimBackend& sim_ = sim_device::sim_backend();
};

struct Steady {
  std::string name;
  int ranks = 1;
  int tp = 1, pp = 1;
  std::vector<std::string> keys = {};
  bool over_nccl = true;
};

class TrainerSteadyWaits : public TrainerWaits, public ::testing::WithParamInterface<Steady> {};

TEST_P(TrainerSteadyWaits, AStepWaitsOnceAndForItsNumbersAlone) {
  const Steady& layout = GetParam();
  constexpr int kSteps = 5;
  std::map<int, Counts> waits, launches;
  for (const int steps : {4, 4 + kSteps}) {
    const std::string name = fmt::format("{}_{}", layout.name, steps);
    EXPECT_EQ(
        run(config_of({.name = name, .ranks = layout.ranks, .tp = layout.tp, .pp = layout.pp, .keys = layout.keys},
                      name, {fmt::format("--training.steps={}", steps), "--validation.no-enable"}),
            layout.ranks, {.over_nccl = layout.over_nccl}),
        "");
    waits[steps] = sim_.runtime.host_waits().by_site();
    launches[steps] = sim_.runtime.launches_by_kernel();
  }
  const auto each = static_cast<std::uint64_t>(kSteps * layout.ranks);
  const Counts expected = {{fmt::format("synchronize an event, called by {}", kRead), each}};
  EXPECT_EQ(difference(waits[4 + kSteps], waits[4]), expected);
  EXPECT_EQ(difference(launches[4 + kSteps], launches[4])["copy_ (device to host)"], each);
}

std::vector<std::string> shards(int stage, int count = -1) {
  return {fmt::format("--parallelism.data_parallel_shard_degree={}", count),
          fmt::format("--parallelism.zero_stage={}", stage)};
}

/// What runs may do beside: Muon, an average of the weights, a z-loss.
std::vector<std::string> muon(std::vector<std::string> keys = {}) {
  keys.insert(keys.end(), {"--optimizer.name=Muon", "--ema.decay=0.9", "--training.z_loss_weight=1e-4"});
  return keys;
}

/// Adapters over a frozen base in fewer bits.
std::vector<std::string> adapters(const std::string& base_dtype, std::vector<std::string> keys = {}) {
  keys.insert(keys.end(),
              {"--lora.rank=4", "--lora.base_dtype=" + base_dtype, "--model.dim=128", "--model.ffn_hidden=256"});
  return keys;
}

/// Random numbers in each forward pass.
std::vector<std::string> dropout(std::vector<std::string> keys = {}) {
  keys.insert(keys.end(), {"--lora.rank=4", "--lora.dropout=0.3"});
  return keys;
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, TrainerSteadyWaits,
    ::testing::ValuesIn(sampled(
        std::vector<Steady>{
            Steady{.name = "one"},
            Steady{.name = "one_float16", .keys = {"--training.mixed_precision_param=float16"}},
            Steady{.name = "one_bfloat16", .keys = {"--training.mixed_precision_param=bfloat16"}},
            Steady{.name = "one_sgd", .keys = {"--optimizer.name=SGD", "--optimizer.momentum=0.9"}},
            Steady{.name = "ddp", .ranks = 2},
            Steady{.name = "ddp_staged", .ranks = 2, .over_nccl = false},
            Steady{.name = "zero1", .ranks = 2, .keys = shards(1)},
            Steady{.name = "zero3", .ranks = 2, .keys = shards(3)},
            Steady{.name = "zero3_staged", .ranks = 2, .keys = shards(3), .over_nccl = false},
            Steady{.name = "tp", .ranks = 2, .tp = 2},
            Steady{.name = "tp_zero3", .ranks = 4, .tp = 2, .keys = shards(3, 2)},
            Steady{.name = "pp", .ranks = 2, .pp = 2},
            Steady{.name = "pp_float16", .ranks = 2, .pp = 2, .keys = {"--training.mixed_precision_param=float16"}},
            Steady{
                .name = "zbv", .ranks = 2, .pp = 2, .keys = {"--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"}},
            Steady{.name = "one_on_bfloat16", .keys = adapters("bfloat16")},
            Steady{.name = "one_on_nf4", .keys = adapters("nf4", {"--training.mixed_precision_param=bfloat16"})},
            Steady{.name = "zero3_on_nf4", .ranks = 2, .keys = adapters("nf4", shards(3))},
            Steady{.name = "one_dropout", .keys = dropout()},
            Steady{.name = "tp_zero3_dropout", .ranks = 4, .tp = 2, .keys = dropout(shards(3, 2))},
            Steady{.name = "one_muon", .keys = muon()},
            Steady{.name = "ddp_muon", .ranks = 2, .keys = muon()},
            Steady{.name = "tp_zero3_muon", .ranks = 4, .tp = 2, .keys = muon(shards(3, 2))},
            Steady{.name = "pp_muon", .ranks = 2, .pp = 2, .keys = muon()},
            Steady{.name = "all", .ranks = 8, .tp = 2, .pp = 2, .keys = shards(3, 2)}},
        8)),
    [](const auto& info) { return info.param.name; });

// While rank 0 exchanges the metrics of step k, step k + 1 is queued. The first and the last step are awaited at once.
TEST_F(TrainerWaits, MetricsOfAStepAreSharedWhileTheNextIsQueued) {
  std::vector<std::uint64_t> optimizer_launches;
  EXPECT_EQ(run(config("run", {"--training.steps=6", "--validation.no-enable"}), 1,
                {.stop =
                     [&](int) {
                       optimizer_launches.push_back(sim_.runtime.launches_by_kernel()["adamw"]);
                       return false;
                     }}),
            "");
  const std::uint64_t step = optimizer_launches.at(0);  // one for each weight decay
  ASSERT_GT(step, 0);
  // The last number is asked for after the last save.
  const std::vector<std::uint64_t> steps = {1, 3, 4, 5, 6, 6, 6};
  ASSERT_EQ(optimizer_launches.size(), steps.size());
  for (std::size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(optimizer_launches[i], steps[i] * step) << i;
  EXPECT_EQ(losses("run").size(), 6U);
}

// Over NCCL. Over staged tensors the host is in every operation anyway.
TEST_F(TrainerWaits, AGroupOfTheHostPassesWhatIsQueuedOnTheDevice) {
  std::promise<void> both_have_exchanged;
  const auto may_end = both_have_exchanged.get_future().share();
  std::atomic<int> exchanged{0};
  run_sim_ranks(2, /*over_nccl=*/true, [&](const std::shared_ptr<Communicator>& world) {
    const at::Tensor x = at::ones({4}, at::TensorOptions(sim_device::SimBackend::device(world->rank())));
    world->all_reduce(x);  // connects the ranks
    const auto group = world->split_host("metrics");
    std::future_status status = std::future_status::timeout;
    sim_.runtime.launch({world->rank(), 0},
                        {"a long step", {}, [&, may_end] { status = may_end.wait_for(std::chrono::seconds(60)); }});
    world->all_reduce(x);
    EXPECT_DOUBLE_EQ(exchange_step_metrics({.loss = 1.0 + world->rank()}, *group, /*data_ranks=*/1).loss, 1.5);
    if (exchanged.fetch_add(1) == 1) both_have_exchanged.set_value();
    EXPECT_EQ(x.cpu()[0].item<float>(), 4);
    EXPECT_EQ(status, std::future_status::ready);
  });
}

// The device cannot end step 5 before step 4 is in metrics.jsonl.
TEST_F(TrainerWaits, MetricsAreSharedAndWrittenWithoutTheNextStepsResults) {
  std::array<std::atomic<int>, 2> calls{};
  std::atomic<int> seen{0};
  const config::TrainConfig run_config = config_of({.name = "run", .ranks = 2, .keys = sharded(3)}, "run",
                                                   {"--training.steps=8", "--validation.no-enable"});
  const auto wait_for_step_4 = [&] {
    const auto has_it = [&] {
      std::ifstream file(path("run") + "/metrics.jsonl");
      return std::count(std::istreambuf_iterator<char>(file), {}, '\n') >= 4;
    };
    for (int i = 0; i < 3000 && !has_it(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (has_it()) ++seen;
  };
  EXPECT_EQ(run(run_config, 2,
                {.stop =
                     [&](int rank) {
                       // Asked while the metrics of step 3 are shared: step 4 is queued.
                       if (++calls[static_cast<std::size_t>(rank)] == 3)
                         sim_.runtime.launch({rank, 0}, {"held up", {}, wait_for_step_4});
                       return false;
                     }}),
            "");
  EXPECT_EQ(seen, 2);
  EXPECT_EQ(losses("run").size(), 8U);
}

// A gradient that is not finite in one step, as seen by the hook of a parameter.
std::function<void(Trainer&)> spoil(int step) {
  return [step](Trainer& trainer) {
    trainer.model().output->weight.register_hook([step, seen = std::make_shared<int>(0)](const at::Tensor& grad) {
      return ++*seen == step ? grad.mul(NAN) : grad;
    });
  };
}

std::function<bool(int)> stop_at_call(int call) {
  return [call, seen = std::make_shared<std::atomic<int>>(0)](int rank) {
    return rank == 0 ? seen->fetch_add(1) + 1 >= call : false;
  };
}

TEST_F(TrainerWaits, AStepThatIsNotFiniteChangesNothingAndIsNamed) {
  for (const char* optimizer : {"AdamW", "SGD"}) {
    for (const int ranks : {1, 2}) {
      SCOPED_TRACE(fmt::format("{} on {} ranks", optimizer, ranks));
      const auto config_for = [&](const std::string& kind) {
        return config_of({.name = kind, .ranks = ranks}, fmt::format("{}_{}_{}", kind, optimizer, ranks),
                         {std::string("--optimizer.name=") + optimizer, "--checkpoint.interval=4"});
      };
      Bytes before, after;
      // Asked while the metrics of step 5 are shared, the run stops after step 6. A save asks once more.
      EXPECT_EQ(run(config_for("stopped"), ranks,
                    {.stop = stop_at_call(6),
                     .finish =
                         [&](Trainer& trainer, int rank) {
                           if (rank == 0) add_state(before, trainer, rank);
                         }}),
                "");
      EXPECT_EQ(result_.step, 6);
      const std::string error =
          run(config_for("spoilt"), ranks, {.prepare = spoil(7), .finish = [&](Trainer& trainer, int rank) {
                                              if (rank == 0) add_state(after, trainer, rank);
                                            }});
      EXPECT_THAT(error, HasSubstr("step 7: the gradient norm is nan (loss "));
      EXPECT_THAT(error, HasSubstr("the weights were not changed by it; try a lower [optimizer] lr"));
      EXPECT_THAT(error, HasSubstr("the last checkpoint is of step 4"));
      EXPECT_EQ(after, before);
      const std::string run_name = fmt::format("spoilt_{}_{}", optimizer, ranks);
      EXPECT_THAT(checkpoints_of(run_name), Contains("step-4"));
      EXPECT_THAT(checkpoints_of(run_name), Not(Contains("step-8")));
      EXPECT_EQ(losses(run_name).size(), 6U);
      // The CPU says the same.
      EXPECT_EQ(run(config_for("on_cpu"), ranks, {.on_cpu = true, .prepare = spoil(7)}), error);
      // The run goes on from its checkpoint, as if nothing had happened.
      EXPECT_EQ(run(config_for("spoilt"), ranks), "");
      EXPECT_EQ(run(config_for("whole"), ranks), "");
      EXPECT_EQ(losses(run_name), losses(fmt::format("whole_{}_{}", optimizer, ranks)));
    }
  }
}

// In the step right before a validation, a save or the end, and in the first one.
TEST_F(TrainerWaits, NothingIsSavedOfAStepThatIsNotFinite) {
  for (const int step : {1, 4, 6, 12}) {
    SCOPED_TRACE(step);
    const std::string name = fmt::format("run_{}", step);
    const auto in_one_pass =
        config_of({.name = name}, name, {"--checkpoint.interval=4", "--checkpoint.async_mode=async"});
    EXPECT_THAT(run(in_one_pass, 1, {.prepare = spoil(step)}),
                HasSubstr(fmt::format("step {}: the gradient norm is nan", step)));
    const std::string newest = fmt::format("step-{}", step);
    EXPECT_FALSE(std::filesystem::exists(path(name) + "/checkpoint/" + newest));
    EXPECT_EQ(values_of(name, "grad_norm").size(), static_cast<std::size_t>(step - 1));
  }
}

TEST_F(TrainerWaits, AStepThatIsNotFiniteChangesNothingWhereWeightsAreCut) {
  const std::vector<std::string> wild = {"--optimizer.lr=1e25", "--training.max_norm=0",
                                         "--lr_scheduler.warmup_steps=0", "--optimizer.name=SGD",
                                         "--checkpoint.no-enable"};
  for (const Layout& layout :
       {Layout{.name = "zero3", .ranks = 2, .keys = sharded(3)}, Layout{.name = "tp", .ranks = 2, .tp = 2}}) {
    SCOPED_TRACE(layout.name);
    Bytes before, after;
    std::mutex mutex;
    const auto keep = [&](Bytes& state) {
      return [&](Trainer& trainer, int rank) {
        const std::lock_guard lock(mutex);
        add_state(state, trainer, rank);
      };
    };
    EXPECT_EQ(run(config_of(layout, layout.name + "_stopped", wild), 2,
                  {.stop = [](int) { return true; }, .finish = keep(before)}),
              "");
    EXPECT_EQ(result_.step, 1);
    EXPECT_THAT(run(config_of(layout, layout.name, wild), 2, {.finish = keep(after)}), HasSubstr("step 2: the "));
    EXPECT_EQ(after, before);
  }
}

// The scale is set on the device, by the CPU's rules: it starts too high, is halved after each skipped step, and is
// doubled after four steps in a row. Which scales are too high depends on the kernels, so the losses are the CPU's only
// as long as the scales are.
TEST_F(TrainerWaits, Float16SkipsStepsByTheRulesOfTheCpu) {
  for (const Layout& layout : {Layout{.name = "one"}, Layout{.name = "ddp", .ranks = 2},
                               Layout{.name = "zero3", .ranks = 2, .keys = sharded(3)}}) {
    SCOPED_TRACE(layout.name);
    const auto config_for = [&](const std::string& kind) {
      return config_of(layout, layout.name + kind,
                       {"--training.mixed_precision_param=float16", "--training.initial_loss_scale=268435456",
                        "--training.loss_scale_window=4", "--training.steps=24"});
    };
    std::map<std::string, std::vector<double>> scales;
    for (const std::string kind : {"_cpu", "_sim"}) {
      SCOPED_TRACE(kind);
      EXPECT_EQ(run(config_for(kind), layout.ranks, {.on_cpu = kind == "_cpu"}), "");
      const std::vector<double>& found = scales[kind] = values_of(layout.name + kind, "loss_scale");
      ASSERT_EQ(found.size(), 24U);
      EXPECT_EQ(found[0], 268435456);
      std::size_t skipped = 0, doubled = 0;
      for (std::size_t i = 0, in_a_row = 0; i + 1 < found.size(); ++i) {
        const bool is_skipped = found[i + 1] < found[i];
        in_a_row = is_skipped ? 0 : in_a_row + 1;
        const double expected = is_skipped ? found[i] / 2 : in_a_row == 4 ? found[i] * 2 : found[i];
        EXPECT_EQ(found[i + 1], expected) << i;
        skipped += is_skipped ? 1 : 0;
        doubled += in_a_row == 4 ? 1 : 0;
        if (in_a_row == 4) in_a_row = 0;
      }
      EXPECT_GE(skipped, 2U);
      EXPECT_GE(doubled, 1U);
      EXPECT_GE(lines_with(layout.name + kind, "skipped").size(), skipped);
    }
    const auto expected = losses(layout.name + "_cpu"), found = losses(layout.name + "_sim");
    ASSERT_EQ(found.size(), expected.size());
    std::size_t same = 0;
    while (same < found.size() && scales["_cpu"][same] == scales["_sim"][same]) ++same;
    EXPECT_GE(same, 8U);
    for (std::size_t i = 0; i < same; ++i) EXPECT_NEAR(found[i], expected[i], 1e-3 * expected[i]) << i;
  }
}

TEST_F(TrainerWaits, ALossScaleThatCannotFallEndsTheRunAsOnTheCpu) {
  std::vector<std::string> errors;
  for (const bool on_cpu : {true, false}) {
    errors.push_back(run(
        config(on_cpu ? "cpu" : "sim",
               {"--training.mixed_precision_param=float16", "--training.steps=100", "--training.initial_loss_scale=1"}),
        1, {.on_cpu = on_cpu, .prepare = [](Trainer& trainer) {
              trainer.model().output->weight.register_hook([](const at::Tensor& grad) { return grad.mul(NAN); });
            }}));
  }
  EXPECT_THAT(errors[0], HasSubstr("loss scaler: the gradients are not finite"));
  EXPECT_EQ(errors[1], errors[0]);
  EXPECT_EQ(values_of("sim", "loss_scale"), values_of("cpu", "loss_scale"));
}

}  // namespace
}  // namespace phalanx::train
