// The command line of `phalanx eval`, parsed by the front program and by the worker. It uses no tensors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cli/command.h"
#include "cli/model_arguments.h"

namespace phalanx::cli {

extern const std::string_view kEvalHelp;

struct EvalArguments : ModelArguments {
  std::string text, tokens, choices;  // files; exactly one is given
  std::int64_t seq_len = 0;           // 0: the model's max_seq_len
  std::int64_t stride = 0;            // 0: seq_len
  std::int64_t max_tokens = 0;        // 0: all
  std::string json, output;
  bool strict = false;           // the first malformed question is an error
  bool allow_skipped = false;    // malformed questions are not a failure
  bool end_token_first = false;  // put the end token first, if the tokenizer puts no token there
};

/// Throws UsageError.
EvalArguments parse_eval_arguments(const Arguments& arguments);

}  // namespace phalanx::cli
