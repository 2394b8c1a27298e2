#include "phalanx/train/trainer.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <torch/version.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <exception>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/log.h"
#include "phalanx/base/process_stats.h"
#include "phalanx/base/progress.h"
#include "phalanx/checkpoint/checkpoint_list.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/data/token_statistics.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/train/autocast_guard.h"
#include "phalanx/train/device_info.h"
#include "phalanx/train/log_line.h"
#include "phalanx/train/model_config.h"
#include "phalanx/train/token_batch.h"

namespace phalanx::train {
namespace {

using Clock = std::chrono::steady_clock;
using observe::TraceSpan;

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Found out before the first step: otherwise all steps up to the first save would be lost.
void check_can_save(const std::string& folder) {
  posix_file_system().make_directory(folder);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw CheckpointError(fmt::format("[checkpoint] folder: cannot write to '{}': {}", folder, std::strerror(errno)));
  }
}

/// A checkpoint folder stands for its newest complete step; files, step directories and folders of weights for
/// themselves.
std::filesystem::path initial_weights(const TrainConfig::Checkpoint& config) {
  const std::filesystem::path path = config.initial_load_path;
  if (!std::filesystem::exists(path)) {
    throw CheckpointError(fmt::format("[checkpoint] initial_load_path '{}' does not exist", path.string()));
  }
  if (config.initial_load_in_hf || !std::filesystem::is_directory(path)) return path;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().extension() == ".safetensors") return path;
  }
  return resolve_checkpoint(path);
}

/// The directory of [checkpoint] load_step.
std::filesystem::path chosen_step(const std::string& folder, std::int64_t step) {
  const std::filesystem::path path = step_directory(folder, step);
  if (std::filesystem::exists(path)) return path;
  std::string there;
  for (const auto& found : list_checkpoints(folder).complete) {
    there += fmt::format("{}{}", there.empty() ? "" : ", ", found.step);
  }
  throw CheckpointError(fmt::format("[checkpoint] load_step is {}, but there is no {}; complete checkpoints there: {}",
                                    step, path.string(), there.empty() ? "none" : there));
}

std::string number_text(double value) { return std::isnan(value) ? "nan" : fmt::format("{:.5g}", value); }

bool cpu_has_bfloat16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

std::unique_ptr<Optimizer> make_optimizer(const TrainConfig::Optimizer& config, std::vector<NamedTensor> parameters) {
  if (config.name == "SGD") {
    return std::make_unique<Sgd>(std::move(parameters),
                                 SgdOptions{.momentum = config.momentum, .weight_decay = config.weight_decay});
  }
  return std::make_unique<AdamW>(
      std::move(parameters),
      AdamWOptions{
          .beta1 = config.beta1, .beta2 = config.beta2, .eps = config.eps, .weight_decay = config.weight_decay});
}

nlohmann::json model_metadata(const models::LlamaConfig& model, const TrainConfig& config) {
  return {{"model",
           {{"name", config.model.name},
            {"flavor", config.model.flavor},
            {"dim", model.dim},
            {"n_layers", model.n_layers},
            {"n_heads", model.n_heads},
            {"n_kv_heads", model.n_kv_heads},
            {"ffn_hidden", model.ffn_hidden},
            {"vocab_size", model.vocab_size},
            {"max_seq_len", model.max_seq_len},
            {"rope_theta", model.rope_theta},
            {"norm_eps", model.norm_eps},
            {"tie_embeddings", model.tie_embeddings}}},
          {"hf_assets_path", config.model.hf_assets_path}};
}

}  // namespace

struct Trainer::StepOutcome {
  double loss = 0;      // mean over ranks
  double max_loss = 0;  // over ranks
  double grad_norm = 0;
  double data_seconds = 0;  // of the slowest rank
  double seconds = 0;
  bool stop = false;
  std::vector<double> memory_gib;   // per rank
  std::vector<double> cpu_seconds;  // per rank, from the same point of the step before
};

