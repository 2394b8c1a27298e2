#include "phalanx/config/torchtitan_keys.h"

#include "phalanx/config/config_schema.h"

namespace phalanx::config {

const std::vector<RefusedKey>& refused_keys() {
  static const std::vector<RefusedKey> keys = {
      {"compile", "components", "[\"model\", \"loss\"]", "there is no compiler for C++ modules"},
      {"compile", "backend", "\"inductor\"", "there is no compiler for C++ modules"},
      {"compile", "*", "", "there is no compiler for C++ modules: fused kernels are chosen when the program is built"},
      {"model", "tokenizer_path", "\"\"", "give the tokenizer's folder as model.hf_assets_path"},
      {"model", "print_after_conversion", "false",
       "the start of the log says which layers are converted (docs/float8.md)"},
      {kFloat8Section, "enable_fsdp_float8_all_gather", "false",
       "sharded weights are gathered in mixed_precision_param and cast afterwards"},
      {kFloat8Section, "precompute_float8_dynamic_scale_for_fsdp", "false",
       "sharded weights are gathered in mixed_precision_param and cast afterwards"},
      {kFloat8Section, "force_recompute_fp8_weight_in_bwd", kAnyValue,
       "weights that are gathered for the backward pass are cast there"},
      {"float8", "enable_fsdp_float8_all_gather", "false",
       "sharded weights are gathered in mixed_precision_param and cast afterwards"},
      {"float8", "precompute_float8_dynamic_scale_for_fsdp", "false",
       "sharded weights are gathered in mixed_precision_param and cast afterwards"},
      {"float8", "force_recompute_fp8_weight_in_bwd", kAnyValue,
       "weights that are gathered for the backward pass are cast there"},
      {"float8", "*", "", "linear layers alone are in float8: [quantize.linear.float8]"},
      {"mx", "*", "", "there is no MX training"},
      {"quantize.linear", "*", "", "linear layers in float8 are the only ones: [quantize.linear.float8]"},
      {"quantize", "*", "", "linear layers in float8 are the only ones: [quantize.linear.float8]"},
      {"optimizer", "implementation", "\"fused\"", "the fused implementation is the only one"},
      {"optimizer", "early_step_in_backward", "false", "the step needs the norm of all gradients first"},
      {"training", "dataset", "\"\"",
       "data sets are token files: make one with `phalanx tokenize` and give it as training.dataset_path, or "
       "give texts as stream.paths"},
      {"training", "dataloader", kAnyValue,
       "token files are mapped into memory: there are no workers that read ahead; for texts see stream.workers"},
      {"training", "compile", "false", "there is no compiler for C++ modules"},
      {"training", "gc_freq", "50", "there is no garbage collector to run"},
      {"training", "gc_debug", "false", "there is no garbage collector to run"},
      {"parallelism", "disable_loss_parallel", "false", "the logits are never held as a whole on any rank"},
      {"parallelism", "pipeline_parallel_split_points", "[]", "stages are balanced by the work of their layers"},
      {"parallelism", "pipeline_parallel_schedule_csv", "\"\"", "schedules are made here: pipeline_parallel_schedule"},
      {"parallelism", "pipeline_parallel_first_stage_less_layers", "1",
       "stages are balanced by the work of their layers"},
      {"parallelism", "pipeline_parallel_last_stage_less_layers", "1",
       "stages are balanced by the work of their layers"},
      {"parallelism", "expert_parallel_comm_backend", "\"standard\"", "rows are exchanged by the job's own all-to-all"},
      {"parallelism", "pipeline_parallel_expert_parallel_overlap", kAnyValue,
       "a pipeline does not overlap the exchange of experts with another micro-batch"},
      {"parallelism", "expert_tensor_parallel_degree", kAnyValue,
       "tensor_parallel_degree cuts each expert as it cuts the other matrices"},
      {"parallelism", "enable_compiled_autograd", "false", "there is no compiler for C++ modules"},
      {"checkpoint", "model_weights_only", "false", "checkpoint.last_save_in_hf writes the bare weights"},
      {"checkpoint", "last_save_model_only", kAnyValue,
       "the last checkpoint is whole, so that a run can be prolonged; checkpoint.last_save_in_hf adds the bare "
       "weights",
       /*said=*/"true"},
      {"checkpoint", "enable_ft_dataloader_checkpoints", kAnyValue, "there is no torchft in this version"},
      {"checkpoint", "initial_load_model_only", "true", "a new run takes over nothing but weights"},
      {"checkpoint", "initial_load_in_hf_quantized", "false", "the files say in which type their weights are"},
      {"checkpoint", "exclude_from_loading", "[]", "a checkpoint is loaded whole"},
      {"checkpoint", "create_seed_checkpoint", "false",
       "initial weights are a function of debug.seed, whatever the layout: no seed checkpoint is needed"},
      {"checkpoint", "enable_first_step_checkpoint", "false", "the first checkpoint is saved after `interval` steps"},
      {"checkpoint", "load_only", "false", "checkpoint.enable both saves and loads"},
      {"activation_checkpoint", "early_stop", "false", "blocks are computed again whole"},
      {"activation_checkpoint", "memory_budget", "0.5", "how much memory recomputation takes is not planned"},
      {"activation_checkpoint", "visualize_memory_budget_pareto", "false",
       "how much memory recomputation takes is not planned"},
      {"activation_checkpoint", "preserve_rng_state", kAnyValue, "nothing in a block is drawn at random"},
      {"activation_checkpoint", "determinism_check", "\"default\"", "what is computed again is the same"},
      {"activation_checkpoint", "debug", "false", "what is computed again is the same"},
      {"activation_checkpoint", "per_op_sac_force_recompute_mm_shapes_by_fqns", "[\"moe.router.gate\"]",
       "what selective_ac_option = \"op\" keeps is fixed"},
      {"activation_checkpoint", "*", "",
       "blocks are computed again whole, and how much memory that takes is not planned"},
      {"metrics", "enable_wandb", "false",
       "nothing is sent over the network; metrics.enable_tensorboard writes local files"},
      {"metrics", "save_for_all_ranks", "false", "rank 0 writes the metrics of all ranks"},
      {"profiling", "profiler_warmup", kAnyValue, "nothing has to warm up: a traced step takes as long as any other"},
      {"profiling", "enable_memory_snapshot", "false", "there is no memory snapshot in this version"},
      {"profiling", "save_memory_snapshot_folder", kAnyValue, "there is no memory snapshot in this version"},
      {"profiling", "with_stack", "false", "a trace holds the phases of a step and the collectives, not single calls"},
      {"profiling", "with_modules", "false",
       "a trace holds the phases of a step and the collectives, not single calls"},
      {"comm", "mode", "\"default\"", "there are no simulated communication modes"},
      {"validation", "dataset", "\"\"", "give a token file as validation.dataset_path"},
      {"validation", "dataloader", kAnyValue,
       "token files are mapped into memory: there are no workers that read ahead"},
      {"validation", "seq_len", "training.seq_len", "validation uses training.seq_len"},
      {"memory_estimation", "*", "", "every run's memory is predicted before it starts: memory.check"},
      {"fault_tolerance", "enable", "false", "there is no torchft in this version"},
      {"fault_tolerance", "replica_id", "0", "there is no torchft in this version"},
      {"fault_tolerance", "group_size", "0", "there is no torchft in this version"},
      {"fault_tolerance", "min_replica_size", "1", "there is no torchft in this version"},
      {"fault_tolerance", "process_group", "\"gloo\"", "there is no torchft in this version"},
      {"fault_tolerance", "process_group_timeout_ms", "10000", "there is no torchft in this version"},
      {"fault_tolerance", "*", "", "there is no torchft in this version"},
      {"experimental", "custom_import", "\"\"", "Python modules cannot be loaded"},
      {"experimental", "custom_args_module", "\"\"", "Python modules cannot be loaded"},
      {"experimental", "*", "", "Python modules cannot be loaded"},
      {"job", "config_file", "\"\"", "the configuration's path is the first argument of `phalanx train`"},
      {"job", "print_args", "false", "use `phalanx train cfg.toml --print-config`"},
      {"job", "use_for_integration_test", kAnyValue, "it has no meaning outside of torchtitan's own tests"},
      {"job", "print_config", "false", "use `phalanx train cfg.toml --print-config`"},
      {"debug", "deterministic_warn_only", "false", "debug.deterministic refuses what has no such kernel"},
      {"debug", "moe_force_load_balance", "false", "experts are chosen by their router"},
      {"job", "custom_config_module", "\"\"", "Python modules cannot be loaded"},
  };
  return keys;
}

const std::vector<KeyAlias>& key_aliases() {
  static const std::vector<KeyAlias> aliases = {
      {"training", "seed", "debug", "seed"},
      {"training", "deterministic", "debug", "deterministic"},
      {"training", "batch_size", "training", "local_batch_size"},
      {"training", "data_parallel_replicate_degree", "parallelism", "data_parallel_replicate_degree"},
      {"checkpoint", "enable_checkpoint", "checkpoint", "enable"},
      {"float8", "recipe_name", kFloat8Section, "recipe_name"},
      {"float8", "filter_fqns", kFloat8Section, "filter_fqns"},
      {"float8", "emulate", kFloat8Section, "emulate"},
      {"validation", "enabled", "validation", "enable"},
      {"lr_scheduler", "lr_min", "lr_scheduler", "min_lr_factor"},
  };
  return aliases;
}

const std::vector<ValueAlias>& value_aliases() {
  static const std::vector<ValueAlias> aliases = {
      {"model", "name", "llama3", "llama"},       {"model", "flavor", "debugmodel", "llama3_debug"},
      {"model", "flavor", "8B", "llama3_8b"},     {"model", "flavor", "70B", "llama3_70b"},
      {"model", "flavor", "405B", "llama3_405b"}, {"model", "flavor", "0.6B", "qwen3_0.6b"},
      {"model", "flavor", "1.7B", "qwen3_1.7b"},  {"model", "flavor", "4B", "qwen3_4b"},
      {"model", "flavor", "14B", "qwen3_14b"},    {"model", "flavor", "32B", "qwen3_32b"},
      {"model", "name", "gemma3", "gemma3_text"},
  };
  return aliases;
}

std::string meant_value(std::string_view section, std::string_view name, std::string_view written) {
  for (const ValueAlias& alias : value_aliases()) {
    if (alias.section == section && alias.name == name && alias.written == written) return std::string(alias.meant);
  }
  return std::string(written);
}

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = {
      {"torchtitan",
       {{"training", "mixed_precision_param", "bfloat16"},
        {"parallelism", "data_parallel_replicate_degree", "1"},
        {"parallelism", "data_parallel_shard_degree", "-1"},
        {"parallelism", "enable_async_tensor_parallel", "false"},
        {"activation_checkpoint", "mode", "selective"},
        {"activation_checkpoint", "selective_ac_option", "2"},
        {"checkpoint", "enable", "false"},
        {"metrics", "enable_tensorboard", "false"}}},
  };
  return all;
}

}  // namespace phalanx::config
