// BpeTrainer: learns a byte-level BPE vocabulary from text.
//
// It is deterministic: the same documents, in any order, give the same tokenizer. Of pairs with equal counts the one
// with the smallest ids is merged first. This is the rule of the `tokenizers` package's BpeTrainer, so both give the
// same merges. Ids are special tokens first, then the 256 bytes in the order of their printable characters, then the
// merges.
//
// Memory grows with the number of distinct pieces, not with the text.
//
//   BpeTrainer trainer({.vocab_size = 4096});
//   for (const auto& file : files) trainer.add(read(file));
//   BpeTokenizer tokenizer = trainer.train([](auto p) { bar.update(p.done, p.total); });
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::data {

struct BpeTrainerOptions {
  std::int64_t vocab_size = 0;     // all ids: special tokens, 256 bytes and merges
  std::int64_t min_frequency = 2;  // a pair seen less often is not merged
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
};

struct TrainingProgress {
  std::int64_t done = 0;   // ids so far
  std::int64_t total = 0;  // vocab_size
};

class BpeTrainer {
 public:
  /// Throws ConfigError if vocab_size is too small to hold the bytes and special tokens.
  explicit BpeTrainer(BpeTrainerOptions options);
  ~BpeTrainer();
  BpeTrainer(BpeTrainer&&) noexcept;
  BpeTrainer& operator=(BpeTrainer&&) noexcept;

  /// Counts the pieces of one document.
  void add(std::string_view text);
  /// May return fewer ids than asked for, if no pair is left that is seen min_frequency times.
  BpeTokenizer train(const std::function<void(TrainingProgress)>& progress = {}) const;

 private:
  struct Counts;
  BpeTrainerOptions options_;
  std::unique_ptr<Counts> counts_;
};

}  // namespace phalanx::data