Trainer::Trainer(TrainConfig config, TrainerContext context)
    : config_(std::move(config)),
      context_(std::move(context)),
      plan_(plan_batches(config_, context_.world->size())),
      trace_(config_, context_.world) {
  if (config_.debug.deterministic) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  if (config_.training.mixed_precision_param == "bfloat16" && context_.device.is_cpu() && !cpu_has_bfloat16()) {
    log::warn_once(
        "this processor has no bfloat16 instructions: mixed_precision_param = \"bfloat16\" will be slower than "
        "\"float32\"");
  }
  if (config_.lr_scheduler.warmup_steps > config_.training.steps) {
    log::warn_once(
        fmt::format("[lr_scheduler] warmup_steps {} is more than [training] steps {}: warming up over all steps",
                    config_.lr_scheduler.warmup_steps, config_.training.steps));
  }
  model_config(config_);  // wrong numbers are reported before anything is read or written
  open_data();
  const DeviceInfo device = describe_device(context_.device);
  device_name_ = device.name;
  device_bytes_ = device.total_bytes;
  make_model();
  load_state();
  on_first_rank([&] {
    files_ = std::make_unique<RunFiles>(
        config_.job.dump_folder,
        RunFilesOptions{
            .tensorboard_folder = config_.metrics.enable_tensorboard ? config_.metrics.save_tb_folder : std::string(),
            .resumed_step = step_ > 0 ? std::optional(step_) : std::nullopt});
  });
  announce();
}

Trainer::~Trainer() = default;

void Trainer::say(const std::string& line) const {
  if (!context_.quiet && is_first_rank()) log::info(line);
}

/// Rank 0 does it for all: what fails there is the same error on every rank, not a peer that was lost. Collective.
void Trainer::on_first_rank(const std::function<void()>& work) {
  std::exception_ptr failure;
  std::string message;
  if (is_first_rank()) {
    try {
      work();
    } catch (const std::exception& error) {
      failure = std::current_exception();
      message = error.what();
    }
  }
  message = context_.world->broadcast_bytes(message);
  if (failure) std::rethrow_exception(failure);
  if (!message.empty()) throw Error(message);
}

void Trainer::open_data() {
  const auto& training = config_.training;
  const std::int64_t vocab_size = model_config(config_).vocab_size;
  if (training.dataset_path.empty()) {
    throw ConfigError("[training] dataset_path is not set: expected a token file; `phalanx tokenize` makes one");
  }
  const data::TokenFile tokens(training.dataset_path, {.vocab_size = vocab_size});
  data::BatchOptions train{.seq_len = training.seq_len,
                           .global_batch_size = plan_.global_batch_size,
                           .shuffle = training.shuffle,
                           .seed = static_cast<std::uint64_t>(config_.debug.seed)};

  const auto& validation = config_.validation;
  if (validation.enable) {
    data::TokenFile held_out = tokens;
    data::TokenRange range{0, tokens.size()};
    if (validation.dataset_path.empty()) {
      const auto parts = data::split_validation(tokens.size(), validation.fraction);
      train.range = parts.train;
      range = parts.validation;
    } else {
      held_out = data::TokenFile(validation.dataset_path, {.vocab_size = vocab_size});
      range = {0, held_out.size()};
    }
    const std::int64_t local =
        validation.local_batch_size == -1 ? training.local_batch_size : validation.local_batch_size;
    validator_ =
        std::make_unique<Validator>(data::Batches(held_out, {.seq_len = training.seq_len,
                                                             .global_batch_size = local * context_.world->size(),
                                                             .shuffle = false,
                                                             .range = range}),
                                    ValidatorOptions{.local_batch_size = local,
                                                     .steps = validation.steps,
                                                     .bfloat16 = training.mixed_precision_param == "bfloat16",
                                                     .device = context_.device});
    if (is_first_rank()) result_.unigram_entropy = data::unigram_entropy(held_out, range);
  }
  batches_ = std::make_unique<data::Batches>(tokens, train);
}

