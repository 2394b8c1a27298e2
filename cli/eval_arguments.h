// The command line of `phalanx eval`, read by the front and by the worker alike. Knows no tensor.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cli/command.h"

namespace phalanx::cli {

extern const std::string_view kEvalHelp;

struct EvalArguments {
  std::string checkpoint, tokenizer;
  bool allow_tokenizer_mismatch = false;
  std::string text, tokens, choices;  // one of them: a file
  std::int64_t seq_len = 0;           // 0: the model's max_seq_len
  std::int64_t stride = 0;            // 0: seq_len
  std::int64_t max_tokens = 0;        // 0: all
  std::int64_t batch_size = 8;
  std::int64_t tp = 1, pp = 1;
  std::string device, dtype = "float32", backend = "auto";
  std::string json, output;
  bool strict = false;           // the first malformed question is an error
  bool allow_skipped = false;    // malformed questions are no failure
  bool end_token_first = false;  // of a text whose tokenizer puts nothing there
  bool quiet = false;
  bool allow_model_mismatch = false;
};

/// Without -n, which is the launcher's. Throws UsageError.
EvalArguments parse_eval_arguments(const Arguments& arguments);

}  // namespace phalanx::cli
