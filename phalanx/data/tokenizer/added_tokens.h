// Finds added tokens, such as <|endoftext|>, in a text: leftmost first, and at each position the longest. A token may
// also take the white space beside it (lstrip, rstrip), or match only whole words (single_word).
//
//   AddedTokenFinder finder;
//   finder.add("<|endoftext|>", token);
//   finder.split(text, [&](std::string_view between, std::size_t begin) { encode(between); },
//                [&](TokenId id) { ids.push_back(id); });
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"

namespace phalanx::data {

class AddedTokenFinder {
 public:
  /// `content` is the token's own content after the normalizer; it is what is searched in a text. Of several tokens
  /// with the same content the first counts. A token without content is never found.
  void add(std::string_view content, const AddedToken& token);

  struct Match {
    std::size_t begin = 0;
    std::size_t length = 0;  // 0: no match from `from` on
    std::size_t token = 0;   // which token, in the order added
  };
  Match next(std::string_view text, std::size_t from) const;

  /// Calls `ordinary(text, begin)` for each non-empty stretch of text between tokens, and `found(id)` for each token,
  /// from left to right.
  template <typename Ordinary, typename Found>
  void split(std::string_view text, Ordinary&& ordinary, Found&& found) const {
    std::size_t done = 0;
    for (Match match = next(text, 0); match.length > 0;) {
      const std::size_t behind = match.begin + match.length;
      const AddedToken& token = tokens_[match.token];
      if (!token.single_word || stands_alone(text, match)) {
        const std::size_t begin = token.lstrip ? std::max(done, spaces_before(text, match.begin)) : match.begin;
        if (begin > done) ordinary(text.substr(done, begin - done), done);
        found(token.id);
        done = token.rstrip ? spaces_behind(text, behind) : behind;
      }
      match = next(text, behind);
    }
    if (done < text.size()) ordinary(text.substr(done), done);
  }

  bool empty() const { return nodes_.empty(); }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};
  struct Node {  // of a trie over bytes
    std::vector<std::pair<char, std::uint32_t>> children;
    std::size_t token = kNone;  // that ends here
  };

  static bool stands_alone(std::string_view text, const Match& match);
  static std::size_t spaces_before(std::string_view text, std::size_t at);  // start of the white space before `at`
  static std::size_t spaces_behind(std::string_view text, std::size_t at);  // end of the white space from `at` on

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  std::array<bool, 256> begins_{};
  int only_first_byte_ = -1;  // if all tokens begin with one byte, memchr finds the candidates
};

}  // namespace phalanx::data
