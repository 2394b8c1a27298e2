#include "phalanx/config/run_identity.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <variant>

#include "phalanx/base/content_hash.h"
#include "phalanx/base/error.h"
#include "phalanx/base/json_difference.h"
#include "phalanx/base/json_number.h"
#include "phalanx/base/json_text.h"
#include "phalanx/base/version.h"
#include "phalanx/config/config_schema.h"
#include "phalanx/config/setting_rules.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"
#include "phalanx/models/config/llama_json.h"
#include "phalanx/models/config/model_identity.h"

namespace phalanx::config {
namespace {

constexpr int kIdentityVersion = 1;

/// The meaning of a difference under a key of the document.
struct IdentityRule {
  std::string_view key;  // and all keys below it
  bool refused = false;
  std::string_view why = {};
  std::string_view allowed_by = {};  // the key of the configuration that turns the refusal into a log line
  bool (*is_allowed)(const TrainConfig&) = [](const TrainConfig&) { return false; };
};

/// The longest matching key counts.
const std::vector<IdentityRule>& identity_rules() {
  static const std::vector<IdentityRule> rules = {
      {"model", true, "the same weights give other results in another model", "[checkpoint] allow_model_mismatch",
       [](const TrainConfig& config) { return config.checkpoint.allow_model_mismatch; }},
      {"settings"},
      {"settings.optimizer.state", true, "the optimizer's state would not be what it goes on from"},
      {"settings.ema.state", true, "an average of the weights begins with a run and is kept to its end"},
      {"data"},  // what may differ depends on the position: data_resume.h
      {"validation"},
      {"tokenizer", true, "the same ids would mean other texts", "[training] allow_tokenizer_mismatch",
       [](const TrainConfig& config) { return config.training.allow_tokenizer_mismatch; }},
      {"versions"},
  };
  return rules;
}

struct ToJson {
  nlohmann::json operator()(const auto* value) const { return *value; }
  template <class T>
  nlohmann::json operator()(const std::optional<T>* value) const {
    return *value ? nlohmann::json(**value) : nlohmann::json(nullptr);
  }
};

nlohmann::json settings_where(const TrainConfig& config, const std::function<bool(const SettingRule*)>& wanted) {
  TrainConfig copy = config;
  nlohmann::json settings = nlohmann::json::object();
  for (const Key& key : known_keys()) {
    if (!wanted(setting_rule(key.section, key.name))) continue;
    settings[std::string(key.section)][std::string(key.name)] = std::visit(ToJson(), key.slot(copy));
  }
  return settings;
}

bool is_compared(const SettingRule* rule) {
  return rule == nullptr || rule->on_resume == OnResume::said || rule->on_resume == OnResume::refused;
}

std::string kind_of_state(const TrainConfig& config) {
  if (config.optimizer.name != "SGD") return config.optimizer.name;
  return config.optimizer.momentum > 0 ? "SGD with momentum" : "SGD without momentum";
}

nlohmann::json compared_settings(const TrainConfig& config, const RunPlan& plan) {
  nlohmann::json settings = settings_where(config, is_compared);
  settings["training"]["local_batch_size"] = plan.local_batch_size;
  settings["training"]["global_batch_size"] = plan.global_batch_size;  // the real value, if the key says -1
  settings["training"]["accumulation_steps"] = plan.accumulation_steps;
  settings["optimizer"]["state"] = kind_of_state(config);
  if (config.ema.decay > 0) settings["ema"]["state"] = "kept";
  return settings;
}

/// The section, which may have dots, and the name.
std::pair<std::string_view, std::string_view> split_setting(std::string_view key) {
  const std::size_t dot = std::min(key.rfind('.'), key.size());
  return {key.substr(0, dot), key.substr(std::min(dot + 1, key.size()))};
}

std::pair<std::string_view, std::string_view> split_key(std::string_view key) {
  const std::size_t dot = std::min(key.find('.'), key.size());
  return {key.substr(0, dot), key.substr(std::min(dot + 1, key.size()))};
}

const SettingRule* rule_of_setting(std::string_view key) {
  const auto [document_section, rest] = split_key(key);
  if (document_section != "settings") return nullptr;
  const auto [section, name] = split_setting(rest);
  return setting_rule(section, name);
}

std::string label_of(std::string_view key) {
  const auto [section, rest] = split_key(key);
  if (const SettingRule* rule = rule_of_setting(key)) return fmt::format("[{}] {}", rule->section, rule->name);
  return section == "settings" ? std::string(rest) : fmt::format("{} {}", section, rest);
}

IdentityRule rule_of(std::string_view key) {
  IdentityRule best;
  for (const IdentityRule& rule : identity_rules()) {
    const bool fits = key.starts_with(rule.key) && (key.size() == rule.key.size() || key[rule.key.size()] == '.');
    if (fits && rule.key.size() >= best.key.size()) best = rule;
  }
  const SettingRule* setting = rule_of_setting(key);
  if (setting != nullptr && setting->on_resume == OnResume::refused) {
    best.refused = true;
    best.why = setting->why;
  }
  return best;
}

bool is_fingerprint_of_other_version(const JsonDifference& difference) {
  if (difference.key != "tokenizer.fingerprint" || !difference.saved || !difference.found) return false;
  return difference.saved->is_string() && difference.found->is_string() &&
         !data::are_other_tokenizers(difference.saved->get<std::string>(), difference.found->get<std::string>());
}

/// Token files need not describe their tokenizer completely, and older ones do not.
bool is_said_by_one(const JsonDifference& difference) {
  return difference.key.starts_with("tokenizer.") && (!difference.saved || !difference.found);
}

/// A key without effect in either run: another optimizer's, or of a type that is not used.
bool is_without_effect(const JsonDifference& difference, const nlohmann::json& saved, const nlohmann::json& found) {
  const auto said = [](const nlohmann::json& document, const char* key) {
    const nlohmann::json::json_pointer at(key);
    return document.contains(at) && document.at(at).is_string() ? document.at(at).get<std::string>() : std::string();
  };
  const auto both = [&](const char* key, const auto& is) { return is(said(saved, key)) && is(said(found, key)); };
  const std::string& key = difference.key;
  const auto has_wide_weights = [&](const nlohmann::json& document) {
    return said(document, "/settings/training/dtype") != "bfloat16";
  };
  if (key == "settings.optimizer.master_weights") return has_wide_weights(saved) && has_wide_weights(found);
  if (key == "settings.optimizer.stochastic_rounding") {
    return both("/settings/optimizer/state_dtype", [](const std::string& type) { return type != "bfloat16"; }) &&
           has_wide_weights(saved) && has_wide_weights(found);
  }
  if (key == "settings.training.initial_loss_scale" || key == "settings.training.loss_scale_window") {
    return both("/settings/training/mixed_precision_param", [](const std::string& type) { return type != "float16"; });
  }
  if (key.starts_with("settings.quantize.linear.float8.")) {
    const auto is_off = [](const nlohmann::json& document) {
      const nlohmann::json::json_pointer converters("/settings/model/converters");
      return !document.contains(converters) || document.at(converters).empty();
    };
    return is_off(saved) && is_off(found);
  }
  if (key == "settings.optimizer.momentum") {
    return both("/settings/optimizer/name", [](const std::string& name) { return name != "SGD"; });
  }
  if (key.starts_with("settings.muon.")) {
    return both("/settings/optimizer/name", [](const std::string& name) { return name != "Muon"; });
  }
  if (key == "settings.optimizer.beta1" || key == "settings.optimizer.beta2") {
    return both("/settings/optimizer/name", [](const std::string& name) { return name == "SGD"; });
  }
  if (key == "settings.optimizer.eps") {
    return both("/settings/optimizer/name", [](const std::string& name) { return name == "SGD" || name == "Lion"; });
  }
  return false;
}

/// Of adapters that neither run has.
bool is_of_no_adapter(const JsonDifference& difference, const nlohmann::json& saved, const nlohmann::json& found) {
  if (!difference.key.starts_with("settings.lora.")) return false;
  const nlohmann::json::json_pointer rank("/settings/lora/rank");
  const auto is_off = [&](const nlohmann::json& document) {
    return !document.contains(rank) || document.at(rank) == 0;
  };
  return is_off(saved) && is_off(found);
}

/// A key that did not exist when the checkpoint was saved had its default there.
bool is_default_of_new_key(const JsonDifference& difference, const nlohmann::json& defaults) {
  if (difference.saved || !difference.key.starts_with("settings.")) return false;
  const auto found = defaults.find(difference.key.substr(std::string_view("settings.").size()));
  return found != defaults.end() && *found == *difference.found;
}

/// A file that was only moved or copied counts as the same.
bool is_other_name_alone(const JsonDifference& difference, const nlohmann::json& saved, const nlohmann::json& found) {
  const auto content = [](const nlohmann::json& document) {
    return document.at("validation").value("content", nlohmann::json());
  };
  return difference.key == "validation.name" && content(saved) == content(found);
}

/// There is nothing to compare with a run without validation.
bool is_without_validation(const nlohmann::json& saved, const nlohmann::json& found) {
  const nlohmann::json::json_pointer enabled("/settings/validation/enable");
  const auto is_off = [&](const nlohmann::json& document) {
    return document.contains(enabled) && document.at(enabled) == false;
  };
  return is_off(saved) || is_off(found);
}

bool is_empty_section(const nlohmann::json& document, const std::string& section) {
  return !document.contains(section) || document.at(section).empty();
}

}  // namespace

nlohmann::json run_identity(const RunIdentityParts& parts) {
  return {{"version", kIdentityVersion},
          {"model", models::model_identity(parts.model)},
          {"settings", compared_settings(parts.config, parts.plan)},
          {"data", parts.data},
          {"validation", parts.validation},
          {"tokenizer", parts.tokenizer},
          {"versions", {{"phalanx", version()}, {"libtorch", parts.libtorch}}}};
}

nlohmann::json identity_in_metadata(const std::string& metadata, const std::string& where) {
  const auto json = parse_json_object<CheckpointError>(metadata, where);
  nlohmann::json identity = nlohmann::json::object();
  if (const auto run = json.find("run"); run != json.end()) {
    const bool is_readable = run->is_object() && run->contains("version") && is_whole_number(run->at("version"));
    if (!is_readable) throw CheckpointError(fmt::format("{}: metadata.run has no \"version\"", where));
    if (const auto number = run->at("version").get<std::int64_t>(); number != kIdentityVersion) {
      throw CheckpointError(fmt::format(
          "{}: what it says of its run (metadata.run) is of version {}; this program reads version {}: it was saved by "
          "another version of Phalanx",
          where, number, kIdentityVersion));
    }
    identity = *run;
  }
  identity["model"] = nlohmann::json::object();
  const auto model = json.find("model");
  if (model != json.end() && model->is_object() && model->contains("rope_theta")) {
    identity["model"] = models::model_identity(models::llama_from_checkpoint(*model, where));
  }
  return identity;
}

std::string run_id(TrainConfig config, const nlohmann::json& identity) {
  config.job.dump_folder.clear();
  return ContentHash()
      .add(print_config(config))
      .add(identity.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace))
      .hex();
}

