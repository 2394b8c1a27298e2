#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <cmath>

#include "phalanx/base/human.h"
#include "phalanx/config/training_shape.h"
#include "phalanx/lecture/picture.h"
#include "phalanx/lecture/steps.h"
#include "phalanx/plan/scenario.h"

namespace phalanx::lecture {
namespace {

std::string gigabytes(double bytes) { return fmt::format("{:.{}f} GB", bytes / 1e9, bytes < 10e9 ? 1 : 0); }

}  // namespace

void spawn_ranks(Stage& stage) {
  for (const int n : stage.worlds()) {
    stage.on_ranks(n, [n](Rank& rank) {
      at::Tensor sum = at::full({1}, rank.number(), rank.floats());
      rank.comm().all_reduce(sum);
      rank.say(fmt::format("world size {}", n),
               fmt::format("device {}, sum {:.0f}", rank.device().str(), sum.item<double>()));
      rank.check(sum.item<double>() * 2 == n * (n - 1), "every rank has its own number");
    });
  }
}

void model_sizes(Stage& stage) {
  constexpr double kH100 = 80e9;
  constexpr double kMark = 40e9;  // of the state
  stage.print(fmt::format("{:>12} {:>12} {:>12} {:>14} {:>12}  {}", "parameters", "bf16", "with Adam", "80 GB devices",
                          "1 T tokens", "#: 40 GB"));
  std::vector<Bar> bars = {{"one device", kH100 / 1.2e12, "80 GB", "sum"}};
  for (const double billions : {1.0, 8.0, 70.0}) {
    const double parameters = billions * 1e9, state = 16 * parameters;
    const double days = 6 * parameters * 1e12 / (0.4 * 989e12) / 86400;
    stage.print(fmt::format("{:>11.0f}B {:>12} {:>12} {:>14.0f} {:>12}  {}", billions, gigabytes(2 * parameters),
                            gigabytes(state), std::ceil(state / kH100), fmt::format("{:.0f} days", days),
                            std::string(static_cast<std::size_t>(std::ceil(state / kMark)), '#')));
    const std::string name = fmt::format("{:.0f}B", billions);
    bars.push_back({name + " in bf16", 2 * parameters / 1.2e12, gigabytes(2 * parameters), "t0"});
    bars.push_back({name + " with Adam", state / 1.2e12,
                    fmt::format("{}: {:.0f} device(s); {:.0f} days for 1 T tokens", gigabytes(state),
                                std::ceil(state / kH100), days),
                    "t1"});
  }
  stage.show({picture_of_bars("bytes of the state, and the time of one device", bars)});
  const double embedding = 128000.0 * 8192;
  stage.print(
      fmt::format("an embedding of 128,000 x 8,192: {} parameters, {} in 16 bits, {} with Adam in mixed precision",
                  human_count(embedding), gigabytes(2 * embedding), gigabytes(16 * embedding)));
}

void three_scenarios(Stage& stage) {
  struct Case {
    const char *model, *devices;
    std::int64_t seq;
    int expected;
  };
  constexpr double kHeadroom = 0.05;  // of a device, for its allocator
  bool as_expected = true;
  for (const Case& one : {Case{"llama3_1b", "4xA100", 2048, 1}, Case{"llama3_8b", "8xH100", 8192, 2},
                          Case{"llama3_8b", "16xRTX4090", 98304, 3}}) {
    config::TrainConfig run;  // as `phalanx plan --model --devices --seq --dtype bfloat16`
    run.model.flavor = one.model;
    run.training.seq_len = one.seq;
    run.training.mixed_precision_param = "bfloat16";
    plan::TrainingShape shape = config::shape_without_layout(run);
    shape.on_device = true;
    const plan::Devices devices = plan::parse_devices(one.devices, {});
    const plan::Scenario scenario = plan::find_scenario(shape, devices, kHeadroom);
    const std::int64_t whole = scenario.whole.total(), room = plan::usable(devices.largest(), kHeadroom);
    const auto bytes = [](std::int64_t count) { return human_bytes(static_cast<std::uint64_t>(count)); };
    stage.print(fmt::format("{} on {}: scenario {}; layer ({}) {}; DDP: {}, {} {} {}", one.model, one.devices,
                            scenario.number, scenario.layer.name, bytes(scenario.layer.total()),
                            whole <= room ? "fits" : "does not fit", bytes(whole), whole <= room ? "<=" : ">",
                            bytes(room)));
    as_expected = as_expected && scenario.number == one.expected && (whole <= room) == (one.expected == 1);
  }
  stage.check(as_expected, "the three are scenarios 1, 2 and 3");
}

}  // namespace phalanx::lecture
