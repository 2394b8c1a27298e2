// The configuration of a training run: a TOML file with torchtitan's sections and keys, plus overrides.
//
// One table (config_schema.h) gives the type, default, range and help text of every key. The reader, the command line
// (`--section.key value`), `--print-config` and docs/configuration.md all follow from it. Errors are ConfigErrors. They
// name the file and line (or the flag), what was expected and found, and the nearest known name. All problems of a file
// and its flags are one error. `--like torchtitan` among the flags uses torchtitan's defaults.
// This header does not use torch: the command line checks a configuration without loading libtorch.
//
//   TrainConfig config = read_config("llama.toml", {"--training.steps", "100", "--checkpoint.no-enable"});
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/config/dataset_tables.h"
#include "phalanx/config/optimizer_groups.h"
#include "phalanx/models/config/lora_config.h"

namespace phalanx::config {

/// Value of model.flavor: the shape is that of config.json in model.hf_assets_path.
inline constexpr const char* kFlavorOfDirectory = "hf";

struct TrainConfig {
  struct Job {
    std::string dump_folder = "./outputs";
    std::string description = "Phalanx training";
  } job;

  struct Model {
    std::string name = "llama";
    std::string flavor = "5M";
    std::string hf_assets_path;
    // 0: the flavor's value (model_config.h).
    std::int64_t dim = 0;
    std::int64_t n_layers = 0;
    std::int64_t n_heads = 0;
    std::int64_t n_kv_heads = 0;
    std::int64_t ffn_hidden = 0;
    std::int64_t vocab_size = 0;
    double rope_theta = 0;
    double norm_eps = 0;
    std::optional<bool> tie_embeddings;
    std::vector<std::string> converters;  // uses_float8()
  } model;

  struct Optimizer {
    std::string name = "AdamW";
    double lr = 8e-4;
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double weight_decay = 0.1;
    double momentum = 0.0;
    std::string state_dtype = "float32";
    bool master_weights = true;
    bool stochastic_rounding = true;
    std::vector<std::string> no_decay;
    OptimizerGroups groups;
  } optimizer;

  /// With [optimizer] name = "Muon": of the matrices. The others are stepped by AdamW, as [optimizer] says.
  struct Muon {
    std::optional<double> lr, weight_decay;  // unset: those of [optimizer]
    double momentum = 0.95;
    bool nesterov = true;
    std::int64_t ns_steps = 5;
    std::vector<double> ns_coefficients = {3.4445, -4.7750, 2.0315};
    double eps = 1e-7;
    std::string adjust_lr_fn = "original";
    std::vector<std::string> adamw_params;
  } muon;

  /// An exponential moving average of the weights.
  struct Ema {
    double decay = 0;  // 0: none
    std::int64_t start_step = 0;
    std::int64_t update_every = 1;
    bool use_in_validation = false;
    bool use_in_export = false;
  } ema;

  struct LrScheduler {
    std::int64_t warmup_steps = 200;
    std::optional<double> decay_ratio;
    std::string decay_type = "linear";
    double min_lr_factor = 0.0;
  } lr_scheduler;

  struct Training {
    std::string dataset_path;
    Datasets datasets;  // blended by weight
    std::string dataset_dtype = "auto";
    bool allow_tokenizer_mismatch = false;
    std::int64_t local_batch_size = 8;
    std::int64_t global_batch_size = -1;
    std::int64_t num_tokens_per_microbatch_per_dp_rank = -1;  // read_config() converts it to local_batch_size
    std::int64_t num_tokens_per_train_step = -1;              // read_config() converts it to global_batch_size
    std::int64_t seq_len = 2048;
    std::vector<std::string> frozen;
    double moe_aux_loss_coeff = 0.0;
    std::string moe_aux_loss_unit = "sequence";
    double moe_z_loss_coeff = 0.0;
    bool moe_router_enable_expert_bias = false;
    double moe_router_bias_update_rate = 1e-3;
    double moe_input_jitter_eps = 0.0;
    double moe_expert_capacity_factor = 0.0;
    double max_norm = 1.0;
    double z_loss_weight = 0.0;
    std::int64_t steps = 10000;
    bool shuffle = true;
    std::string attn_mask_type = "causal";
    std::string packing = "none";
    std::string dtype = "float32";
    std::string mixed_precision_param = "float32";
    std::string mixed_precision_reduce = "float32";
    std::string float32_matmul_precision = "highest";
    double initial_loss_scale = 65536;
    std::int64_t loss_scale_window = 2000;
    bool enable_cpu_offload = false;
  } training;

  struct Stream {
    std::vector<std::string> paths;
    std::string field = "text";
    std::int64_t window = 4096;
    std::int64_t workers = 1;
    bool special_tokens = true;
  } stream;

  struct Lora : models::LoraOptions {
    std::string initial_adapter;
  } lora;

  struct Parallelism {
    std::int64_t data_parallel_replicate_degree = -1;
    std::int64_t data_parallel_shard_degree = 1;
    std::int64_t zero_stage = 3;
    std::string fsdp_reshard_after_forward = "default";  // or a number of ranks
    std::string fsdp_reduce_each_microbatch = "default";
    std::int64_t context_parallel_degree = 1;
    std::string context_parallel_exchange = "keys";
    std::string context_parallel_rotate_method = "allgather";
    std::string context_parallel_load_balancer = "auto";
    std::int64_t tensor_parallel_degree = 1;
    bool enable_sequence_parallel = true;
    bool enable_async_tensor_parallel = true;
    std::int64_t pipeline_parallel_degree = 1;
    std::string pipeline_parallel_schedule = "1F1B";
    std::int64_t pipeline_parallel_microbatch_size = 1;
    std::int64_t pipeline_parallel_stages_per_rank = 0;  // 0: the usual number for the schedule
    std::string pipeline_parallel_balance = "counted";
    std::int64_t expert_parallel_degree = 1;
  } parallelism;

