#include "phalanx/config/config_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/config/config_schema.h"
#include "phalanx/config/narrow_state_checks.h"
#include "phalanx/config/slot_text.h"
#include "phalanx/data/blend_schedule.h"

namespace phalanx::config {
namespace {

void take_token_budget(std::string_view tokens_name, std::int64_t& tokens, std::int64_t& sequences,
                       std::int64_t seq_len) {
  if (tokens == -1) return;
  if (tokens < 1 || tokens % seq_len != 0) {
    throw ConfigError(fmt::format("[training] {} is {}: expected a multiple of seq_len {}, such as {}", tokens_name,
                                  tokens, seq_len, std::max<std::int64_t>(1, tokens / seq_len) * seq_len));
  }
  sequences = tokens / seq_len;
  tokens = -1;
}

/// A section whose files of chats the run makes token files of.
struct ChatSection {
  std::string name, key, noun;
  const std::vector<std::string>&files, &held_out;
  const std::string& chat_template;
  bool skip_malformed;
};

/// A section of chats with the sections that it takes the place of.
template <class Check>
void check_chats(const TrainConfig& config, const ChatSection& chats, const Check& check) {
  const std::string files_key = fmt::format("{}.{}", chats.name, chats.key);
  const std::string label = fmt::format("[{}] {}", chats.name, chats.key);
  const std::string held_out = fmt::format("validation_{}", chats.key);
  if (chats.files.empty()) {
    const char* set = !chats.held_out.empty()        ? held_out.c_str()
                      : !chats.chat_template.empty() ? "chat_template"
                      : chats.skip_malformed         ? "skip_malformed"
                                                     : nullptr;
    check({files_key.c_str()}, [&] {
      if (set == nullptr) return;
      throw ConfigError(
          fmt::format("[{}] {} is set, but {}, the files to train on, is not", chats.name, set, chats.key));
    });
    return;
  }
  const auto replaced = [&](const char* key, const char* its_label, const std::string& path, const std::string& by) {
    check({key}, [&] {
      if (path.empty()) return;
      throw ConfigError(
          fmt::format("{} is set beside {}: expected one of them; the token files of {} are made by the run ({})",
                      its_label, label, chats.noun, by));
    });
  };
  const std::string by_own = fmt::format("name held-out {} as [{}] {}", chats.noun, chats.name, held_out);
  replaced("training.dataset_path", "[training] dataset_path", config.training.dataset_path, "remove dataset_path");
  replaced("validation.dataset_path", "[validation] dataset_path", config.validation.dataset_path, by_own);
  const auto first_of = [](const Datasets& sets) { return sets.empty() ? "" : sets.front().path; };
  replaced("training.datasets", "[[training.datasets]]", first_of(config.training.datasets), "remove the data sets");
  replaced("validation.datasets", "[[validation.datasets]]", first_of(config.validation.datasets), by_own);
  replaced("stream.paths", "[stream] paths", config.stream.paths.empty() ? "" : config.stream.paths.front(),
           "remove paths");
  check({"training.packing", "training.attn_mask_type"}, [&] {
    if (config.training.packing == "best_fit" && config.training.attn_mask_type == "block_causal") return;
    throw ConfigError(fmt::format(
        "[training] packing is \"{}\" and attn_mask_type \"{}\", but [{}] trains on whole conversations that do not "
        "see each other: expected \"best_fit\" and \"block_causal\", which are the defaults beside [{}]; remove the "
        "two keys",
        config.training.packing, config.training.attn_mask_type, chats.name, chats.name));
  });
  check({"model.hf_assets_path"}, [&] {
    if (!config.model.hf_assets_path.empty()) return;
    throw ConfigError(fmt::format(
        "{} is set, but [model] hf_assets_path (the folder of the model's tokenizer and chat template) is not", label));
  });
  check({"validation.enable"}, [&] {
    if (chats.held_out.empty() || config.validation.enable) return;
    throw ConfigError(fmt::format("[{}] {} is set, but [validation] enable is not", chats.name, held_out));
  });
}

/// [dpo] with what it has no meaning beside.
template <class Check>
void check_preferences(const TrainConfig& config, const Check& check) {
  const auto& dpo = config.dpo;
  if (dpo.preferences.empty()) return;
  check({"sft.conversations", "dpo.preferences"}, [&] {
    if (config.sft.conversations.empty()) return;
    throw ConfigError("[dpo] preferences is set beside [sft] conversations: expected one of them; a run has one loss");
  });
  check({"dpo.beta"}, [&] {
    if (dpo.beta == 0) throw ConfigError("[dpo] beta is 0: no answer would be preferred; expected a positive number");
  });
  check({"dpo.loss_type", "dpo.label_smoothing"}, [&] {
    if (dpo.label_smoothing == 0 || dpo.loss_type == "sigmoid") return;
    throw ConfigError(
        fmt::format("[dpo] label_smoothing is {}, but loss_type is \"{}\": expected \"sigmoid\", or no label_smoothing",
                    dpo.label_smoothing, dpo.loss_type));
  });
  check({"dpo.label_smoothing"}, [&] {
    if (dpo.label_smoothing < 0.5) return;
    throw ConfigError("[dpo] label_smoothing is 0.5: either answer would be the chosen one; expected less than that");
  });
  check({"checkpoint.allow_data_mismatch"}, [&] {
    if (!config.checkpoint.allow_data_mismatch) return;
    throw ConfigError(
        "[checkpoint] allow_data_mismatch is set beside [dpo] preferences: a checkpoint holds what the reference says "
        "of "
        "its own pairs alone; remove it, or start a new run in another [job] dump_folder");
  });
  check({"model.converters"}, [&] {
    if (!uses_float8(config)) return;
    throw ConfigError(
        "[model] converters has float8 layers, whose scales are those of all rows of a pass, and the reference of "
        "[dpo] "
        "is of other passes than a step: remove the converter");
  });
  check({"training.z_loss_weight"}, [&] {
    if (config.training.z_loss_weight == 0) return;
    throw ConfigError(fmt::format(
        "[training] z_loss_weight is {}, but the loss of [dpo] is one of whole answers: expected 0 beside it",
        config.training.z_loss_weight));
  });
  const bool has_base = config.checkpoint.initial_load_in_hf || !config.checkpoint.initial_load_path.empty() ||
                        config.checkpoint.initial_random_weights;
  check({"checkpoint.initial_load_path", "checkpoint.initial_load_in_hf"}, [&] {
    if (has_base) return;
    throw ConfigError(
        "[dpo] preferences is set, but nothing says where the weights come from that are the start and the reference: "
        "expected [checkpoint] initial_load_in_hf or initial_load_path");
  });
}

template <class Check>
void check_muon(const TrainConfig& config, Check& check) {
  const auto& muon = config.muon;
  check({"muon.momentum"}, [&] {
    if (muon.momentum < 1) return;
    throw ConfigError(fmt::format("[muon] momentum is {}: expected 0 <= momentum < 1", muon.momentum));
  });
  check({"muon.ns_coefficients"}, [&] {
    if (muon.ns_coefficients.size() == 3) return;
    throw ConfigError(fmt::format("[muon] ns_coefficients has {} numbers: expected three, as [3.4445, -4.775, 2.0315]",
                                  muon.ns_coefficients.size()));
  });
  check({"muon.lr", "optimizer.lr"}, [&] {
    if (!muon.lr || config.optimizer.lr > 0) return;
    throw ConfigError(fmt::format(
        "[muon] lr is {}, but [optimizer] lr, whose schedule it follows, is 0: expected a positive number; [training] "
        "frozen names what is not trained",
        *muon.lr));
  });
}

}  // namespace

void check_keys_together(TrainConfig& config, const std::set<std::string>& wrong_keys, ConfigProblems& problems) {
  const auto check = [&](std::initializer_list<const char*> keys, auto&& body) {
    if (std::ranges::any_of(keys, [&](const char* key) { return wrong_keys.contains(key); })) return;
    problems.collect(body);
  };
  const auto below_one = [&](const char* name, double value) {
    check({}, [&] {
      if (value >= 1) throw ConfigError(fmt::format("[optimizer] {} is {}: expected 0 <= {} < 1", name, value, name));
    });
  };
  const auto& optimizer = config.optimizer;
  const bool is_muon = !wrong_keys.contains("optimizer.name") && optimizer.name == "Muon";
  if (is_muon) check_muon(config, check);
  check({"ema.decay"}, [&] {
    if (config.ema.decay < 1) return;
    throw ConfigError("[ema] decay is 1: the average would never change; expected 0 <= decay < 1, such as 0.999");
  });
  const bool has_adamw = is_muon || (!wrong_keys.contains("optimizer.name") && optimizer.name == "AdamW");
  if (has_adamw || optimizer.name == "Lion") {
    below_one("beta1", optimizer.beta1);
    below_one("beta2", optimizer.beta2);
  }
  if (has_adamw) {
    check({}, [&] {
      if (optimizer.eps == 0) throw ConfigError("[optimizer] eps is 0: expected a positive number");
    });
  } else if (optimizer.name == "SGD") {
    below_one("momentum", optimizer.momentum);
  }
  check_narrow_state(config, check);
  check({"checkpoint.stop_signals"}, [&] { stop_signals(config); });
  auto& training = config.training;
  const auto& parallelism = config.parallelism;
  const auto& validation = config.validation;
  check({"training.seq_len"}, [&] {
    take_token_budget("num_tokens_per_microbatch_per_dp_rank", training.num_tokens_per_microbatch_per_dp_rank,
                      training.local_batch_size, training.seq_len);
  });
  check({"training.seq_len"}, [&] {
    take_token_budget("num_tokens_per_train_step", training.num_tokens_per_train_step, training.global_batch_size,
                      training.seq_len);
  });
  const auto refuse_zero = [&](const char* section, const char* name, std::int64_t value) {
    if (wrong_keys.contains(fmt::format("{}.{}", section, name))) return;
    check({}, [&] {
      if (value == 0) throw ConfigError(fmt::format("{} is 0: expected -1, or 1 or more", key_label(section, name)));
    });
  };
  refuse_zero("training", "global_batch_size", training.global_batch_size);
  refuse_zero("parallelism", "data_parallel_replicate_degree", parallelism.data_parallel_replicate_degree);
  refuse_zero("parallelism", "data_parallel_shard_degree", parallelism.data_parallel_shard_degree);
  refuse_zero("validation", "local_batch_size", validation.local_batch_size);
  refuse_zero("validation", "freq", validation.freq);
  refuse_zero("validation", "steps", validation.steps);

  const auto needs_sharding = [&](const char* key, bool is_set, const std::string& setting) {
    check({"parallelism.data_parallel_shard_degree", key}, [&] {
      if (parallelism.data_parallel_shard_degree != 1 || !is_set) return;
      throw ConfigError(fmt::format(
          "{} is for sharded training: set [parallelism] data_parallel_shard_degree to -1 or 2 and more, or remove it",
          setting));
    });
  };
  needs_sharding("training.mixed_precision_reduce", training.mixed_precision_reduce != "float32",
                 fmt::format("[training] mixed_precision_reduce = \"{}\"", training.mixed_precision_reduce));
  needs_sharding("training.enable_cpu_offload", training.enable_cpu_offload, "[training] enable_cpu_offload");
  needs_sharding("parallelism.fsdp_reshard_after_forward", reshard_group(config) > 0,
                 fmt::format("[parallelism] fsdp_reshard_after_forward = {}", parallelism.fsdp_reshard_after_forward));
  needs_sharding(
      "parallelism.fsdp_reduce_each_microbatch", parallelism.fsdp_reduce_each_microbatch != "default",
      fmt::format("[parallelism] fsdp_reduce_each_microbatch = \"{}\"", parallelism.fsdp_reduce_each_microbatch));
  check(
      {"parallelism.fsdp_reduce_each_microbatch", "parallelism.zero_stage", "parallelism.pipeline_parallel_degree"},
      [&] {
        if (parallelism.fsdp_reduce_each_microbatch != "always" || reduces_each_microbatch(config)) return;
        throw ConfigError(fmt::format(
            "[parallelism] fsdp_reduce_each_microbatch = \"always\" is for zero_stage = 2 or 3 without a pipeline, but "
            "{}: gradients stay whole until the step ends there; remove one of them",
            parallelism.zero_stage == 1
                ? std::string("zero_stage = 1")
                : fmt::format("pipeline_parallel_degree = {}", parallelism.pipeline_parallel_degree)));
      });
  check({"parallelism.fsdp_reshard_after_forward", "parallelism.zero_stage"}, [&] {
    const std::int64_t group = reshard_group(config);
    if (group == 0 || parallelism.zero_stage == 3) return;
    throw ConfigError(fmt::format(
        "[parallelism] fsdp_reshard_after_forward = {} is for zero_stage = 3, but that is {}: remove one of them",
        group, parallelism.zero_stage));
  });
  check({"profiling.profiler_active", "profiling.profile_freq"}, [&] {
    const auto& profiling = config.profiling;
    if (profiling.profiler_active <= profiling.profile_freq) return;
    throw ConfigError(
        fmt::format("[profiling] profiler_active is {}, but profile_freq is {}: expected at most as many "
                    "traced steps as there are from one trace to the next",
                    profiling.profiler_active, profiling.profile_freq));
  });
  check({}, [&] {
    if (config.comm.save_traces_file_prefix.find('/') == std::string::npos) return;
    throw ConfigError(
        fmt::format("[comm] save_traces_file_prefix is \"{}\": expected the beginning of a file's name; "
                    "the folder is save_traces_folder",
                    config.comm.save_traces_file_prefix));
  });
  check({"checkpoint.initial_load_path", "model.hf_assets_path"}, [&] {
    if (!config.checkpoint.initial_load_in_hf || !config.checkpoint.initial_load_path.empty() ||
        !config.model.hf_assets_path.empty()) {
      return;
    }
    throw ConfigError(
        "[checkpoint] initial_load_in_hf is true, but neither initial_load_path nor [model] hf_assets_path is set");
  });
  check({"checkpoint.initial_random_weights"}, [&] {
    if (!config.checkpoint.initial_random_weights ||
        (!config.checkpoint.initial_load_in_hf && config.checkpoint.initial_load_path.empty())) {
      return;
    }
    throw ConfigError(fmt::format(
        "[checkpoint] initial_random_weights is true, but {} says where weights come from: remove one of them",
        config.checkpoint.initial_load_in_hf ? "initial_load_in_hf" : "initial_load_path"));
  });
  check({"model.hf_assets_path"}, [&] {
    if (config.model.flavor == kFlavorOfDirectory && config.model.hf_assets_path.empty()) {
      throw ConfigError("[model] flavor is \"hf\", but hf_assets_path (the folder of config.json) is not set");
    }
  });
  check({"model.hf_assets_path"}, [&] {
    if (config.metrics.sample_prompt.empty() || !config.model.hf_assets_path.empty()) return;
    throw ConfigError(
        "[metrics] sample_prompt is set, but [model] hf_assets_path (the folder of tokenizer.json) is not");
  });
  check({"model.converters"}, [&] {
    for (std::string& converter : config.model.converters) {
      if (converter == kOldFloat8) converter = kFloat8Section;
      if (converter == kFloat8Section) continue;
      throw ConfigError(
          fmt::format("[model] converters names \"{}\": expected \"{}\", the only one that is known here, or nothing",
                      converter, kFloat8Section));
    }
  });
  check({"model.converters", "training.mixed_precision_param"}, [&] {
    if (!uses_float8(config) || training.mixed_precision_param == "bfloat16") return;
    throw ConfigError(
        fmt::format("[model] converters asks for float8, but [training] mixed_precision_param is \"{}\": products of "
                    "float8 numbers have results in bfloat16; set mixed_precision_param = \"bfloat16\"",
                    training.mixed_precision_param));
  });
  check({"model.converters", "lora.rank"}, [&] {
    if (!uses_float8(config) || config.lora.rank == 0) return;
    throw ConfigError(
        "[model] converters asks for float8, and [lora] rank for adapters: layers with adapters have no float8 "
        "products; "
        "remove one of them");
  });
  check({"quantize.linear.float8.filter_fqns"}, [&] {
    if (!uses_float8(config)) return;
    for (const std::string& filter : config.float8.filter_fqns) {
      if (filter.empty()) {
        throw ConfigError(
            fmt::format("[{}] filter_fqns has an empty name, which every layer's contains: remove it, or "
                        "float8 from [model] converters",
                        kFloat8Section));
      }
      if (filter != "auto_filter_small_kn") continue;
      throw ConfigError(
          fmt::format("[{}] filter_fqns has \"auto_filter_small_kn\", a rule of torchao that Phalanx does not have: "
                      "name the layers "
                      "that are to stay, for example \"attention.wk\"",
                      kFloat8Section));
    }
  });
  check({"training.packing", "training.attn_mask_type"}, [&] {
    if (config.training.packing == "none" || config.training.attn_mask_type == "block_causal") return;
    throw ConfigError(
        "[training] packing is \"best_fit\", but attn_mask_type is \"causal\": documents that share a sequence would "
        "see "
        "each other; set attn_mask_type = \"block_causal\"");
  });
  const auto& sft = config.sft;
  check_chats(config,
              {"sft", "conversations", "conversations", sft.conversations, sft.validation_conversations,
               sft.chat_template, sft.skip_malformed},
              check);
  const auto& dpo = config.dpo;
  check_chats(config,
              {"dpo", "preferences", "preferences", dpo.preferences, dpo.validation_preferences, dpo.chat_template,
               dpo.skip_malformed},
              check);
  check_preferences(config, check);
  check({"lora.rank", "lora.initial_adapter"}, [&] {
    const bool has_base = config.checkpoint.initial_load_in_hf || !config.checkpoint.initial_load_path.empty();
    if (config.lora.initial_adapter.empty() || (config.lora.rank > 0 && has_base)) return;
    throw ConfigError(
        config.lora.rank == 0
            ? "[lora] initial_adapter is set, but rank is 0: expected the adapter's rank, or no initial_adapter"
            : "[lora] initial_adapter is set, but nothing says where the weights of its base come from: expected "
              "[checkpoint] initial_load_in_hf or initial_load_path");
  });
  check({"lora.base_dtype", "lora.rank"}, [&] {
    if (config.lora.base_dtype == "float32" || config.lora.rank > 0) return;
    throw ConfigError(
        fmt::format("[lora] base_dtype is \"{}\", but rank is 0: there is no frozen base without adapters; expected a "
                    "rank of 1 or more, or base_dtype = \"float32\"",
                    config.lora.base_dtype));
  });
  check({"lora.base_dtype", "training.mixed_precision_param"}, [&] {
    if (config.lora.base_dtype == "float32" || training.mixed_precision_param != "float16") return;
    throw ConfigError(
        fmt::format("[lora] base_dtype is \"{}\", but [training] mixed_precision_param is \"float16\", which does not "
                    "hold its largest and smallest values; expected \"bfloat16\" or \"float32\" there",
                    config.lora.base_dtype));
  });
  check({"validation.dataset_path", "validation.datasets", "validation.fraction"}, [&] {
    if (!validation.enable || !validation.dataset_path.empty() || !validation.datasets.empty() ||
        validation.fraction != 0 || !config.sft.validation_conversations.empty() ||
        !config.dpo.validation_preferences.empty()) {
      return;
    }
    throw ConfigError("[validation] is enabled, but fraction is 0 and dataset_path is not set: nothing is held out");
  });
  const auto refuse_both = [&](const char* section, const std::string& path, const Datasets& sets) {
    check({fmt::format("{}.dataset_path", section).c_str(), fmt::format("{}.datasets", section).c_str()}, [&] {
      if (path.empty() || sets.empty()) return;
      throw ConfigError(fmt::format(
          "[{0}] dataset_path is '{1}', and there are [[{0}.datasets]]: expected one of them; to read that file, too, "
          "make it one of the data sets",
          section, path));
    });
  };
  refuse_both("training", training.dataset_path, training.datasets);
  refuse_both("validation", validation.dataset_path, validation.datasets);
  check({"validation.datasets"}, [&] {
    for (const Dataset& set : validation.datasets) {
      if (!set.weight) continue;
      throw ConfigError(fmt::format(
          "[[validation.datasets]] '{}' has a weight: each held-out token counts once; remove the weight", set.name));
    }
  });
  const auto& texts = config.stream.paths;
  check({"stream.paths", "training.dataset_path", "training.datasets"}, [&] {
    if (texts.empty() || training_datasets(config).empty()) return;
    throw ConfigError(
        "[stream] paths is set, and so is [training] dataset_path or datasets: expected texts or token files; remove "
        "one "
        "of them");
  });
  check({"stream.paths", "model.hf_assets_path"}, [&] {
    if (texts.empty() || !config.model.hf_assets_path.empty()) return;
    throw ConfigError(
        "[stream] paths is set, but [model] hf_assets_path (the folder of tokenizer.json) is not: expected the "
        "tokenizer "
        "for the texts; `phalanx tokenize --vocab-size N` makes one");
  });
  check({"stream.paths", "validation.enable", "validation.dataset_path", "validation.datasets"}, [&] {
    if (texts.empty() || !validation.enable || !validation.dataset_path.empty() || !validation.datasets.empty()) return;
    throw ConfigError(
        "[validation] is enabled, and [stream] paths is set: no part of the texts can be held out; give a token file "
        "as "
        "[validation] dataset_path, which `phalanx tokenize` makes");
  });
  check({"training.datasets"}, [&] {
    std::vector<double> weights;
    std::vector<std::string> names;
    for (const Dataset& set : training.datasets) {
      weights.push_back(set.weight.value_or(1));
      names.push_back(set.name);
    }
    if (!weights.empty()) data::BlendSchedule(weights, names);
  });
}

void require_dump_folder(const TrainConfig& config) {
  if (!config.job.dump_folder.empty()) return;
  throw ConfigError("[job] dump_folder is empty: expected the run's folder; \".\" is the working directory");
}

void require_dataset(const TrainConfig& config) {
  if (!training_datasets(config).empty() || !config.stream.paths.empty() || trains_on_chats(config)) return;
  throw ConfigError(
      "[training] dataset_path is not set: expected a token file; `phalanx tokenize` makes one; or [stream] paths, for "
      "texts, or [sft] conversations, or [dpo] preferences");
}

}  // namespace phalanx::config