void Trainer::make_model() {
  model_ = std::make_unique<DataParallelModel>(config_, plan_, context_.world, context_.device);
  const std::string folder = in_dump_folder(config_, config_.checkpoint.folder);
  const bool continues =
      config_.checkpoint.enable && (config_.checkpoint.load_step >= 0 || !list_checkpoints(folder).complete.empty());
  if (!continues) {
    if (config_.checkpoint.initial_load_path.empty()) {
      model_->initialise(static_cast<std::uint64_t>(config_.debug.seed));
    } else {
      const std::filesystem::path path = initial_weights(config_.checkpoint);
      LoadWeightsOptions options;
      if (config_.checkpoint.initial_load_in_hf) options.name_in_file = models::llama_hf_name;
      const LoadedWeights loaded = load_weights(path, model_->weights(), options);
      say(fmt::format("initial weights: {} ({})", path.string(), human_bytes(loaded.bytes)));
    }
  }
  model_->values_were_loaded();
  optimizer_ = make_optimizer(config_.optimizer, model_->parameters());
  schedule_ = std::make_unique<LearningRateSchedule>(
      LearningRateScheduleOptions{.base_lr = config_.optimizer.lr,
                                  .total_steps = config_.training.steps,
                                  .warmup_steps = config_.lr_scheduler.warmup_steps,
                                  .decay_ratio = config_.lr_scheduler.decay_ratio,
                                  .decay_type = learning_rate_decay_from(config_.lr_scheduler.decay_type),
                                  .min_lr_factor = config_.lr_scheduler.min_lr_factor});
}

TrainState Trainer::collect_state() const {
  TrainState state;
  model_->collect_state(state);
  optimizer_->collect_state(state);
  state.integers["step"] = step_;
  state.integers["seed"] = config_.debug.seed;
  state.integers["data.position"] = step_ * plan_.global_batch_size;
  return state;
}

void Trainer::load_state() {
  const auto& checkpoint = config_.checkpoint;
  if (!checkpoint.enable) return;
  const std::string folder = in_dump_folder(config_, checkpoint.folder);
  on_first_rank([&] { check_can_save(folder); });
  checkpoints_ = std::make_unique<CheckpointManager>(
      folder, CheckpointOptions{.keep_latest_k = static_cast<int>(checkpoint.keep_latest_k)}, context_.world);
  TrainState state = collect_state();
  if (checkpoint.async_mode == "async") checkpoints_->reserve(state);
  std::optional<LoadedCheckpoint> loaded;
  if (checkpoint.load_step >= 0) {
    loaded = checkpoints_->load(chosen_step(folder, checkpoint.load_step), state);
  } else {
    loaded = checkpoints_->load_latest(state);
  }
  if (!loaded) return;
  model_->values_were_loaded();
  step_ = saved_step_ = state.integers.at("step");
  say(fmt::format("continuing from {} (step {}, {})", loaded->path.string(), step_, human_bytes(loaded->bytes)));
  if (state.integers.at("seed") != config_.debug.seed) {
    log::warn_once(
        fmt::format("the checkpoint's run had debug.seed {}, this one has {}: the order of the data changes here",
                    state.integers.at("seed"), config_.debug.seed));
  }
  if (state.integers.at("data.position") != step_ * plan_.global_batch_size) {
    log::warn_once(
        fmt::format("the checkpoint's run had read {} sequences in {} steps, this one would have read {}: the "
                    "global batch differs, so the data continue at another position",
                    state.integers.at("data.position"), step_, step_ * plan_.global_batch_size));
  }
}