nlohmann::json identity_for_metadata(nlohmann::json identity) {
  identity.erase("model");
  return identity;
}

std::string IdentityChange::line() const {
  return fmt::format("{}: saved {}, now {}{}{}", label, json_value_text(saved), json_value_text(found),
                     note.empty() ? "" : ": ", note);
}

nlohmann::json IdentityChange::record() const {
  nlohmann::json record = {{"key", label}};
  if (saved) record["saved"] = *saved;
  if (found) record["now"] = *found;
  if (!note.empty()) record["note"] = note;
  return record;
}

IdentityComparison compare_identities(const nlohmann::json& saved, const nlohmann::json& found,
                                      const TrainConfig& config) {
  IdentityComparison result;
  nlohmann::json before = nlohmann::json::object(), now = nlohmann::json::object();
  for (const char* name : {"model", "settings", "data", "validation", "tokenizer", "versions"}) {
    const std::string section = name;
    const bool is_known = !is_empty_section(saved, section), is_there = !is_empty_section(found, section);
    if (is_known && is_there) {
      before[section] = saved.at(section);
      now[section] = found.at(section);
    } else if ((is_known || is_there) && !(section == "validation" && is_without_validation(saved, found))) {
      result.not_compared.push_back(section);
    }
  }
  const nlohmann::json defaults = flat_json(settings_where(TrainConfig(), [](const SettingRule*) { return true; }));
  const auto differences = json_differences(before, now);
  const bool other_shapes = !models::have_same_shapes(before.value("model", nlohmann::json::object()),
                                                      now.value("model", nlohmann::json::object()));
  const bool is_other_optimizer =
      std::ranges::any_of(differences, [](const JsonDifference& one) { return one.key == "settings.optimizer.name"; });
  for (const JsonDifference& difference : differences) {
    if (is_fingerprint_of_other_version(difference)) {
      result.not_compared.emplace_back("tokenizer");
      continue;
    }
    if (is_said_by_one(difference)) {
      result.not_compared.push_back(label_of(difference.key));
      continue;
    }
    if (is_other_optimizer && difference.key == "settings.optimizer.state") continue;  // the optimizer's name says it
    if (is_default_of_new_key(difference, defaults) || is_of_no_adapter(difference, before, now)) continue;
    if (difference.key.starts_with("data.")) continue;  // compared by data_resume.h
    if (is_other_name_alone(difference, before, now)) continue;
    const IdentityRule rule = rule_of(difference.key);
    IdentityChange change{
        .label = label_of(difference.key), .saved = difference.saved, .found = difference.found, .note = {}};
    if (is_without_effect(difference, before, now)) {
      change.note = "without effect in these runs";
    } else if (difference.key == "settings.training.initial_loss_scale") {
      change.note = "a new run alone begins with it; this one goes on with the saved scale";
    }
    const bool cannot_be_loaded = other_shapes && difference.key.starts_with("model.");
    if (!rule.refused) {
      result.changes.push_back(std::move(change));
    } else if (cannot_be_loaded) {
      result.other_shapes = true;
      result.refused.push_back(std::move(change));
    } else if (rule.is_allowed(config)) {
      change.note = fmt::format("loaded all the same, as {} says", rule.allowed_by);
      result.changes.push_back(std::move(change));
    } else {
      change.note = rule.why;
      if (!rule.allowed_by.empty()) change.note += fmt::format("; {} = true loads all the same", rule.allowed_by);
      result.refused.push_back(std::move(change));
    }
  }
  return result;
}

