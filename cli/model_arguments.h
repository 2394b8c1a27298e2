// The options that `phalanx generate` and `phalanx eval` share, some of them also with `phalanx chat`:
// a model, and the ranks that run it.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace phalanx::cli {

struct ModelArguments {
  std::string checkpoint, tokenizer;
  std::string adapter;  // a folder as PEFT saves it; empty: none
  bool allow_base_mismatch = false;
  bool allow_tokenizer_mismatch = false;
  bool allow_model_mismatch = false;
  std::int64_t batch_size = 8;
  std::string ranks;            // the value of -n; empty: not given
  std::int64_t tp = 1, pp = 1;  // tp x pp ranks form a copy of the model
  std::string device;           // cpu, cuda, cuda:N; empty: cuda if there is a GPU
  std::string dtype = "float32", backend = "auto";
  bool quiet = false;
};

void add_model_options(CLI::App& app, ModelArguments& parsed);

/// Throws a UsageError for --allow-base-mismatch without --adapter.
void require_adapter_for_base(const ModelArguments& parsed);

/// Throws a UsageError for a wrong value, and replaces an alias of a dtype by its name.
void check_model_options(ModelArguments& parsed);

}  // namespace phalanx::cli
