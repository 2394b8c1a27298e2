// Encodes many texts with several threads. What comes out does not depend on their number.
//
//   const auto ids =
//       encode_all(tokenizer, texts, {.threads = usable_cores()});   // of each text, in the order of the texts
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::data {

struct EncodeAllOptions {
  std::int64_t threads = 1;                 // the caller's is one of them
  const std::atomic<bool>* stop = nullptr;  // once set, the rest of the ids stays empty
};

/// Added tokens in the texts are ordinary text. Throws what a thread has thrown.
std::vector<std::vector<TokenId>> encode_all(const BpeTokenizer& tokenizer, std::span<const std::string> texts,
                                             const EncodeAllOptions& options);

}  // namespace phalanx::data
