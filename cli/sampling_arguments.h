// The options that `phalanx generate` and `phalanx chat` share: how tokens are drawn, and where a text ends.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/infer/jobs/sampling.h"

namespace phalanx::cli {

struct SamplingArguments {
  infer::SamplingOptions sampling;
  std::int64_t max_new_tokens = 128;
  std::int64_t seed = 0;
  bool greedy = false;
  bool has_temperature = false;
  std::vector<std::string> stops;  // none of them is empty
};

/// REQUIRES: `parsed` outlives the app.
void add_sampling_options(CLI::App& app, SamplingArguments& parsed);

/// Throws UsageError or ConfigError for a wrong value, and takes --greedy and --seed into `sampling`.
void check_sampling_options(SamplingArguments& parsed);

}  // namespace phalanx::cli
