#include "phalanx/config/setting_rules.h"

#include <algorithm>

namespace phalanx::config {
const std::vector<SettingRule>& setting_rules() {
  using enum OnResume;
  constexpr std::string_view place = "a place or a name";
  constexpr std::string_view layout = "any layout goes on from any other; losses change by rounding alone";
  constexpr std::string_view of_model = "the model's description is compared as a whole (metadata.model)";
  constexpr std::string_view of_adapter = "the same adapter adds something else, or is another one";
  constexpr std::string_view saving = "when and how checkpoints are written";
  constexpr std::string_view shown = "what is shown and recorded";
  constexpr std::string_view talk = "how ranks talk; sums keep their order";
  static const std::vector<SettingRule> rules = {
      {"job", "dump_folder", silent, place},
      {"job", "description", silent, place, AcrossRanks::free},

      {"model", "name", elsewhere, of_model},
      {"model", "flavor", elsewhere, of_model},
      {"model", "hf_assets_path", elsewhere,
       "config.json is compared as the model's description, the tokenizer by its content", AcrossRanks::free},
      {"model", "dim", elsewhere, of_model},
      {"model", "n_layers", elsewhere, of_model},
      {"model", "n_heads", elsewhere, of_model},
      {"model", "n_kv_heads", elsewhere, of_model},
      {"model", "ffn_hidden", elsewhere, of_model},
      {"model", "vocab_size", elsewhere, of_model},
      {"model", "rope_theta", elsewhere, of_model},
      {"model", "norm_eps", elsewhere, of_model},
      {"model", "tie_embeddings", elsewhere, of_model},
      {"model", "converters", said},

      {"optimizer", "name", refused, "the state of one optimizer means nothing to another"},
      {"optimizer", "lr", said},
      {"optimizer", "beta1", said},
      {"optimizer", "beta2", said},
      {"optimizer", "eps", said},
      {"optimizer", "weight_decay", said},
      {"optimizer", "no_decay", said},
      {"optimizer", "groups", said},
      {"optimizer", "momentum", said},
      {"optimizer", "state_dtype", said},
      {"optimizer", "master_weights", said},
      {"optimizer", "stochastic_rounding", said},

      {"muon", "lr", said},
      {"muon", "weight_decay", said},
      {"muon", "momentum", said},
      {"muon", "nesterov", said},
      {"muon", "ns_steps", said},
      {"muon", "ns_coefficients", said},
      {"muon", "eps", said},
      {"muon", "adjust_lr_fn", said},
      {"muon", "adamw_params", refused, "the state of one optimizer means nothing to another"},

      {"ema", "decay", said},
      {"ema", "start_step", said},
      {"ema", "update_every", said},
      {"ema", "use_in_validation", said},
      {"ema", "use_in_export", silent, saving},

      {"lr_scheduler", "warmup_steps", said},
      {"lr_scheduler", "decay_ratio", said},
      {"lr_scheduler", "decay_type", said},
      {"lr_scheduler", "min_lr_factor", said},

      {"training", "dataset_path", said, {}, AcrossRanks::free},  // data are compared by content
      {"training", "datasets", said, {}, AcrossRanks::free},
      {"training", "dataset_dtype", elsewhere, "part of the data's description"},
      {"training", "allow_tokenizer_mismatch", silent, "what it allows is said"},
      {"training", "local_batch_size", said},
      {"training", "global_batch_size", said},
      {"training", "num_tokens_per_microbatch_per_dp_rank", elsewhere, "read as local_batch_size"},
      {"training", "num_tokens_per_train_step", elsewhere, "read as global_batch_size"},
      {"training", "seq_len", said},
      {"training", "frozen", refused, "the optimizer's state is that of the parameters that were trained"},
      {"training", "moe_aux_loss_coeff", said},
      {"training", "moe_aux_loss_unit", said},
      {"training", "moe_z_loss_coeff", said},
      {"training", "moe_router_enable_expert_bias", refused, "tokens would go to other experts"},
      {"training", "moe_router_bias_update_rate", said},
      {"training", "moe_input_jitter_eps", said},
      {"training", "moe_expert_capacity_factor", said},
      {"training", "max_norm", said},
      {"training", "z_loss_weight", said},
      {"training", "steps", said},
      {"training", "shuffle", said},
      {"training", "attn_mask_type", said},
      {"training", "packing", said},
      {"training", "dtype", said},
      {"training", "mixed_precision_param", said},
      {"training", "mixed_precision_reduce", said},
      {"training", "float32_matmul_precision", said},
      {"training", "initial_loss_scale", said},
      {"training", "loss_scale_window", said},
      {"training", "enable_cpu_offload", silent, layout},

      {"stream", "paths", said, {}, AcrossRanks::free},  // texts are compared by content
      {"stream", "field", elsewhere, "part of the data's description"},
      {"stream", "window", elsewhere, "part of the data's description"},
      {"stream", "workers", silent, "the data are the same for every number"},
      {"stream", "special_tokens", elsewhere, "part of the data's description"},

      {"lora", "rank", refused, of_adapter},
      {"lora", "alpha", refused, of_adapter},
      {"lora", "use_rslora", refused, of_adapter},
      {"lora", "dropout", said},
      {"lora", "target_modules", refused, of_adapter},
      {"lora", "base_dtype", refused, "the base was rounded to it, and the adapter is trained on that"},
      {"lora", "zero_b", silent, "of a new run alone"},
      {"lora", "initial_adapter", silent, "of a new run alone; what lies there is compared between ranks",
       AcrossRanks::free},

      {"parallelism", "data_parallel_replicate_degree", silent, layout},
      {"parallelism", "data_parallel_shard_degree", silent, layout},
      {"parallelism", "zero_stage", silent, layout},
      {"parallelism", "fsdp_reshard_after_forward", silent, layout},
      {"parallelism", "fsdp_reduce_each_microbatch", silent, layout},
      {"parallelism", "context_parallel_degree", silent, layout},
      {"parallelism", "context_parallel_exchange", silent, layout},
      {"parallelism", "context_parallel_rotate_method", silent, layout},
      {"parallelism", "context_parallel_load_balancer", silent, layout},
      {"parallelism", "tensor_parallel_degree", silent, layout},
      {"parallelism", "enable_sequence_parallel", silent, layout},
      {"parallelism", "enable_async_tensor_parallel", silent, layout},
      {"parallelism", "pipeline_parallel_degree", silent, layout},
      {"parallelism", "pipeline_parallel_schedule", silent, layout},
      {"parallelism", "pipeline_parallel_microbatch_size", silent, layout},
      {"parallelism", "pipeline_parallel_stages_per_rank", silent, layout},
      {"parallelism", "pipeline_parallel_balance", silent, layout},
      {"parallelism", "expert_parallel_degree", silent, layout},

      {"activation_checkpoint", "mode", silent, "the same numbers are computed again"},
      {"activation_checkpoint", "selective_ac_option", silent, "the same numbers are computed again"},

      {"quantize.linear.float8", "recipe_name", said},
      {"quantize.linear.float8", "filter_fqns", said},
      {"quantize.linear.float8", "emulate", said},

      {"checkpoint", "enable", silent, saving},
      {"checkpoint", "folder", silent, saving},
      {"checkpoint", "interval", silent, saving},
      {"checkpoint", "keep_latest_k", silent, saving},
      {"checkpoint", "async_mode", silent, saving},
      {"checkpoint", "load_step", silent, "the step that was loaded is said"},
      {"checkpoint", "convert_dtype", silent, "what it allows is said by the load itself"},
      {"checkpoint", "allow_model_mismatch", silent, "what it allows is said"},
      {"checkpoint", "initial_load_path", silent, "of a new run alone; what lies there is compared between ranks",
       AcrossRanks::free},
      {"checkpoint", "initial_load_in_hf", silent, "of a new run alone"},
      {"checkpoint", "allow_data_mismatch", silent, "what it allows is said"},
      {"checkpoint", "initial_random_weights", silent, "of a new run alone"},
      {"checkpoint", "last_save_in_hf", silent, saving},
      {"checkpoint", "export_dtype", silent, saving},
      {"checkpoint", "export_file_gb", silent, saving},
      {"checkpoint", "stop_signals", silent, saving},

      {"metrics", "log_freq", silent, shown},
      {"metrics", "enable_tensorboard", silent, shown},
      {"metrics", "save_tb_folder", silent, shown, AcrossRanks::free},
      {"metrics", "enable_report", silent, shown},
      {"metrics", "sample_prompt", silent, shown},
      {"metrics", "sample_tokens", silent, shown},
      {"metrics", "disable_color_printing", silent, shown, AcrossRanks::free},

      {"profiling", "enable_profiling", silent, shown},
      {"profiling", "record_kernels", silent, shown},
      {"profiling", "profile_freq", silent, shown},
      {"profiling", "profiler_active", silent, shown},
      {"profiling", "save_traces_folder", silent, shown, AcrossRanks::free},

      {"comm", "init_timeout_seconds", silent, talk},
      {"comm", "train_timeout_seconds", silent, talk},
      {"comm", "heartbeat_seconds", silent, talk},
      {"comm", "backend", silent, talk},
      {"comm", "shared_heap", silent, talk},
      {"comm", "strict", silent, talk},
      {"comm", "trace_buf_size", silent, shown, AcrossRanks::free},
      {"comm", "save_traces_folder", silent, shown, AcrossRanks::free},
      {"comm", "save_traces_file_prefix", silent, shown, AcrossRanks::free},

      {"validation", "enable", said},
      {"validation", "dataset_path", said, {}, AcrossRanks::free},
      {"validation", "datasets", said, {}, AcrossRanks::free},
      {"validation", "fraction", said},
      {"validation", "local_batch_size", silent, "every held-out sample counts once, whatever the batch"},
      {"validation", "freq", silent, shown},
      {"validation", "steps", said},

      {"sft", "conversations", said, {}, AcrossRanks::free},  // data are compared by content, also the next two
      {"sft", "validation_conversations", said, {}, AcrossRanks::free},
      {"sft", "chat_template", said},
      {"sft", "too_long", said},
      {"sft", "skip_malformed", said},

      {"dpo", "preferences", said, {}, AcrossRanks::free},  // data are compared by content, also the next one
      {"dpo", "validation_preferences", said, {}, AcrossRanks::free},
      {"dpo", "chat_template", said},
      {"dpo", "skip_malformed", said},
      {"dpo", "beta", said},
      {"dpo", "loss_type", said},
      {"dpo", "label_smoothing", said},

      {"memory", "check", silent, "refuses or does not; changes no number"},

      {"debug", "seed", elsewhere, "part of the data's description, where they are shuffled"},
      {"debug", "deterministic", said},
      {"debug", "replica_check_freq", silent, "looks at the numbers, and changes none"},
  };
  return rules;
}

const SettingRule* setting_rule(std::string_view section, std::string_view name) {
  const auto found = std::ranges::find_if(
      setting_rules(), [&](const SettingRule& rule) { return rule.section == section && rule.name == name; });
  return found == setting_rules().end() ? nullptr : &*found;
}

}  // namespace phalanx::config