Trainer::StepOutcome Trainer::train_step(std::int64_t step) {
  const auto begin = Clock::now();
  StepOutcome outcome;
  const int rank = context_.world->rank(), size = context_.world->size();
  const bool bfloat16 = config_.training.mixed_precision_param == "bfloat16";
  const std::int64_t parts = plan_.accumulation_steps;
  observe::TraceRecorder* const tracing = trace_.recorder();
  const at::Tensor share = at::full({}, 1.0 / static_cast<double>(parts), at::TensorOptions(context_.device));

  double data_seconds = 0, loss = 0;
  at::Tensor loss_sum;
  for (std::int64_t part = 0; part < parts; ++part) {
    TokenBatch batch;
    {
      const TraceSpan span(tracing, "data loading", "data");
      const auto data_begin = Clock::now();
      const auto rows = batches_->rows_of({.rank = rank, .ranks = size, .micro_batch = part, .micro_batches = parts});
      batch = load_batch(*batches_, step, rows, context_.device);
      data_seconds += seconds_since(data_begin);
    }

    const std::shared_ptr<void> local_only = part + 1 < parts ? model_->no_sync() : nullptr;
    at::Tensor part_loss;
    {
      const TraceSpan span(tracing, "forward", "compute");
      const AutocastGuard autocast(context_.device.type(), bfloat16);
      part_loss = model().loss(batch.inputs, batch.labels);
    }
    {
      const TraceSpan span(tracing, "backward", "compute");
      const double exposed_before = tracing ? model_->exposed_seconds() : 0;
      part_loss.backward(share);
      if (tracing && !local_only) trace_.backward_done(model_->exposed_seconds() - exposed_before);
    }
    const at::Tensor detached = part_loss.detach();
    loss_sum = loss_sum.defined() ? loss_sum + detached : detached;
  }
  const double max_norm =
      config_.training.max_norm > 0 ? config_.training.max_norm : std::numeric_limits<double>::infinity();
  const GradNorm norm = [&] {
    const TraceSpan span(tracing, "gradient clipping", "compute");
    return clip_grad_norm(optimizer_->parameters(), max_norm, model_->norm_ranks());
  }();
  loss = loss_sum.item<double>() / static_cast<double>(parts);

  // All that the ranks tell each other in a step, in one small collective.
  constexpr std::int64_t kFields = 5;
  const double cpu_now = process_cpu_seconds();
  const double mine[kFields] = {loss, context_.stop_requested && context_.stop_requested() ? 1.0 : 0.0, data_seconds,
                                static_cast<double>(peak_device_bytes(context_.device)) / kGiB,
                                cpu_now - last_cpu_seconds_};
  last_cpu_seconds_ = cpu_now;
  // On the host, also where the device is a GPU: so whatever went wrong between the ranks in this step is thrown here,
  // before anybody looks at what the device has computed since.
  const at::Tensor host = at::empty({size, kFields}, at::TensorOptions(at::kDouble));
  {
    const TraceSpan span(tracing, "step metrics", "comm");
    context_.world->all_gather(host, at::tensor(at::ArrayRef<double>(mine, kFields), at::TensorOptions(at::kDouble)));
  }
  const auto* values = host.const_data_ptr<double>();
  outcome.max_loss = -std::numeric_limits<double>::infinity();
  for (int r = 0; r < size; ++r, values += kFields) {
    outcome.loss += values[0] / size;
    outcome.max_loss = std::max(outcome.max_loss, values[0]);
    outcome.stop = outcome.stop || values[1] != 0;
    outcome.data_seconds = std::max(outcome.data_seconds, values[2]);
    outcome.memory_gib.push_back(values[3]);
    outcome.cpu_seconds.push_back(values[4]);
  }
  outcome.grad_norm = norm.value();
  if (!std::isfinite(outcome.loss) || !norm.is_finite()) {
    const bool is_loss = !std::isfinite(outcome.loss);
    throw Error(fmt::format(
        "step {}: the {} is {} (loss {}, gradient norm {}, learning rate {:.3g}): the weights were not "
        "changed by it; try a lower [optimizer] lr, a longer warm-up or a smaller max_norm{}",
        step + 1, is_loss ? "loss" : "gradient norm", number_text(is_loss ? outcome.loss : outcome.grad_norm),
        number_text(outcome.loss), number_text(outcome.grad_norm), schedule_->lr_at(step),
        saved_step_ >= 0 ? fmt::format("; the last checkpoint is of step {}", saved_step_) : ""));
  }
  {
    const TraceSpan span(tracing, "optimizer", "compute");
    optimizer_->step(schedule_->lr_at(step));
    optimizer_->zero_grad();
  }
  outcome.seconds = seconds_since(begin);
  return outcome;
}

