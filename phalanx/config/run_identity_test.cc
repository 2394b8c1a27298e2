#include "phalanx/config/run_identity.h"

#include <gtest/gtest.h>

#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/config/config_schema.h"
#include "phalanx/config/model_config.h"
#include "phalanx/config/setting_rules.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx::config {
namespace {

using nlohmann::json;

json identity_of(const TrainConfig& config, const json& data = json::object(), std::string libtorch = "2.13.0",
                 const json& validation = json::object()) {
  const json none = json::object();
  return run_identity({.config = config,
                       .plan = plan_run(config, 1),
                       .model = model_config(config),
                       .data = data,
                       .validation = validation,
                       .tokenizer = none,
                       .libtorch = std::move(libtorch)});
}

TrainConfig config_with(const std::vector<std::string>& flags) {
  return parse_config("[model]\nflavor = \"debug\"\n", "test", flags);
}

std::vector<std::string> change_lines(const std::vector<IdentityChange>& changes) {
  std::vector<std::string> lines;
  for (const auto& change : changes) lines.push_back(change.line());
  return lines;
}

IdentityComparison compare(const std::vector<std::string>& saved, const std::vector<std::string>& now) {
  const TrainConfig config = config_with(now);
  return compare_identities(identity_of(config_with(saved)), identity_of(config), config);
}

TEST(SettingRules, EveryKeyHasOne) {
  std::set<std::string> keys, rules;
  for (const Key& key : known_keys()) keys.insert(std::string(key.section) + "." + std::string(key.name));
  for (const SettingRule& rule : setting_rules()) {
    const std::string name = std::string(rule.section) + "." + std::string(rule.name);
    EXPECT_TRUE(rules.insert(name).second) << name << " has two rules";
    EXPECT_TRUE(keys.contains(name)) << name << " is no key";
    EXPECT_EQ(rule.why.empty(), rule.on_resume == OnResume::said) << name;
  }
  for (const std::string& key : keys) EXPECT_TRUE(rules.contains(key)) << key << " needs a row in setting_rules.cc";
}

// Each key that is logged or refused is found when it alone is changed.
TEST(RunIdentity, EveryComparedKeyIsFoundWhenItChanges) {
  int changed = 0;
  for (const Key& key : known_keys()) {
    const SettingRule* rule = setting_rule(key.section, key.name);
    if (rule->on_resume != OnResume::said && rule->on_resume != OnResume::refused) continue;
    TrainConfig config = config_with(
                    {"--optimizer.momentum=0.5", "--lora.rank=4", "--model.name=mixtral", "--model.flavor=debug"}),
                other = config;
    if (key.name.starts_with("moe_router_")) {  // of biases, which adapters have no place for
      config.lora.rank = other.lora.rank = 0;
      config.training.moe_router_enable_expert_bias = other.training.moe_router_enable_expert_bias = true;
    }
    if (key.name == "moe_aux_loss_unit") {  // of a loss with a weight
      config.training.moe_aux_loss_coeff = other.training.moe_aux_loss_coeff = 0.01;
    }
    const Slot slot = key.slot(other);
    if (auto* const* value = std::get_if<bool*>(&slot)) **value = !**value;
    if (auto* const* value = std::get_if<std::int64_t*>(&slot)) **value = **value <= 0 ? 16 : **value * 2;
    if (auto* const* value = std::get_if<double*>(&slot)) **value = **value / 2 + 0.125;
    if (auto* const* value = std::get_if<std::string*>(&slot)) **value += "x";
    if (auto* const* value = std::get_if<std::optional<double>*>(&slot)) **value = 0.25;
    if (auto* const* value = std::get_if<std::vector<std::string>*>(&slot)) (*value)->emplace_back("*norm*");
    if (auto* const* value = std::get_if<Datasets*>(&slot)) (*value)->push_back({.path = "x", .name = "x"});
    if (auto* const* value = std::get_if<OptimizerGroups*>(&slot))
      (*value)->push_back({.params = {"x"}, .lr_factor = 2});
    if (auto* const* value = std::get_if<std::vector<double>*>(&slot)) (*value)->push_back(1);
    if (key.name == "local_batch_size") other.training.global_batch_size = config.training.local_batch_size * 2;
    const auto found = compare_identities(identity_of(config), identity_of(other), other);
    std::string all;
    for (const auto& line : change_lines(found.changes)) all += line + "\n";
    for (const auto& line : change_lines(found.refused)) all += line + "\n";
    EXPECT_THAT(all, HasSubstr("[" + std::string(key.section) + "] " + std::string(key.name) + ": saved "));
    ++changed;
  }
  EXPECT_GT(changed, 20);
}

TEST(RunIdentity, WhatMayChangeIsSaidWithBothValues) {
  const auto found = compare({"--optimizer.lr=0.001", "--training.steps=100"},
                             {"--optimizer.lr=0.002", "--training.steps=200", "--lr_scheduler.decay_ratio=0.5"});
  EXPECT_THAT(change_lines(found.changes),
              ElementsAre("[lr_scheduler] decay_ratio: saved not set, now 0.5",
                          "[optimizer] lr: saved 0.001, now 0.002", "[training] steps: saved 100, now 200"));
  EXPECT_THAT(found.refused, IsEmpty());
  EXPECT_THAT(found.changes[1].record().dump(), R"({"key":"[optimizer] lr","now":0.002,"saved":0.001})");
}

TEST(RunIdentity, KeysOfAdaptersMeanNothingWithoutThem) {
  const auto found = compare({}, {"--lora.alpha=3", "--lora.target_modules=q_proj"});
  EXPECT_THAT(found.refused, IsEmpty());
  EXPECT_THAT(found.changes, IsEmpty());
  EXPECT_THAT(change_lines(compare({"--lora.rank=4"}, {"--lora.rank=4", "--lora.alpha=3"}).refused),
              ElementsAre(HasSubstr("[lora] alpha: saved 16.0, now 3.0")));
}

TEST(RunIdentity, NothingChangedAndOtherLayoutsSayNothing) {
  EXPECT_THAT(compare({}, {}).changes, IsEmpty());
  EXPECT_THAT(compare({"--training.global_batch_size=8"},
                      {"--training.global_batch_size=8", "--job.dump_folder=/elsewhere", "--checkpoint.interval=3",
                       "--activation_checkpoint.mode=full", "--metrics.log_freq=1"})
                  .changes,
              IsEmpty());
}

TEST(RunIdentity, TheBatchIsComparedAsItIs) {
  EXPECT_THAT(
      change_lines(compare({"--training.local_batch_size=4"}, {"--training.local_batch_size=2"}).changes),
      ElementsAre("[training] global_batch_size: saved 4, now 2", "[training] local_batch_size: saved 4, now 2"));
  EXPECT_THAT(
      change_lines(compare({"--training.global_batch_size=8", "--training.local_batch_size=8"},
                           {"--training.global_batch_size=8", "--training.local_batch_size=4"})
                       .changes),
      ElementsAre("training.accumulation_steps: saved 1, now 2", "[training] local_batch_size: saved 8, now 4"));
}

TEST(RunIdentity, AnotherOptimizersStateIsRefused) {
  EXPECT_THAT(change_lines(compare({}, {"--optimizer.name=SGD", "--optimizer.momentum=0.9"}).refused),
              ElementsAre(AllOf(HasSubstr("[optimizer] name: saved \"AdamW\", now \"SGD\""), HasSubstr("state"))));
  EXPECT_THAT(refusal_text(compare({}, {"--optimizer.name=SGD"}), "step-7"),
              HasSubstr("checkpoint step-7 does not fit this run:"));
  const std::string sgd = "--optimizer.name=SGD", momentum = "--optimizer.momentum=0.9";
  EXPECT_THAT(change_lines(compare({sgd}, {sgd, momentum}).refused),
              ElementsAre(HasSubstr("optimizer.state: saved \"SGD without momentum\", now \"SGD with momentum\"")));
  EXPECT_THAT(change_lines(compare({sgd, momentum}, {sgd, "--optimizer.momentum=0.8"}).refused), IsEmpty());
  const std::string lion = "--optimizer.name=Lion";
  EXPECT_THAT(change_lines(compare({}, {lion}).refused), ElementsAre(HasSubstr("saved \"AdamW\", now \"Lion\"")));
  EXPECT_THAT(change_lines(compare({lion}, {lion, "--optimizer.eps=1e-3", momentum}).changes),
              AllOf(SizeIs(2), Each(HasSubstr("without effect in these runs"))));
  EXPECT_THAT(change_lines(compare({lion}, {lion, "--optimizer.beta2=0.99"}).changes), SizeIs(1));
}

TEST(RunIdentity, AnotherModelIsRefusedUnlessAskedFor) {
  const std::vector<std::string> other = {"--model.rope_theta=500000", "--model.norm_eps=1e-6"};
  const auto refused = compare({}, other);
  EXPECT_THAT(change_lines(refused.refused),
              ElementsAre(HasSubstr("model norm_eps: saved 1e-05, now 1e-06"),
                          AllOf(HasSubstr("model rope.theta: saved 10000.0, now 500000.0"),
                                HasSubstr("[checkpoint] allow_model_mismatch = true loads all the same"))));
  EXPECT_THAT(refusal_text(refused, "step-7"),
              AllOf(HasSubstr("checkpoint step-7 does not fit this model:"), HasSubstr("rope.theta")));
  auto allowed = other;
  allowed.emplace_back("--checkpoint.allow_model_mismatch");
  const auto said = compare({}, allowed);
  EXPECT_THAT(said.refused, IsEmpty());
  EXPECT_THAT(change_lines(said.changes), ElementsAre(HasSubstr("norm_eps"), HasSubstr("rope.theta")));
  EXPECT_THAT(said.changes[0].line(), HasSubstr("[checkpoint] allow_model_mismatch"));
}

// A difference that cannot be loaded is neither offered nor taken for allowed.
TEST(RunIdentity, OtherShapesAreRefusedWithAdviceThatHelps) {
  const std::string allowed = "--checkpoint.allow_model_mismatch";
  for (const char* flag : {"--model.dim=128", "--model.n_layers=3", "--model.n_heads=8", "--model.ffn_hidden=96",
                           "--model.vocab_size=513", "--model.tie_embeddings"}) {
    for (const std::vector<std::string>& flags : {std::vector<std::string>{flag}, {flag, allowed}}) {
      const auto found = compare({}, flags);
      EXPECT_TRUE(found.changes.empty()) << flag;
      EXPECT_THAT(refusal_text(found, "step-7"),
                  AllOf(HasSubstr("checkpoint step-7 does not fit this model:"), HasSubstr("saved "),
                        HasSubstr("set [model] to the saved values, or start a new run in another [job] dump_folder"),
                        Not(HasSubstr("allow_model_mismatch")), Not(HasSubstr("initial_load_path"))))
          << flag;
    }
  }
  // Another number of heads, with as many rows in all.
  EXPECT_THAT(refusal_text(compare({}, {"--model.n_heads=8", "--model.n_kv_heads=4"}), "step-7"),
              HasSubstr("allow_model_mismatch = true loads all the same"));
}

TEST(RunIdentity, VersionsAreSaidAndSectionsThatOneLacksAreNamed) {
  const TrainConfig config = config_with({});
  const json data = {{"tokens", 7}};
  const auto found = compare_identities(identity_of(config, data, "2.12.0"), identity_of(config), config);
  EXPECT_THAT(change_lines(found.changes), ElementsAre("versions libtorch: saved \"2.12.0\", now \"2.13.0\""));
  EXPECT_THAT(found.not_compared, ElementsAre("data"));
}

TEST(RunIdentity, OtherValidationDataAreSaid) {
  const TrainConfig with = config_with({"--validation.enable"}), without = config_with({});
  const auto held_out = [](const char* name, const char* content) {
    return json{{"name", name}, {"tokens", 7}, {"content", content}, {"range", {0, 7}}};
  };
  const auto identity = [&](const TrainConfig& config, const json& validation) {
    return identity_of(config, {{"tokens", 7}}, "2.13.0", validation);
  };
  const json saved = identity(with, held_out("a.bin", "9f"));
  const auto other = compare_identities(saved, identity(with, held_out("b.bin", "02")), with);
  EXPECT_THAT(change_lines(other.changes), ElementsAre("validation content: saved \"9f\", now \"02\"",
                                                       "validation name: saved \"a.bin\", now \"b.bin\""));
  EXPECT_THAT(other.refused, IsEmpty());
  // The same file under another name; no validation now, or no validation then; a checkpoint that does not record it.
  EXPECT_THAT(compare_identities(saved, identity(with, held_out("b.bin", "9f")), with).changes, IsEmpty());
  const json none = identity(without, json::object());
  const auto stopped = compare_identities(saved, none, without), begun = compare_identities(none, saved, with);
  EXPECT_THAT(change_lines(stopped.changes), ElementsAre("[validation] enable: saved true, now false"));
  EXPECT_THAT(stopped.not_compared, IsEmpty());
  EXPECT_THAT(begun.not_compared, IsEmpty());
  EXPECT_THAT(compare_identities(identity(with, json::object()), saved, with).not_compared, ElementsAre("validation"));
}

TEST(RunIdentity, GoesThroughTheMetadataOfACheckpoint) {
  const TrainConfig config = config_with({"--optimizer.lr=0.003"});
  const json identity = identity_of(config, {{"tokens", 7}});
  const json metadata = {{"model", models::llama_metadata(model_config(config))},
                         {"run", identity_for_metadata(identity)}};
  EXPECT_EQ(identity_in_metadata(metadata.dump(), "manifest.json"), identity);
}

TEST(RunIdentity, OlderCheckpointsSayWhatTheyDo) {
  const TrainConfig config = config_with({"--model.n_heads=8"});
  const json metadata = {{"model", models::llama_metadata(model_config(config_with({})))}};
  const json saved = identity_in_metadata(metadata.dump(), "manifest.json");
  const auto found = compare_identities(saved, identity_of(config), config);
  EXPECT_THAT(change_lines(found.refused),
              ElementsAre(HasSubstr("model head_dim: saved 16, now 8"), HasSubstr("model n_heads: saved 4, now 8")));
  EXPECT_THAT(found.not_compared, ElementsAre("settings", "versions"));
  EXPECT_THAT(compare_identities(identity_in_metadata("{}", "m"), identity_of(config), config).not_compared,
              ElementsAre("model", "settings", "versions"));
}

TEST(RunIdentity, AKeyThatIsYoungerThanTheCheckpointWasAtItsDefault) {
  const TrainConfig config = config_with({"--optimizer.beta2=0.99"}), plain = config_with({});
  json saved = identity_of(plain);
  saved["settings"]["optimizer"].erase("beta2");
  EXPECT_THAT(compare_identities(saved, identity_of(plain), plain).changes, IsEmpty());
  EXPECT_THAT(change_lines(compare_identities(saved, identity_of(config), config).changes),
              ElementsAre("[optimizer] beta2: saved not set, now 0.99"));
}

std::string metadata_failure(const std::string& metadata) {
  return error_text<CheckpointError>([&] { identity_in_metadata(metadata, "step-3/manifest.json"); });
}

TEST(RunIdentity, AFingerprintOfAnotherVersionIsNamedAndNoDifference) {
  json saved = identity_of(config_with({})), found = saved;
  saved["tokenizer"] = {{"fingerprint", "tok0:1"}, {"vocab_size", 500}};
  found["tokenizer"] = {{"fingerprint", "tok1:1"}, {"vocab_size", 500}};
  IdentityComparison comparison = compare_identities(saved, found, config_with({}));
  EXPECT_THAT(comparison.refused, IsEmpty());
  EXPECT_THAT(comparison.not_compared, Contains("tokenizer"));
  saved["tokenizer"]["fingerprint"] = "tok1:2";
  comparison = compare_identities(saved, found, config_with({}));
  EXPECT_THAT(change_lines(comparison.refused), ElementsAre(HasSubstr("tokenizer fingerprint: saved \"tok1:2\"")));
}

TEST(RunIdentity, AnotherTokenThatEndsDocumentsIsRefused) {
  json saved = identity_of(config_with({})), found = saved;
  saved["tokenizer"] = {{"fingerprint", "tok1:1"}, {"vocab_size", 500}, {"document_end", 0}};
  found["tokenizer"] = {{"fingerprint", "tok1:1"}, {"vocab_size", 500}, {"document_end", "none"}};
  EXPECT_THAT(change_lines(compare_identities(saved, found, config_with({})).refused),
              ElementsAre(HasSubstr("tokenizer document_end: saved 0, now \"none\"")));
  saved["tokenizer"].erase("document_end");
  const IdentityComparison older = compare_identities(saved, found, config_with({}));
  EXPECT_THAT(older.refused, IsEmpty());
  EXPECT_THAT(older.not_compared, Contains("tokenizer document_end"));
}

TEST(RunIdentity, TheIdIsThatOfAllThatARunBeginsWith) {
  const auto id = [](const std::vector<std::string>& flags) {
    const TrainConfig config = config_with(flags);
    return run_id(config, identity_of(config));
  };
  EXPECT_EQ(id({}), id({"--job.dump_folder=elsewhere"}));
  EXPECT_NE(id({}), id({"--optimizer.lr=1e-3"}));
  EXPECT_NE(id({}), id({"--checkpoint.no-enable"}));
  EXPECT_NE(id({}), run_id(config_with({}), identity_of(config_with({}), {{"content", "another"}})));
}

TEST(RunIdentity, WhatTheFlavorGivesIsNoNumberOfOneRank) {
  EXPECT_EQ(settings_of_all_ranks(config_with({}))["model"]["dim"], nullptr);
  EXPECT_EQ(settings_of_all_ranks(config_with({"--model.dim=32"}))["model"]["dim"], 32);
}

TEST(RunIdentity, WhatItCannotReadItSays) {
  EXPECT_THAT(metadata_failure(R"({"run": {"version": 2}})"),
              AllOf(HasSubstr("step-3/manifest.json"), HasSubstr("version 2"), HasSubstr("reads version 1")));
  for (const char* text : {R"({"run": {}})", R"({"run": 7})", R"({"run": {"version": "x"}})"}) {
    EXPECT_THAT(metadata_failure(text), HasSubstr("metadata.run has no \"version\"")) << text;
  }
  EXPECT_THAT(metadata_failure(R"({"model": {"dim": 0, "n_layers": 1, "n_heads": 0, "n_kv_heads": 0, "ffn_hidden": 1,
      "vocab_size": 1, "max_seq_len": 1, "rope_theta": 1.0, "norm_eps": 0.0, "tie_embeddings": false}})"),
              HasSubstr("step-3/manifest.json: metadata.model"));
}

