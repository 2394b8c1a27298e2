#include "phalanx/train/trainer.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/log.h"
#include "phalanx/base/process_stats.h"
#include "phalanx/base/progress.h"
#include "phalanx/checkpoint/adapter_weights.h"
#include "phalanx/config/config_checks.h"
#include "phalanx/config/model_config.h"
#include "phalanx/config/run_identity.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"
#include "phalanx/launch/libtorch_version.h"
#include "phalanx/nn/init.h"
#include "phalanx/train/conversation_files.h"
#include "phalanx/train/hf_export.h"
#include "phalanx/train/inputs/data_resume.h"
#include "phalanx/train/inputs/initial_adapter.h"
#include "phalanx/train/inputs/initial_weights.h"
#include "phalanx/train/model/nf4_base.h"
#include "phalanx/train/model/precision.h"
#include "phalanx/train/model/preference_reference.h"
#include "phalanx/train/model/trained_model.h"
#include "phalanx/train/ranks/finite_weights.h"
#include "phalanx/train/ranks/first_rank.h"
#include "phalanx/train/ranks/rank_agreement.h"
#include "phalanx/train/run_description.h"

namespace phalanx::train {
namespace {

using observe::TraceSpan;

/// Compared before any collective operation depends on it.
config::TrainConfig same_on_all_ranks(config::TrainConfig config, Communicator& world) {
  require_same_on_ranks(world, "configuration", config::settings_of_all_ranks(config),
                        "start every rank with the same configuration");
  config::require_dump_folder(config);
  return config;
}

/// The same configuration may name a directory that differs, or is missing, on the node of one rank.
config::RunPlan plan_on_every_rank(const config::TrainConfig& config, const std::shared_ptr<Communicator>& world) {
  std::optional<config::RunPlan> plan;
  on_every_rank(world, [&] { plan = config::plan_run(config, world->size()); });
  return *plan;
}

/// The checkpoint holds what the reference says of the held-out pairs, too. Other training data are refused anyway.
void require_same_preferences(const nlohmann::json& saved, const nlohmann::json& now, const std::string& where) {
  const auto held_out = [](const nlohmann::json& identity) {
    nlohmann::json of = identity.value("validation", nlohmann::json::object());
    of.erase("name");
    return of;
  };
  if (held_out(saved) == held_out(now)) return;
  throw CheckpointError(
      fmt::format("{}: the held-out preferences are not those with which the checkpoint's run began, and of others it "
                  "does not hold "
                  "what the reference says: expected the same [validation] enable and fraction, and the same [dpo] "
                  "validation_preferences; or start a new run in another [job] dump_folder",
                  where));
}

}  // namespace

struct Trainer::ResumedState {
  std::filesystem::path step_directory;
  config::IdentityComparison comparison;
  DataResume data;
  std::optional<double> loss;  // of the step that was saved
};

Trainer::Trainer(config::TrainConfig config, TrainerContext context)
    : config_(same_on_all_ranks(std::move(config), *context.world)),
      context_(std::move(context)),
      plan_(plan_on_every_rank(config_, context_.world)),
      profiler_(config_, context_.world, context_.device),
      checkpoints_(
          config_, context_.world, [this](const std::string& line) { log_info(line); }, context_.job) {
  if (config_.debug.deterministic) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  set_float32_matmul_precision(config_, context_.device);
  warn_of_slow_precision(config_, context_.device);
  if (config_.lr_scheduler.warmup_steps > config_.training.steps) {
    log::warn_once(
        fmt::format("[lr_scheduler] warmup_steps {} is more than [training] steps {}: warming up over all steps",
                    config_.lr_scheduler.warmup_steps, config_.training.steps));
  }
  models::LlamaConfig model;
  on_every_rank(context_.world, [&] {
    model = config::model_config(config_);  // wrong dimensions are an error before anything is read or written
    frozen_parameters(config_, model);      // and so are wrong names
  });
  const config::TrainConfig reads =
      config_of_data(config_, context_.world,
                     {.log_info = [this](const std::string& line) { log_info(line); }, .quiet = context_.quiet});
  on_every_rank(context_.world,
                [&] { data_ = open_training_data(reads, plan_, context_.device, context_.world->rank()); });
  for (const std::string& line : data_.lines) log_info(line);
  identity_ = config::run_identity({.config = config_,
                                    .plan = plan_,
                                    .model = model,
                                    .data = data_.identity,
                                    .validation = data_.validation,
                                    .tokenizer = data_.tokenizer,
                                    .libtorch = libtorch_version()});
  require_same_on_ranks(*context_.world, "model, data and tokenizer", config::files_of_all_ranks(identity_),
                        "give every rank the same files");
  result_.unigram_entropy = data_.unigram_entropy;
  device_ = describe_device(context_.device);
  // A new run is refused before its folder is made. Whether it is a new run is decided only when it holds the lock.
  if (!checkpoints_.has_checkpoint()) check_new_run();
  lock_ = std::make_unique<RunLock>(config_, *context_.world,
                                    RunLockOptions{.lock_timeout = context_.job.lock_timeout,
                                                   .log_info = [this](const std::string& line) { log_info(line); }});
  checkpoints_.decide();
  if (!checkpoints_.resumes()) {
    for (const std::string& line : check_new_run()) log_info(line);
  }
  // Before memory is counted: the matrices multiplied here are not the run's, and are freed when the run begins.
  if (is_first_rank()) peak_tflops_ = device_peak_tflops(context_.device, device_.name);
  identity_["id"] = config::run_id(config_, identity_);
  memory_ = std::make_unique<RunMemory>(config_, plan_, context_.world, context_.device, checkpoints_.resumes());
  memory_->check();
  memory_->explain_failures([this] {
    make_model();
    load_state();
    compute_references();
  });
  on_first_rank(*context_.world, [&] {
    metrics_logger_ = std::make_unique<MetricsLogger>(
        config_.job.dump_folder,
        MetricsLoggerOptions{
            .id = identity_["id"].get<std::string>(),
            .tensorboard_folder = config_.metrics.enable_tensorboard ? config_.metrics.save_tb_folder : std::string(),
            .resumed_step = step_ > 0 ? std::optional(step_) : std::nullopt,
            .resumed_loss = resumed_ ? resumed_->loss : std::nullopt,
            .checkpoint_folder = config::in_dump_folder(config_, config_.checkpoint.folder)});
    announce();
    say_changes();
  });
}

Trainer::~Trainer() = default;

void Trainer::log_info(const std::string& line) const {
  if (!context_.quiet && is_first_rank()) log::info(line);
}

/// Returns log lines about the run's weights.
std::vector<std::string> Trainer::check_new_run() const {
  std::vector<std::string> lines;
  on_every_rank(context_.world, [&] {
    require_word_on_initial_weights(config_);
    if (!has_initial_weights(config_)) {
      lines = {fmt::format("initial weights: random, of [debug] seed {}", config_.debug.seed)};
      return;
    }
    check_initial_weights(config_);
    lines = compare_initial_weights(config_);
    initial_weights_hold_adapters(config_);
    if (!config_.lora.initial_adapter.empty()) read_initial_adapter(config_);
    for (std::string& line : compare_initial_tokenizer(config_, data_.tokenizer)) lines.push_back(std::move(line));
  });
  return lines;
}

void Trainer::compare_with_saved(const std::filesystem::path& step_directory, const Manifest& manifest) {
  const std::string where = (step_directory / kManifestName).string();
  const nlohmann::json saved = config::identity_in_metadata(manifest.metadata, where);
  const auto id = saved.find("id");  // not in older checkpoints
  identity_["id"] = id != saved.end() && id->is_string() ? *id : nlohmann::json("");
  auto comparison = config::compare_identities(saved, identity_, config_);
  // If this run does not know its tokenizer, its weights were still trained with the saved one.
  const nlohmann::json before = saved.value("tokenizer", nlohmann::json::object());
  nlohmann::json& tokenizer = identity_["tokenizer"];
  if (!data::are_other_tokenizers(before.value("fingerprint", ""), tokenizer.value("fingerprint", ""))) {
    for (const auto& [key, value] : before.items()) tokenizer.emplace(key, value);
  }
  if (!config_.dpo.preferences.empty()) require_same_preferences(saved, identity_, where);
  if (!comparison.refused.empty()) throw CheckpointError(config::refusal_text(comparison, step_directory.string()));
  DataResume data =
      resume_data(config_, *data_.dataloader, saved.value("data", nlohmann::json::object()), manifest.integers);
  const auto metadata = nlohmann::json::parse(manifest.metadata, nullptr, /*allow_exceptions=*/false);
  if (metadata.is_object()) base_ = metadata.value(kBaseInMetadata, nlohmann::json());
  std::optional<double> loss;
  if (metadata.is_object() && metadata.contains("loss") && metadata["loss"].is_number()) loss = metadata["loss"];
  resumed_ = std::make_unique<ResumedState>(ResumedState{step_directory, std::move(comparison), std::move(data), loss});
}

/// Writes to the log and to the history of run.json, to which every resume adds an entry.
void Trainer::say_changes() {
  if (!resumed_ || !metrics_logger_) return;
  const auto& [step_directory, comparison, data, loss] = *resumed_;
  nlohmann::json entry = {{"step", step_},
                          {"time", unix_time()},
                          {"layout", model_->layout()},
                          {"from", step_directory.string()},
                          {"changes", nlohmann::json::array()},
                          {"not_compared", comparison.not_compared}};
  for (const config::IdentityChange& change : comparison.changes) {
    log_info(fmt::format("changed since step {}: {}", step_, change.line()));
    entry["changes"].push_back(change.record());
  }
  if (!data.lines.empty()) entry["data"] = data.lines;
  if (!data.taken_as.empty()) entry["data"] = {data.taken_as};
  if (!comparison.not_compared.empty()) {
    log_info(fmt::format("{}: nothing to compare of {}: the checkpoint or this run does not say it{}{}",
                         step_directory.string(), fmt::join(comparison.not_compared, ", "),
                         data.taken_as.empty() ? "" : "; of its data ", data.taken_as));
  }
  metrics_logger_->add_to("history", entry);
}

void Trainer::make_model() {
  model_ = make_parallel_model(config_, plan_, context_.world, context_.device);
  flops_ = models::training_flops(model_->model().config(), model_->frozen(), config_.lora);
  if (!checkpoints_.resumes()) {
    if (!has_initial_weights(config_) || config_.lora.rank > 0) {
      model_->initialise(static_cast<std::uint64_t>(config_.debug.seed));
      if (!has_initial_weights(config_)) initialise_nf4_base(config_, *model_);
    }
    if (has_initial_weights(config_)) {
      nlohmann::json source, adapter = nlohmann::json::object();
      on_every_rank(context_.world, [&] {
        source = initial_weights_identity(config_);
        base_ = base_identity(config_);
        if (!config_.lora.initial_adapter.empty()) adapter = adapter_identity(config_.lora.initial_adapter);
      });
      require_same_on_ranks(*context_.world, "initial weights", source, "give every rank the same files");
      require_same_on_ranks(*context_.world, "initial adapter", adapter, "give every rank the same files");
      const std::vector<NamedTensor> weights = model_->with_expert_biases(model_->weights());
      on_every_rank(context_.world, [&] {
        load_initial_weights(config_, weights, [this](const std::string& line) { log_info(line); });
      });
    }
  }
  // Checked before one rank's values are sent to all.
  if (!checkpoints_.resumes()) require_same_weights(*context_.world, model_->weights());
  model_->values_were_loaded();
  optimizer_step_ = std::make_unique<OptimizerStep>(config_, model_->parameters(), model_->grad_norm_group(),
                                                    model_->frozen(), context_.world.get());
  optimizer_step_->set_expert_load(model_->expert_load());
}

TrainState Trainer::collect_state() const {
  TrainState state;
  model_->collect_state(state);
  optimizer_step_->collect_state(state);
  if (data_.reference.defined()) state.tensors.push_back({"preferences.reference", data_.reference});
  if (data_.validation_reference.defined()) {
    state.tensors.push_back({"preferences.validation_reference", data_.validation_reference});
  }
  state.integers["step"] = step_;
  state.integers[kDataSeed] = config_.debug.seed;
  state.integers.merge(data_.dataloader->saved_position(step_));
  return state;
}

void Trainer::load_state() {
  TrainState state = collect_state();
  // Older checkpoints count sequences, and those of other data have another position.
  for (const auto& [key, value] : data_.dataloader->saved_position(step_)) state.integers.erase(key);
  const auto step =
      checkpoints_.load(state, [this](const std::filesystem::path& step_directory, const Manifest& manifest) {
        compare_with_saved(step_directory, manifest);
      });
  if (!step) return;
  require_same_weights(*context_.world, model_->weights());
  step_ = *step;
  if (has_initial_weights(config_)) {
    log_info(fmt::format(
        "[checkpoint] initial weights are of a new run alone: none are read, as this one goes on from step {}", step_));
  }
  model_->values_were_loaded();
  data_.dataloader->begin_at(step_, resumed_->data.position);
  for (const std::string& line : resumed_->data.lines) log_info(line);
}

void Trainer::compute_references() {
  if (!data_.reference.defined() || resumed_) return;
  const auto begin = std::chrono::steady_clock::now();
  std::int64_t rows = 0;
  if (data_.validation_reference.defined()) rows = data_.validator->sets().front().dataloader.sample_count();
  data_.dataloader->each_file(
      [&](const std::string&, const data::DataLoader& loader) { rows += loader.sample_count(); });
  const bool shows = is_first_rank() && !context_.quiet;
  ProgressBar bar("reference", static_cast<std::uint64_t>(rows),
                  {.style = shows ? ProgressStyle::automatic : ProgressStyle::silent});
  const ReferenceOptions options{
      .local_batch_size = config_.training.local_batch_size,
      .data_parallel_rank = plan_.parallel.data_parallel_rank(context_.world->rank()),
      .data_parallel_size = plan_.parallel.data_parallel_size(),
      .cut = plan_.context_cut(context_.world->rank()),
      .autocast = autocast_dtype(config_, plan_),
      .device = context_.device,
      .on_rows = [&](std::int64_t count) { bar.advance(static_cast<std::uint64_t>(count)); }};
  data_.dataloader->each_file([&](const std::string&, const data::DataLoader& loader) {
    compute_reference(*model_, *context_.world, loader, data_.reference, options);
  });
  if (data_.validation_reference.defined()) {
    compute_reference(*model_, *context_.world, data_.validator->sets().front().dataloader, data_.validation_reference,
                      options);
  }
  bar.finish();
  const std::int64_t held_out = data_.validation_reference.defined() ? data_.validation_reference.size(0) : 0;
  log_info(fmt::format("reference: the initial weights, with log-likelihoods of {} pairs, computed in {:.1f} s",
                       with_commas(data_.reference.size(0) + held_out),
                       std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()));
}

void Trainer::save_checkpoint() {
  if (!checkpoints_.enabled() || checkpoints_.saved_step() == step_) return;
  const TraceSpan span(profiler_.recorder(), "checkpoint save", "checkpoint");
  require_sound_weights();
  checkpoints_.save(collect_state(), step_, saved_metadata());
}

// Before anything is saved. A collective that failed in a group, while all ranks live, is reported by the group's next
// call: until then the weights may be finite and wrong.
void Trainer::require_sound_weights() const {
  for (const auto& group : model_->communicators()) group->barrier();
  require_finite_weights(*context_.world, model_->weights(),
                         fmt::format("step {}, learning rate {:.3g}", step_, optimizer_step_->lr_at(step_ - 1)),
                         advice_on_divergence());
}

std::string Trainer::saved_metadata() const {
  // A path in the metadata may not be valid UTF-8.
  nlohmann::json metadata = checkpoint_metadata(model_->model().config(), config_, identity_);
  if (config_.lora.rank > 0) {
    metadata[kLoraInMetadata] = lora_metadata(config_.lora);
    if (!base_.is_null()) metadata[kBaseInMetadata] = base_;
  }
  if (std::isfinite(result_.loss)) metadata["loss"] = result_.loss;  // the loss of this step in metrics.jsonl
  return metadata.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void Trainer::with_averages(bool wanted, const std::function<void()>& body) {
  const bool swapped = wanted && optimizer_step_->swap_averages();
  if (swapped) model_->values_were_loaded();
  body();
  if (!swapped) return;
  optimizer_step_->swap_averages();
  model_->values_were_loaded();
}

void Trainer::save_results() {
  with_averages(config_.ema.use_in_export, [&] {
    save_adapters();
    save_in_hf();
  });
}

void Trainer::save_adapters() {
  if (config_.lora.rank == 0) return;
  require_sound_weights();
  const std::vector<NamedTensor> adapters = model_->full_weights_on_rank0(models::is_lora_name);
  if (!is_first_rank()) return;
  const auto folder = std::filesystem::path(config_.job.dump_folder) / "adapter";
  save_adapter(
      folder, model().config(), config_.lora, adapters,
      {.base_name = has_initial_weights(config_) ? initial_weights_name(config_) : "", .metadata = saved_metadata()});
  log_info(fmt::format("wrote the adapter to {}", folder.string()));
}

void Trainer::save_in_hf() {
  if (!config_.checkpoint.last_save_in_hf) return;
  require_sound_weights();
  std::vector<NamedTensor> whole = model_->full_weights_on_rank0();
  if (!is_first_rank()) return;
  if (config_.lora.rank > 0) whole = merged_weights(whole, model().config(), config_.lora);
  if (model().config().has_expert_biases()) whole = model_->with_expert_biases(std::move(whole));
  const auto folder = std::filesystem::path(config_.job.dump_folder) / "hf";
  const auto written = export_in_hf(
      folder, model().config(), whole,
      {.assets = config_.model.hf_assets_path,
       .metadata = saved_metadata(),
       .dtype = config_.checkpoint.export_dtype,
       .max_file_bytes = static_cast<std::uint64_t>(std::llround(config_.checkpoint.export_file_gb * 1e9))});
  log_info(fmt::format("wrote {}{} in {}", written.back().string(),
                       written.size() == 1 ? "" : fmt::format(" and the {} files it names", written.size() - 1),
                       config_.checkpoint.export_dtype));
}

std::shared_ptr<models::Llama> Trainer::full_model() const {
  const std::vector<NamedTensor> whole = model_->full_weights_on_rank0();
  if (!is_first_rank()) return nullptr;
  // A model that is cut may be too large for one device, where this rank's part of it still is.
  const at::Device where = model_->is_model_sharded() ? at::Device(at::kCPU) : context_.device;
  auto model = build_model(config_, model_->model().config(),
                           nn::TensorOptionsOfModule{.device = where, .without_memory = true});
  const at::NoGradGuard no_grad;
  for (const NamedTensor& parameter : nn::named_parameters(*model)) {
    const auto same = std::ranges::find(whole, parameter.name, &NamedTensor::name);
    at::Tensor(parameter.tensor).set_data(same->tensor.detach().to(where));
  }
  model_->use_expert_biases(*model);
  return model;
}

void Trainer::announce() const {
  if (!is_first_rank()) return;
  for (const std::string& note : metrics_logger_->notes()) log_info(note);
  const RunParts parts{.config = config_,
                       .plan = plan_,
                       .world = *context_.world,
                       .device = context_.device,
                       .device_info = device_,
                       .model = *model_,
                       .data = data_,
                       .more = context_.environment};
  const DescriptionLines lines = describe_run(parts);
  for (const auto& [name, value] : lines) log_info(fmt::format("{}: {}", name, value));
  nlohmann::json record = run_record(parts, lines);
  if (!resumed_) record["begun"] = {{"time", unix_time()}, {"layout", model_->layout()}};
  metrics_logger_->describe(record);
}

TrainResult Trainer::run() {
  memory_->explain_failures([this] { run_steps(); });
  return result_;
}

void Trainer::run_steps() {
  result_.step = step_;
  result_.loss = std::numeric_limits<double>::quiet_NaN();
  const std::int64_t steps = config_.training.steps;
  if (step_ >= steps) {
    log_info(fmt::format("nothing to train: step {} of {} is done", step_, steps));
    save_results();
    if (metrics_logger_) metrics_logger_->describe({{"status", "finished"}, {"steps_done", step_}});
    return;
  }
  const bool show_bar = is_first_rank() && !context_.quiet && ::isatty(STDERR_FILENO);
  ProgressBar bar("training", static_cast<std::uint64_t>(steps),
                  {.unit = ProgressUnit::steps,
                   .style = show_bar ? ProgressStyle::bar : ProgressStyle::silent,
                   .start = static_cast<std::uint64_t>(std::min(step_, steps))});
  std::vector<std::shared_ptr<Communicator>> communicators = model_->communicators();
  // On a device the exchange of the figures is the host's alone, while the device goes on: it does not count.
  comm_timer_ = std::make_unique<observe::CommunicationTimer>([all = communicators] {
    std::vector<std::vector<observe::FlightEntry>> groups;
    for (const auto& one : all) groups.push_back(one->recent_operations());
    return groups;
  });
  if (optimizer_step_->is_on_device() && context_.world->size() > 1) {
    metrics_group_ = context_.world->split_host("metrics");
    communicators.push_back(metrics_group_);
  }
  profiler_.watch(communicators);
  bool between_steps = false;
  begin_timing();
  last_cpu_seconds_ = process_cpu_seconds();
  const auto tell_of_steps = [&](bool runs) {
    if (context_.on_steps) context_.on_steps(runs);
  };
  if (step_ < steps) tell_of_steps(true);
  while (step_ < steps && !result_.stopped) {
    profiler_.begin(step_ + 1);
    if (between_steps) begin_timing();  // a validation or a save belongs to no step
    between_steps = false;
    bool stop = do_step();
    const bool last = step_ == steps;
    const bool validates = validates_after(step_);
    if (validates && !validate(stop)) stop = true;
    const bool saves = stop || saves_after(step_);
    if (saves) save_checkpoint();
    between_steps = validates || saves;
    // Both may take as long as many steps.
    if (between_steps && !stop && any_asked_to_stop()) {
      stop = true;
      save_checkpoint();
    }
    if (const std::string path = profiler_.end(step_); !path.empty()) log_info(fmt::format("trace: {}", path));
    result_.asked_to_stop = stop;
    result_.stopped = stop && !last;
    bar.set_postfix(fmt::format("loss {:.4f}", result_.loss));
    bar.advance();
  }
  bar.finish();
  checkpoints_.finish();
  tell_of_steps(false);
  profiler_.close();  // a stop may have come in the middle of a file's steps
  if (result_.stopped) {
    log_info(
        checkpoints_.enabled()
            ? fmt::format("stopped on request after step {}: run the same command to continue", step_)
            : fmt::format("stopped on request after step {}; checkpoints are disabled, so nothing was saved", step_));
  } else if (result_.asked_to_stop && (config_.checkpoint.last_save_in_hf || config_.lora.rank > 0)) {
    log_info(fmt::format("{} left out: the run was asked to stop; run the same command to write it",
                         config_.lora.rank > 0 ? "adapter/ is" : "hf/ is"));
  } else {
    save_results();
  }

  report_memory();
  if (!metrics_logger_) return;
  metrics_logger_->describe({{"status", result_.stopped ? "stopped" : "finished"}, {"steps_done", step_}});
  if (result_.validation_loss) metrics_logger_->describe({{"validation_loss", *result_.validation_loss}});
}

void Trainer::report_memory() {
  observe::MemoryCounts held = model_->held();
  TrainState of_optimizer;
  optimizer_step_->collect_state(of_optimizer);
  for (const auto& named : of_optimizer.tensors) {
    held[observe::MemoryCategory::optimizer] += static_cast<std::int64_t>(named.tensor.nbytes());
  }
  const RunMemory::Report report = memory_->finish(held);
  for (const std::string& line : report.lines) log_info(line);
  if (metrics_logger_) metrics_logger_->describe(*report.record);
}

}  // namespace phalanx::train