void Trainer::log_step(const StepOutcome& outcome, double lr) {
  const double device_tokens =
      static_cast<double>(plan_.global_batch_size * config_.training.seq_len) / plan_.world_size;
  const double flops = model_->model().flops_per_token(config_.training.seq_len);
  const bool to_log = step_ == 1 || step_ % config_.metrics.log_freq == 0 || step_ == config_.training.steps;
  StepMetrics metrics{.step = step_,
                      .loss = outcome.loss,
                      .max_loss = outcome.max_loss,
                      .grad_norm = outcome.grad_norm,
                      .lr = lr,
                      .seconds = outcome.seconds,
                      .data_seconds = outcome.data_seconds,
                      .tokens = plan_.global_batch_size * config_.training.seq_len,
                      .tps = device_tokens / outcome.seconds,
                      .memory_gib = outcome.memory_gib,
                      .cpu_seconds = outcome.cpu_seconds};
  metrics.tflops = metrics.tps * flops / 1e12;
  if (peak_tflops_) metrics.mfu_percent = 100.0 * metrics.tflops / *peak_tflops_;
  files_->write_step(metrics, to_log);
  if (!to_log) return;

  // The line's speed is that of all steps since the line before.
  const double tps = static_cast<double>(interval_tokens_) / plan_.world_size / interval_seconds_;
  const double tflops = tps * flops / 1e12;
  const double memory = outcome.memory_gib[0];
  say(step_line({.step = step_,
                 .loss = outcome.loss,
                 .grad_norm = outcome.grad_norm,
                 .memory_gib = memory,
                 .memory_percent = device_bytes_ ? 100.0 * memory * kGiB / static_cast<double>(device_bytes_) : 0,
                 .tokens_per_second = tps,
                 .tflops = tflops,
                 .mfu_percent = peak_tflops_ ? std::optional(100.0 * tflops / *peak_tflops_) : std::nullopt}));
  interval_seconds_ = 0;
  interval_tokens_ = 0;
}

void Trainer::validate() {
  const TraceSpan span(trace_.recorder(), "validation", "validation");
  const ValidationMetrics metrics = validator_->run(model(), *context_.world, step_, model_->is_sharded());
  result_.validation_loss = metrics.loss;
  if (!files_) return;
  files_->write_validation(metrics);
  const double memory = static_cast<double>(peak_device_bytes(context_.device));
  say(validation_line({.step = step_,
                       .loss = metrics.loss,
                       .memory_gib = memory / kGiB,
                       .memory_percent = device_bytes_ ? 100.0 * memory / static_cast<double>(device_bytes_) : 0,
                       .tokens_per_second = static_cast<double>(metrics.tokens) / plan_.world_size / metrics.seconds}));
}

void Trainer::save_checkpoint() {
  if (!checkpoints_ || saved_step_ == step_) return;
  const TraceSpan span(trace_.recorder(), "checkpoint save", "checkpoint");
  const auto begin = Clock::now();
  if (config_.checkpoint.async_mode == "async") {
    checkpoints_->save_async(collect_state(), step_, model_metadata(model().config(), config_).dump());
    saved_step_ = step_;
    say(fmt::format("saving step {} while training goes on (copied in {})", step_,
                    human_duration(seconds_since(begin))));
    return;
  }
  const SavedCheckpoint saved =
      checkpoints_->save(collect_state(), step_, model_metadata(model().config(), config_).dump());
  saved_step_ = step_;
  say(fmt::format("saved {} ({}, {})", saved.path.string(), human_bytes(saved.bytes),
                  human_duration(seconds_since(begin))));
}

/// The run is not over before its last checkpoint is on the disk. Collective.
void Trainer::finish_saving() {
  if (!checkpoints_) return;
  const auto begin = Clock::now();
  if (const auto saved = checkpoints_->finish()) {
    say(fmt::format("saved {} ({}, waited {})", saved->path.string(), human_bytes(saved->bytes),
                    human_duration(seconds_since(begin))));
  }
}

