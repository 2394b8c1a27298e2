#include "cli/train_worker.h"

#include <fmt/format.h>

#include <chrono>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/comm/local.h"
#include "phalanx/launch/worker_report.h"
#include "phalanx/train/config.h"
#include "phalanx/train/model_config.h"
#include "phalanx/train/report.h"
#include "phalanx/train/stop_signal.h"
#include "phalanx/train/trainer.h"

namespace phalanx::cli {
namespace {

// The longest that a step and a save after a signal may take before the launcher loses patience.
constexpr std::chrono::seconds kGracefulStop{120};

void conclude(const train::TrainConfig& config, train::Trainer& trainer, const train::TrainResult& result) {
  if (!trainer.files()) return;
  if (result.validation_loss && result.unigram_entropy) {
    log::info(fmt::format("validation loss {:.4f}, {:.3f} x the unigram entropy {:.4f}", *result.validation_loss,
                          *result.validation_loss / *result.unigram_entropy, *result.unigram_entropy));
  }
  log::info(fmt::format("run: {}", trainer.files()->folder()));
  if (config.metrics.enable_report) {
    log::info(fmt::format("report: {}", train::write_report(trainer.files()->folder())));
  }
}

}  // namespace

// Called by `phalanx` with [--print-config] CONFIG [overrides].
int train_worker(const Arguments& arguments) {
  Arguments rest = arguments;
  const bool only_print = take_flag(rest, "--print-config");
  if (rest.empty()) throw UsageError("expected a configuration file");
  const train::TrainConfig config = train::read_config(rest[0], {rest.begin() + 1, rest.end()});
  if (only_print) {
    fmt::print("{}", train::print_config(train::with_model_numbers(config)));
    return 0;
  }

  const train::StopSignal stop;
  announce_graceful_stop(kGracefulStop);
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    train::Trainer trainer(config, {.world = world, .stop_requested = [&stop] { return stop.requested(); }});
    const train::TrainResult result = trainer.run();
    conclude(config, trainer, result);
  });
  return 0;
}

}  // namespace phalanx::cli
