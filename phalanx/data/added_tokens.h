// Finding added tokens, such as <|endoftext|>, in a text: at each place the longest that begins there, leftmost first.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "phalanx/data/bpe_tokenizer.h"

namespace phalanx::data {

class AddedTokenFinder {
 public:
  AddedTokenFinder() = default;
  /// Only the tokens whose `normalized` is as given.
  AddedTokenFinder(const std::vector<AddedToken>& tokens, bool normalized);

  struct Match {
    std::size_t begin = 0;
    std::size_t length = 0;  // 0: none from `from` on
    TokenId id = 0;
  };
  Match next(std::string_view text, std::size_t from) const;

  bool empty() const { return nodes_.empty(); }

 private:
  struct Node {  // of a trie over bytes
    std::vector<std::pair<char, std::uint32_t>> children;
    TokenId id = -1;  // of the token that ends here
  };
  std::vector<Node> nodes_;
  std::array<bool, 256> begins_{};
  int only_first_byte_ = -1;  // where all begin alike, memchr finds the candidates
};

}  // namespace phalanx::data