void Trainer::export_in_hf() {
  if (!config_.checkpoint.last_save_in_hf) return;
  const std::vector<NamedTensor> whole = model_->whole_on_first_rank();
  if (!is_first_rank()) return;
  const std::filesystem::path folder = std::filesystem::path(config_.job.dump_folder) / "hf";
  std::filesystem::create_directories(folder);
  export_weights(folder / "model.safetensors", whole, {.name_in_file = models::llama_hf_name}, posix_file_system());
  const models::LlamaConfig& model = model_->model().config();
  const nlohmann::json description = {{"architectures", {"LlamaForCausalLM"}},
                                      {"model_type", "llama"},
                                      {"hidden_size", model.dim},
                                      {"intermediate_size", model.ffn_hidden},
                                      {"num_hidden_layers", model.n_layers},
                                      {"num_attention_heads", model.n_heads},
                                      {"num_key_value_heads", model.n_kv_heads},
                                      {"head_dim", model.head_dim()},
                                      {"vocab_size", model.vocab_size},
                                      {"max_position_embeddings", model.max_seq_len},
                                      {"rope_theta", model.rope_theta},
                                      {"rms_norm_eps", model.norm_eps},
                                      {"tie_word_embeddings", model.tie_embeddings},
                                      {"hidden_act", "silu"},
                                      {"attention_bias", false},
                                      {"mlp_bias", false},
                                      {"torch_dtype", "float32"}};
  replace_file(folder / "config.json", description.dump(2) + "\n");
  say(fmt::format("wrote {}", (folder / "model.safetensors").string()));
}

std::vector<std::pair<std::string, std::string>> Trainer::description() const {
  const models::LlamaConfig& model = model_->model().config();
  const auto& training = config_.training;
  std::vector<std::pair<std::string, std::string>> lines = {
      {"libtorch", TORCH_VERSION},
      {"device", fmt::format("{} ({}, {})", context_.device.str(), device_name_, human_bytes(device_bytes_))},
      {"ranks", fmt::format("{}, backend {}, {} thread{} each", plan_.world_size, context_.world->backend_name(),
                            at::get_num_threads(), at::get_num_threads() == 1 ? "" : "s")}};
  lines.insert(lines.end(), context_.environment.begin(), context_.environment.end());
  lines.emplace_back("model",
                     fmt::format("llama {}: {} parameters, dim {}, {} layers, {}/{} heads, ffn {}, vocabulary {}",
                                 config_.model.flavor, with_commas(model_->model().parameter_count()), model.dim,
                                 model.n_layers, model.n_heads, model.n_kv_heads, model.ffn_hidden, model.vocab_size));
  if (plan_.world_size > 1) lines.emplace_back("layout", model_->layout());
  lines.emplace_back("memory", model_->memory_text());
  lines.emplace_back("precision", training.mixed_precision_param == "bfloat16"
                                      ? "bfloat16 matrix products (autocast), float32 weights"
                                      : "float32");
  lines.emplace_back("data", batches_->tokens().description());
  lines.emplace_back(
      "batch", fmt::format("{} sequences x {} tokens x {} rank{} x {} accumulated = {} tokens a step",
                           plan_.local_batch_size, training.seq_len, plan_.world_size, plan_.world_size == 1 ? "" : "s",
                           plan_.accumulation_steps, with_commas(plan_.global_batch_size * training.seq_len)));
  const double epochs =
      static_cast<double>(training.steps * plan_.global_batch_size) / static_cast<double>(batches_->sample_count());
  lines.emplace_back(
      "steps",
      fmt::format("{} ({} tokens, {:.2f} epochs)", training.steps,
                  human_count(static_cast<double>(training.steps * plan_.global_batch_size * training.seq_len)),
                  epochs));
  if (validator_) {
    lines.emplace_back("validation",
                       fmt::format("{} tokens every {} steps, unigram entropy {:.4f}",
                                   with_commas(validator_->sample_count(plan_.world_size) * training.seq_len),
                                   config_.validation.freq, result_.unigram_entropy.value_or(0)));
  }
  lines.emplace_back("folder", config_.job.dump_folder);
  return lines;
}