std::string refusal_text(const IdentityComparison& comparison, const std::string& where) {
  const bool is_of_model = std::ranges::any_of(
      comparison.refused, [](const IdentityChange& change) { return change.label.starts_with("model "); });
  std::string text = fmt::format("checkpoint {} does not fit this {}:", where, is_of_model ? "model" : "run");
  for (const IdentityChange& change : comparison.refused) text += "\n  " + change.line();
  if (comparison.other_shapes) {
    return text +
           "\nits tensors have other names or shapes than this model's, so no key can load them: set [model] to the "
           "saved values, or start a new run in another [job] dump_folder";
  }
  return text +
         "\ngo on with the saved values, or start a new run in another [job] dump_folder (from these weights alone: "
         "[checkpoint] initial_load_path)";
}

nlohmann::json files_of_all_ranks(const nlohmann::json& identity) {
  nlohmann::json files = nlohmann::json::object();
  for (const char* section : {"model", "data", "validation", "tokenizer"}) {
    files[section] = identity.value(section, nlohmann::json::object());
    files[section].erase("name");
  }
  // Of blends and texts, too, the files' names are a matter of each rank.
  for (const char* section : {"data", "validation"}) {
    if (files[section].contains("sets")) {
      for (nlohmann::json& set : files[section]["sets"]) set["stream"].erase("name");
    }
    if (files[section].contains("files")) {
      for (nlohmann::json& file : files[section]["files"]) file.erase("name");
    }
  }
  return files;
}

nlohmann::json settings_that_count(const TrainConfig& config) {
  return settings_where(config,
                        [](const SettingRule* rule) { return rule == nullptr || rule->on_resume != OnResume::silent; });
}

nlohmann::json settings_of_all_ranks(const TrainConfig& config) {
  nlohmann::json settings = settings_where(
      config, [](const SettingRule* rule) { return rule == nullptr || rule->across_ranks == AcrossRanks::same; });
  for (auto& [name, value] : settings["model"].items()) {
    if (value.is_number() && value == 0) value = nullptr;  // the flavor's
  }
  return settings;
}

}  // namespace phalanx::config