TEST(RunIdentity, RanksMayDifferInPlacesOfTheirOwn) {
  const auto settings = [](const std::vector<std::string>& flags) { return settings_of_all_ranks(config_with(flags)); };
  EXPECT_EQ(settings({}), settings({"--comm.save_traces_folder=/local", "--profiling.save_traces_folder=/local",
                                    "--model.hf_assets_path=/local/model", "--training.dataset_path=/local/data",
                                    "--validation.dataset_path=/local/held_out"}));
  const auto files = [](const char* name, const char* content) {
    const json file = {{"name", name}, {"content", content}};
    return files_of_all_ranks(identity_of(config_with({}), file, "2.13.0", file));
  };
  EXPECT_EQ(files("a.bin", "9f"), files("b.bin", "9f")) << "compared by content";
  EXPECT_NE(files("a.bin", "9f"), files("a.bin", "02"));
  const auto of_data = [](const nlohmann::json& data) { return files_of_all_ranks({{"data", data}}); };
  const auto blend = [&](const char* name, const char* content) {
    const nlohmann::json stream = {{"name", name}, {"content", content}};
    return of_data({{"sets", {{{"name", "web"}, {"share", 3}, {"stream", stream}}}}});
  };
  EXPECT_EQ(blend("a.bin", "9f"), blend("b.bin", "9f"));
  EXPECT_NE(blend("a.bin", "9f"), blend("a.bin", "02"));
  const auto texts = [&](const char* name, int bytes) {
    return of_data({{"files", {{{"name", name}, {"bytes", bytes}}}}});
  };
  EXPECT_EQ(texts("a.jsonl", 1), texts("b.jsonl", 1));
  EXPECT_NE(texts("a.jsonl", 1), texts("a.jsonl", 2));
  for (const char* flag : {"--optimizer.lr=0.1", "--debug.seed=3", "--training.max_norm=2", "--checkpoint.interval=7",
                           "--parallelism.zero_stage=2", "--checkpoint.folder=other"}) {
    EXPECT_NE(settings({}), settings({flag})) << flag;
  }
}

}  // namespace
}  // namespace phalanx::config
