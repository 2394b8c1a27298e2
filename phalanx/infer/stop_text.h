// The text of an answer as its tokens come, up to the first stop string.
//
// A stop string may begin in one token and end in another: text that could be the beginning of one is held back until
// it is certain. Special tokens have no text.
//
//   StopText text(tokenizer, {"\n\n", "User:"});
//   for (...) { std::cout << text.add(token); if (text.stopped()) break; }
//   std::cout << text.finish();                       // what was held back, if nothing stopped it
#pragma once

#include <string>
#include <vector>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::infer {

class StopText {
 public:
  /// Empty stop strings are a ConfigError.
  StopText(const data::BpeTokenizer& tokenizer, std::vector<std::string> stops);

  /// The text that this token makes certain.
  std::string add(data::TokenId token);
  bool stopped() const noexcept { return stopped_; }
  std::string finish();

 private:
  std::string release(std::string text);

  data::StreamingDecoder decoder_;
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace phalanx::infer
