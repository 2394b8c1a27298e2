// Finds everything that can be known to be wrong with a run before its ranks start, and reports it at once: the file
// and its flags, whether the model's dimensions and the number of ranks fit, and files that are missing or do not fit.
//
//   const config::TrainConfig config = read_run_config("llama.toml", overrides, {.ranks = 8});
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/config/config.h"

namespace phalanx::train {

struct RunChecks {
  std::int64_t ranks = 1;
  bool look_at_files = true;  // false: ignore files on disk, which ranks on other nodes may see differently
};

/// As read_config(). A single problem is thrown as its own error type; several are one ConfigError.
config::TrainConfig read_run_config(const std::string& path, const std::vector<std::string>& overrides,
                                    const RunChecks& checks, std::vector<std::string>* notes = nullptr);

/// Throws DataError if the folder of the model's tokenizer, which [metrics] sample_prompt needs, has none.
void require_sample_tokenizer(const config::TrainConfig& config);

}  // namespace phalanx::train
