// One request under way: what it has brought so far, how its next token is chosen, and when it ends.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "phalanx/infer/jobs/sampling.h"
#include "phalanx/infer/request.h"
#include "phalanx/infer/stop_text.h"

namespace phalanx::infer {

class Sequence {
 public:
  /// `number`: among all requests. `tokenizer`, which must outlive it: null where nobody wants text.
  Sequence(Request request, std::size_t number, std::int64_t vocab, std::int64_t max_seq_len,
           const data::BpeTokenizer* tokenizer);

  const Request& request() const noexcept { return request_; }
  std::size_t number() const noexcept { return number_; }
  std::int64_t last_token() const { return completion_.tokens.back(); }
  std::int64_t prompt_length() const { return std::ssize(request_.prompt); }

  /// The next token, by the logits [vocab] behind the last one.
  /// Throws an Error that names the request where the logits are no numbers.
  std::int64_t choose(std::span<const float> logits);
  /// Takes it. True if it belongs to the result (a stop token does not).
  bool take(std::int64_t token);
  bool is_done() const noexcept { return done_; }
  Completion result() &&;

 private:
  void end(FinishReason reason);

  Request request_;
  std::size_t number_;
  std::int64_t max_seq_len_;
  const data::BpeTokenizer* tokenizer_;
  Sampler sampler_;
  std::optional<StopText> stop_text_;
  Completion completion_;
  bool done_ = false;
};

}  // namespace phalanx::infer
