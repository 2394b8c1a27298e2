// Sequence: one request in flight. It holds the tokens so far, chooses the next token, and decides when the request
// ends.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "phalanx/base/error.h"
#include "phalanx/infer/jobs/sampling.h"
#include "phalanx/infer/request.h"
#include "phalanx/infer/stop_text.h"

namespace phalanx::infer {

class Sequence {
 public:
  /// `number`: among all requests. `tokenizer`: null if no text is needed.
  /// REQUIRES: `tokenizer` outlives this object.
  Sequence(Request request, std::size_t number, std::int64_t vocab, std::int64_t max_seq_len,
           const data::BpeTokenizer* tokenizer);

  const Request& request() const noexcept { return request_; }
  std::size_t number() const noexcept { return number_; }
  std::int64_t last_token() const { return completion_.tokens.back(); }
  const std::vector<std::int64_t>& generated() const noexcept { return completion_.tokens; }
  std::int64_t prompt_length() const { return std::ssize(request_.prompt); }

  /// Returns the next token, chosen from the logits [vocab] of the last position.
  /// Throws Error that names the request if the logits are not finite numbers.
  std::int64_t choose(std::span<const float> logits);
  /// Whether choose() takes the likeliest token whatever came before. Then take_likeliest() does for a device what
  /// choose() does: `logit` is the largest one, or NaN if any is.
  bool takes_likeliest() const noexcept;
  std::int64_t take_likeliest(std::int64_t token, double logit) const;
  /// Appends the token. Returns true if it belongs to the result (a stop token does not).
  bool take(std::int64_t token);
  bool is_done() const noexcept { return done_; }
  Completion result() &&;

 private:
  [[noreturn]] void fail(const Error& error) const;
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
