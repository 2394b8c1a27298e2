// Identifies the run that a saved state belongs to, as a JSON document. It is saved with every checkpoint, compared
// when a run resumes from the checkpoint, and compared between ranks when a run begins. It does not use torch.
//
//   {"version": 1, "id": "0f3a...",                                    of the run: of everything it began with
//    "model": {"n_heads": 4, "rope": {"theta": 10000.0, ...}, ...},     models/config/model_identity.h
//    "settings": {"optimizer": {"lr": 0.001, ...}, ...},                keys that count, by setting_rules.h
//    "data": {...}, "validation": {...}, "tokenizer": {...},            fingerprints; empty where there is none
//    "versions": {"phalanx": "0.1.0", "libtorch": "2.13.0"}}
//
// In a checkpoint's metadata this document is "run". The model is not in it there: it is "model" of the metadata.
//
//   const IdentityComparison found = compare_identities(identity_in_metadata(manifest.metadata, where), mine, config);
//   if (!found.refused.empty()) throw CheckpointError(refusal_text(found, where));
//   for (const IdentityChange& change : found.changes) log_info(change.line());
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/config/config.h"
#include "phalanx/config/run_plan.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx::config {

struct RunIdentityParts {
  const TrainConfig& config;
  const RunPlan& plan;
  const models::LlamaConfig& model;
  const nlohmann::json& data;        // a JSON object, like the next two
  const nlohmann::json& validation;  // of the held-out tokens
  const nlohmann::json& tokenizer;
  std::string libtorch;  // its version
};

nlohmann::json run_identity(const RunIdentityParts& parts);

/// Reads the document, with the model, from the metadata of a checkpoint. Missing sections are empty. `where` begins
/// the messages. Throws CheckpointError if it is malformed, or of a version that this program does not read.
nlohmann::json identity_in_metadata(const std::string& metadata, const std::string& where);
/// The "id" of a run that begins with this configuration and identity. The same command begins the same run, wherever
/// its folder is. A resumed run keeps its id.
std::string run_id(TrainConfig config, const nlohmann::json& identity);

/// The document as it goes into the metadata as "run".
nlohmann::json identity_for_metadata(nlohmann::json identity);

struct IdentityChange {
  std::string label;                           // "[optimizer] lr", "model n_heads"
  std::optional<nlohmann::json> saved, found;  // unset: missing
  std::string note;                            // why it is refused, or which key allows it

  std::string line() const;       // "[optimizer] lr: saved 0.001, now 0.002"
  nlohmann::json record() const;  // {"key": ..., "saved": ..., "now": ...}
};

struct IdentityComparison {
  std::vector<IdentityChange> refused;
  std::vector<IdentityChange> changes;    // allowed, to be logged
  std::vector<std::string> not_compared;  // sections that one of the two documents lacks
  bool other_shapes = false;              // tensor shapes of the models differ: always refused, no key allows it
};

/// `config` decides which differences are allowed.
IdentityComparison compare_identities(const nlohmann::json& saved, const nlohmann::json& found,
                                      const TrainConfig& config);

/// The text of the error if anything is refused.
std::string refusal_text(const IdentityComparison& comparison, const std::string& where);

/// The part of the identity that every rank must find in its own files: without the files' names.
nlohmann::json files_of_all_ranks(const nlohmann::json& identity);

/// All keys except those that change neither state nor losses (OnResume::silent), as {"optimizer": {"lr": 0.001}, ...}.
nlohmann::json settings_that_count(const TrainConfig& config);

/// All keys that must have the same value on every rank, as {"optimizer": {"lr": 0.001}, ...}.
nlohmann::json settings_of_all_ranks(const TrainConfig& config);

}  // namespace phalanx::config