void Trainer::announce() const {
  if (!is_first_rank()) return;
  nlohmann::json environment = nlohmann::json::object();
  for (const auto& [name, value] : description()) {
    say(fmt::format("{}: {}", name, value));
    environment[name] = value;
  }
  nlohmann::json run = {{"description", config_.job.description},
                        {"status", "running"},
                        {"steps", config_.training.steps},
                        {"parameters", model_->model().parameter_count()},
                        {"world_size", plan_.world_size},
                        {"model", fmt::format("llama {}", config_.model.flavor)},
                        {"layout", model_->layout()},
                        {"config", print_config(with_model_numbers(config_))},
                        {"environment", environment}};
  if (result_.unigram_entropy) run["unigram_entropy"] = *result_.unigram_entropy;
  files_->describe(run);
}

TrainResult Trainer::run() {
  result_.step = step_;
  result_.loss = std::numeric_limits<double>::quiet_NaN();
  const std::int64_t steps = config_.training.steps;
  if (step_ >= steps) say(fmt::format("nothing to train: step {} of {} is done", step_, steps));
  const bool show_bar = is_first_rank() && !context_.quiet && ::isatty(STDERR_FILENO);
  ProgressBar bar("training", static_cast<std::uint64_t>(steps),
                  {.unit = ProgressUnit::steps,
                   .style = show_bar ? ProgressStyle::bar : ProgressStyle::silent,
                   .start = static_cast<std::uint64_t>(std::min(step_, steps))});
  bool first = true;
  last_cpu_seconds_ = process_cpu_seconds();
  while (step_ < steps && !result_.stopped) {
    const double lr = schedule_->lr_at(step_);
    trace_.begin(step_ + 1);
    const StepOutcome outcome = train_step(step_);
    ++step_;
    result_.step = step_;
    result_.loss = outcome.loss;
    interval_seconds_ += outcome.seconds;
    interval_tokens_ += plan_.global_batch_size * config_.training.seq_len;
    if (files_) log_step(outcome, lr);
    if (first) {
      context_.world->mark_started();
      if (files_) peak_tflops_ = device_peak_tflops(context_.device, device_name_);
      first = false;
    }
    const bool last = step_ == steps;
    if (validator_ && (last || step_ % config_.validation.freq == 0)) validate();
    if (last || outcome.stop || step_ % config_.checkpoint.interval == 0) save_checkpoint();
    if (const std::string path = trace_.end(step_); !path.empty()) say(fmt::format("trace: {}", path));
    result_.stopped = outcome.stop && !last;
    bar.set_note(fmt::format("loss {:.4f}", outcome.loss));
    bar.advance();
  }
  bar.finish();
  finish_saving();
  trace_.close();  // a stop may have come in the middle of what one file was to hold
  if (result_.stopped) {
    say(checkpoints_
            ? fmt::format("stopped on request after step {}: run the same command to continue", step_)
            : fmt::format("stopped on request after step {}; checkpoints are disabled, so nothing was saved", step_));
  } else {
    export_in_hf();
  }

  const std::vector<std::string> memory =
      context_.world->gather_bytes(fmt::format("{} {}", peak_resident_bytes() >> 20, proportional_bytes() >> 20));
  if (files_) {
    nlohmann::json peak = nlohmann::json::array(), pss = nlohmann::json::array();
    for (const std::string& rank : memory) {
      const std::size_t space = rank.find(' ');
      peak.push_back(std::stoll(rank.substr(0, space)));
      pss.push_back(std::stoll(rank.substr(space + 1)));
    }
    files_->describe({{"status", result_.stopped ? "stopped" : "finished"},
                      {"peak_rss_mib", peak},
                      {"pss_mib", pss},
                      {"steps_done", step_}});
    if (result_.validation_loss) files_->describe({{"validation_loss", *result_.validation_loss}});
  }
  return result_;
}

}  // namespace phalanx::train
