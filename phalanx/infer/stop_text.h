// StopText collects the text of an answer as its tokens arrive, up to the first stop string.
//
// A stop string may begin in one token and end in another. So text that could be the beginning of a stop string is held
// back until it is certain. Special tokens have no text.
//
//   StopText text(tokenizer, {"\n\n", "User:"});
//   for (data::TokenId token : tokens) {
//     std::cout << text.add(token);
//     if (text.stopped()) break;
//   }
//   std::cout << text.finish();                       // what was held back, if no stop string was found
#pragma once

#include <string>
#include <vector>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::infer {

class StopText {
 public:
  /// Throws ConfigError for an empty stop string.
  StopText(const data::BpeTokenizer& tokenizer, std::vector<std::string> stops);

  /// Returns the text that this token makes certain.
  std::string add(data::TokenId token);
  bool stopped() const noexcept { return stopped_; }
  std::string finish();

 private:
  std::string release(const std::string& text);

  data::StreamingDecoder decoder_;
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace phalanx::infer
