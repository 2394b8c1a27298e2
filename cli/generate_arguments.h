// The command line of `phalanx generate`, read by the front and by the worker alike. Knows no tensor.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"
#include "phalanx/infer/jobs/prompts.h"
#include "phalanx/infer/jobs/sampling.h"

namespace phalanx::cli {

extern const std::string_view kGenerateHelp;

struct GenerateArguments {
  std::string checkpoint;
  std::vector<std::string> prompts;
  std::string prompts_file;
  std::string tokenizer;
  bool allow_tokenizer_mismatch = false;
  std::int64_t max_new_tokens = 128;
  infer::SamplingOptions sampling;
  std::vector<std::string> stops;
  std::int64_t batch_size = 8;
  std::int64_t cache_bytes = 0;  // 0: no bound
  bool ignore_end = false;
  std::string output;  // a job's folder; empty: to standard output
  std::string final_file = "results.jsonl";
  bool strict = false;         // the first prompt of a job that cannot be answered ends it
  bool allow_skipped = false;  // prompts of a job that cannot be answered are no failure
  infer::PromptFormat format;
  std::string response_field = "completion";
  std::int64_t tp = 1, pp = 1;
  std::string device, dtype = "float32", backend = "auto";
  bool quiet = false;
  bool allow_model_mismatch = false;

  bool streams() const { return prompts.size() == 1 && prompts_file.empty() && output.empty(); }
};

/// Without -n, which is the launcher's. Throws UsageError or ConfigError.
GenerateArguments parse_generate_arguments(const Arguments& arguments);

}  // namespace phalanx::cli
