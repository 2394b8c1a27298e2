// The command line of `phalanx generate`, parsed by the front program and by the worker. It uses no tensors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"
#include "cli/model_arguments.h"
#include "cli/sampling_arguments.h"
#include "phalanx/infer/jobs/prompts.h"

namespace phalanx::cli {

extern const std::string_view kGenerateHelp;

struct GenerateArguments : ModelArguments, SamplingArguments {
  std::vector<std::string> prompts;
  std::string prompts_file;
  bool is_chat = false;          // the prompts file holds conversations
  std::string chat_template;     // its name, where the model has several
  std::int64_t cache_bytes = 0;  // 0: no limit
  bool ignore_end = false;
  std::string output;  // the folder of a job; empty: standard output
  std::string final_file = "results.jsonl";
  bool strict = false;         // the first prompt of a job that cannot be answered ends the job
  bool allow_skipped = false;  // prompts of a job that cannot be answered are not a failure
  infer::PromptFormat format;
  std::string response_field = "completion";

  bool streams() const { return prompts.size() == 1 && prompts_file.empty() && output.empty(); }
};

/// Throws UsageError or ConfigError.
GenerateArguments parse_generate_arguments(const Arguments& arguments);

}  // namespace phalanx::cli
