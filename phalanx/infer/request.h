// Request and Completion: what a model is asked, and its answer. This header does not use torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/infer/jobs/sampling.h"

namespace phalanx::infer {

struct Request {
  std::vector<std::int64_t> prompt;  // at least one token, fewer than the model's max_seq_len
  std::int64_t max_new_tokens = 128;
  SamplingOptions sampling;
  std::vector<std::int64_t> stop_tokens;
  std::vector<std::string> stop_strings;  // the text ends before the first of them; they need a tokenizer
  std::string where = {};                 // begins messages about the request ("p.jsonl, line 3"); empty: "prompt 3"
};

/// The name of a request in messages; `number` counts from 0.
inline std::string place_of(const Request& request, std::size_t number) {
  return request.where.empty() ? "prompt " + std::to_string(number + 1) : request.where;
}

enum class FinishReason { stop_token, stop_string, max_new_tokens, max_seq_len };
std::string_view name_of(FinishReason reason);

struct Completion {
  std::vector<std::int64_t> tokens;  // without the prompt and the stop token; includes those of a stop string
  std::string text;                  // if there is a tokenizer; ends before a stop string
  FinishReason reason = FinishReason::max_new_tokens;
};

struct GenerationStats {
  std::int64_t prompt_tokens = 0;
  double prefill_seconds = 0;
  std::int64_t decoded_tokens = 0;  // all except the first of each request, which comes from the prefill
  double decode_seconds = 0;
};

}  // namespace phalanx::infer
