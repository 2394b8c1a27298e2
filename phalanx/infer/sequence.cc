#include "phalanx/infer/sequence.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace phalanx::infer {

Sequence::Sequence(Request request, std::size_t number, std::int64_t vocab, std::int64_t max_seq_len,
                   const data::BpeTokenizer* tokenizer)
    : request_(std::move(request)),
      number_(number),
      max_seq_len_(max_seq_len),
      tokenizer_(tokenizer),
      sampler_(request_.sampling, vocab) {
  sampler_.note(request_.prompt);
  if (!request_.stop_strings.empty()) stop_text_.emplace(*tokenizer_, request_.stop_strings);
}

void Sequence::end(FinishReason reason) {
  completion_.reason = reason;
  done_ = true;
}

std::int64_t Sequence::choose(std::span<const float> logits) {
  try {
    return sampler_.sample(logits, completion_.tokens.size());
  } catch (const Error& error) {
    fail(error);
  }
}

bool Sequence::takes_likeliest() const noexcept {
  return request_.sampling.greedy() && request_.sampling.repetition_penalty == 1.0;
}

std::int64_t Sequence::take_likeliest(std::int64_t token, double logit) const {
  try {
    check_largest_logit(logit);
  } catch (const Error& error) {
    fail(error);
  }
  return token;
}

void Sequence::fail(const Error& error) const {
  throw Error(
      fmt::format("{}, token {}: {}", place_of(request_, number_), completion_.tokens.size() + 1, error.what()));
}

bool Sequence::take(std::int64_t token) {
  if (std::ranges::find(request_.stop_tokens, token) != request_.stop_tokens.end()) {
    end(FinishReason::stop_token);
    return false;
  }
  auto& tokens = completion_.tokens;
  tokens.push_back(token);
  sampler_.note({&token, 1});
  if (stop_text_) completion_.text += stop_text_->add(static_cast<data::TokenId>(token));
  if (stop_text_ && stop_text_->stopped()) {
    end(FinishReason::stop_string);
  } else if (std::ssize(tokens) == request_.max_new_tokens) {
    end(FinishReason::max_new_tokens);
  } else if (prompt_length() + std::ssize(tokens) == max_seq_len_) {
    end(FinishReason::max_seq_len);
  }
  return true;
}

Completion Sequence::result() && {
  if (stop_text_) {
    completion_.text += stop_text_->finish();
  } else if (tokenizer_ != nullptr) {
    completion_.text = tokenizer_->decode(completion_.tokens, {.skip_special_tokens = true});
  }
  return std::move(completion_);
}

}  // namespace phalanx::infer
