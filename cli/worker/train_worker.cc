#include "cli/worker/train_worker.h"

#include <fmt/format.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cli/train_arguments.h"
#include "cli/worker/training_sample.h"
#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/config/config.h"
#include "phalanx/config/model_config.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/rendezvous/job_identity.h"
#include "phalanx/launch/rendezvous/worker_environment.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/report/report.h"
#include "phalanx/train/inputs/run_check.h"
#include "phalanx/train/model/float8_layers.h"
#include "phalanx/train/stop_signal.h"
#include "phalanx/train/trainer.h"

namespace phalanx::cli {
namespace {

// After a stop signal, the batch system limits the time for a step and a save: it kills when its own limit is over. The
// launcher only ends ranks that hang.
constexpr std::chrono::seconds kStopInSteps{3'600};
constexpr std::chrono::seconds kStopElsewhere{4};

CommunicatorOptions communicator_options(const config::TrainConfig& config) {
  CommunicatorOptions options{.first_timeout = std::chrono::seconds(config.comm.init_timeout_seconds),
                              .timeout = std::chrono::seconds(config.comm.train_timeout_seconds),
                              .heartbeat = std::chrono::seconds(config.comm.heartbeat_seconds),
                              .trace_prefix = config.comm.save_traces_file_prefix};
  options.strict = config.comm.strict;
  options.trace_files = config.comm.trace_buf_size > 0;
  if (options.trace_files) {
    options.trace_capacity = static_cast<std::size_t>(config.comm.trace_buf_size);
    options.trace_folder =
        env_string("PHALANX_COMM_TRACE_DIR").value_or(config::in_dump_folder(config, config.comm.save_traces_folder));
  }
  return options;
}

void conclude(const config::TrainConfig& config, train::Trainer& trainer, const train::TrainResult& result) {
  // All ranks run a sharded model together. They have the same values and so choose the same tokens.
  const bool writes_sample = !result.asked_to_stop && !config.metrics.sample_prompt.empty() &&
                             (trainer.metrics_logger() || trainer.is_model_sharded());
  std::string sample;
  if (writes_sample && trainer.model_is_only_for_training()) {
    if (const auto whole = trainer.full_model()) sample = training_sample(config, *whole);
  } else if (writes_sample) {
    const train::WithoutFloat8 without({&trainer.model()});  // as `phalanx generate` computes
    sample = training_sample(config, trainer.model());
  }
  if (!trainer.metrics_logger()) return;
  if (writes_sample) {
    trainer.metrics_logger()->describe({{"sample", {{"prompt", config.metrics.sample_prompt}, {"text", sample}}}});
  }
  if (result.validation_loss && result.unigram_entropy) {
    log::info(fmt::format("validation loss {:.4f}, {:.3f} x the unigram entropy {:.4f}", *result.validation_loss,
                          *result.validation_loss / *result.unigram_entropy, *result.unigram_entropy));
  }
  log::info(fmt::format("run: {}", trainer.metrics_logger()->folder()));
  if (config.metrics.enable_report) {
    log::info(fmt::format("report: {}", report::write_report(trainer.metrics_logger()->folder())));
  }
}

}  // namespace

int train_worker(const Arguments& arguments) {
  const TrainArguments parsed = parse_train_arguments(arguments);
  std::vector<std::string> notes;
  const WorkerEnvironment environment = read_worker_environment();
  const config::TrainConfig config =
      parsed.print_config ? config::read_config(parsed.config, parsed.overrides, &notes)
                          : train::read_run_config(parsed.config, parsed.overrides,
                                                   {.ranks = environment.world_size, .look_at_files = false}, &notes);
  if (environment.rank == 0) {
    for (const std::string& note : notes) log::warn_once(note);
  }
  if (parsed.print_config) {
    fmt::print("{}", config::print_config(config::with_model_numbers(config)));
    return 0;
  }

  if (config.metrics.disable_color_printing) log::disable_colors();
  // A file that exceeds `ulimit -f` then causes an error that names the file, instead of ending the process.
  std::signal(SIGXFSZ, SIG_IGN);
  // The reader of the log may end first (`| tee` at Ctrl-C, a closed connection). The run must not end because of that.
  std::signal(SIGPIPE, SIG_IGN);
  if (!config.metrics.sample_prompt.empty()) check_sample_tokenizer(config);
  // Kept until the process ends: a rank that fails at the same time as another must end with its own status, not by the
  // signal that the launcher then sends.
  static const train::StopSignal stop(
      {.signals = config::stop_signals(config),
       .in_steps = false,
       // Our launcher prints it for its ranks.
       .exit_message = env_string("PHALANX_REPORT_DIR") ? "" : "phalanx train: ended by a signal "});
  announce_graceful_stop(kStopElsewhere);
  const auto on_steps = [](bool runs) {
    // The launcher gives a rank at least as long as the rank takes by itself.
    if (runs) announce_graceful_stop(kStopInSteps);
    stop.set_in_steps(runs);
    if (!runs) announce_graceful_stop(kStopElsewhere);
  };
  // libtorch's profiler reads it when it starts; what it prints is of no use to who trains.
  if (config.profiling.record_kernels) ::setenv("KINETO_LOG_LEVEL", "6", /*overwrite=*/0);
  const auto start = [&] {
    return init_from_environment({.backend = config.comm.backend,
                                  .loads_kernels_at_start = config.parallelism.pipeline_parallel_degree > 1,
                                  .shared_heap = config.comm.shared_heap ? std::optional(true) : std::nullopt,
                                  .communicator = communicator_options(config)});
  };
  ProcessContext process;
  try {
    process = start();
  } catch (...) {
    stop.set_in_steps(true);  // report the error before the launcher's signal can end this process
    throw;
  }
  try {
    const JobIdentity job = job_identity();
    train::Trainer trainer(
        config, {.world = process.world,
                 .device = process.device,
                 .stop_requested = [] { return stop.requested(); },
                 .on_steps = on_steps,
                 .job = {.name = job.name, .is_restart = job.attempt > 0, .lock_timeout = predecessor_timeout(job)}});
    conclude(config, trainer, trainer.run());
  } catch (const std::exception& error) {
    stop.set_in_steps(true);
    process.world->abort(error.what());  // so that the other ranks do not wait for this one
    throw;
  }
  return 0;
}

}  // namespace phalanx::cli
