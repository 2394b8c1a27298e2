// Everything that can be known to be wrong with a run before its ranks are started, in one report: what the file and
// its flags say, what the model's numbers and the ranks make of it, and files that are not there or do not fit.
//
//   const TrainConfig config = read_run_config("llama.toml", overrides, {.ranks = 8});
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/config/config.h"

namespace phalanx::train {

struct RunChecks {
  std::int64_t ranks = 1;
  bool look_at_files = true;  // off: what lies on disks, which ranks on other machines may see otherwise
};

/// As read_config(). One problem is thrown as what it is; several are one ConfigError.
TrainConfig read_run_config(const std::string& path, const std::vector<std::string>& overrides, const RunChecks& checks,
                            std::vector<std::string>* notes = nullptr);

/// DataError where the folder of the model's tokenizer, for [metrics] sample_prompt, has none.
void require_sample_tokenizer(const TrainConfig& config);

}  // namespace phalanx::train