  struct ActivationCheckpoint {
    std::string mode = "none";
    std::string selective_ac_option = "2";
  } activation_checkpoint;

  struct Float8 {
    std::string recipe_name = "tensorwise";
    std::vector<std::string> filter_fqns;
    bool emulate = false;
  } float8;  // [quantize.linear.float8]

  struct Checkpoint {
    bool enable = true;
    std::string folder = "checkpoint";
    std::int64_t interval = 500;
    std::int64_t keep_latest_k = 10;
    std::string async_mode = "disabled";
    std::int64_t load_step = -1;
    bool convert_dtype = false;
    std::string initial_load_path;
    bool initial_load_in_hf = false;
    bool allow_data_mismatch = false;
    bool initial_random_weights = false;
    bool allow_model_mismatch = false;
    bool last_save_in_hf = false;
    std::string export_dtype = "float32";
    double export_file_gb = 5.0;
    std::vector<std::string> stop_signals{"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"};
  } checkpoint;

  struct Metrics {
    std::int64_t log_freq = 10;
    bool enable_tensorboard = true;
    std::string save_tb_folder = "tb";
    bool enable_report = true;
    std::string sample_prompt;
    std::int64_t sample_tokens = 120;
    bool disable_color_printing = false;
  } metrics;

  struct Profiling {
    bool enable_profiling = false;
    std::int64_t profile_freq = 10;
    std::int64_t profiler_active = 1;
    std::string save_traces_folder = "profile_traces";
    bool record_kernels = false;
  } profiling;

  struct Comm {
    std::int64_t init_timeout_seconds = 300;
    std::int64_t train_timeout_seconds = 100;
    std::int64_t heartbeat_seconds = 5;
    std::string backend = "auto";
    bool shared_heap = false;
    bool strict = false;
    std::int64_t trace_buf_size = 2048;
    std::string save_traces_folder = "comm_traces";
    std::string save_traces_file_prefix = "rank_";
  } comm;

  struct Validation {
    bool enable = false;
    std::string dataset_path;
    Datasets datasets;
    double fraction = 0.05;
    std::int64_t local_batch_size = -1;  // -1: training.local_batch_size
    std::int64_t freq = 10;
    std::int64_t steps = -1;
  } validation;

  struct Sft {
    std::vector<std::string> conversations;             // empty: no fine-tuning on conversations
    std::vector<std::string> validation_conversations;  // empty: validation.fraction of the conversations
    std::string chat_template;
    std::string too_long = "cut";
    bool skip_malformed = false;
  } sft;

  struct Dpo {
    std::vector<std::string> preferences;             // empty: no preference tuning
    std::vector<std::string> validation_preferences;  // empty: validation.fraction of the preferences
    std::string chat_template;
    bool skip_malformed = false;
    double beta = 0.1;
    std::string loss_type = "sigmoid";
    double label_smoothing = 0;
  } dpo;

  struct Memory {
    bool check = true;
  } memory;

  struct Debug {
    std::int64_t seed = 0;
    bool deterministic = false;
    std::int64_t replica_check_freq = 0;
  } debug;
};

/// Applies the defaults, then the file, then the overrides, then runs the checks that need no world size.
/// Remarks that are not errors (keys that are not read, flags that are given twice) are logged once, or go to `notes`.
TrainConfig read_config(const std::string& path, const std::vector<std::string>& overrides,
                        std::vector<std::string>* notes = nullptr);
/// The same from text. `source` replaces the file's name in errors.
TrainConfig parse_config(std::string_view toml, const std::string& source, const std::vector<std::string>& overrides);

/// The effective configuration as TOML; parse_config() of it gives the same configuration.
std::string print_config(const TrainConfig& config);

/// [checkpoint] stop_signals as signal numbers.
std::vector<int> stop_signals(const TrainConfig& config);

/// The token files of the run: [training] datasets, or dataset_path as one set without a name.
Datasets training_datasets(const TrainConfig& config);

/// Whether the run reads files of conversations or of preferences, of which it makes token files itself.
bool trains_on_chats(const TrainConfig& config);

/// The path of a key's value: relative paths are in job.dump_folder.
std::string in_dump_folder(const TrainConfig& config, const std::string& path);

/// The text of docs/configuration.md: every key with its type, default and meaning, and the keys that are refused.
std::string config_reference();

/// N if [activation_checkpoint] recomputes one block in N, which then saves only its input; 0: no block.
std::int64_t recompute_every(const TrainConfig& config);
/// Whether recomputed blocks also save the activations that are costly to recompute.
bool uses_op_sac(const TrainConfig& config);

/// Whether [model] converters asks for linear layers in float8.
bool uses_float8(const TrainConfig& config);

/// Whether units are resharded after the forward pass: fsdp_reshard_after_forward. The default is yes, but no in a
/// pipeline.
bool reshards_after_forward(const TrainConfig& config);
/// Whether accumulated gradients are reduced over the sharding group in every micro-batch:
/// fsdp_reduce_each_microbatch. The default is yes under zero_stage 2 and 3, but no in a pipeline.
bool reduces_each_microbatch(const TrainConfig& config);
/// The number of ranks over which a unit stays sharded between the passes; 0: fsdp_reshard_after_forward is not a
/// number.
std::int64_t reshard_group(const TrainConfig& config);

}  // namespace phalanx::config
