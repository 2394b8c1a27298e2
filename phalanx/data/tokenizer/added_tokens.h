// Finding added tokens, such as <|endoftext|>, in a text: at each place the longest that begins there, leftmost first.
// One may take the white space beside it along (lstrip, rstrip) or count only where no word goes on (single_word).
//
//   AddedTokenFinder finder;
//   finder.add("<|endoftext|>", token);
//   finder.split(text, [&](std::string_view between, std::size_t begin) { ... }, [&](TokenId id) { ... });
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
  /// `token` stands where `content`, its own as the normalizer leaves it, stands in a text. Of several tokens with the
  /// same content the first counts; one without content is never found.
  void add(std::string_view content, const AddedToken& token);

  struct Match {
    std::size_t begin = 0;
    std::size_t length = 0;  // 0: none from `from` on
    std::size_t token = 0;   // which one, in the order added
  };
  Match next(std::string_view text, std::size_t from) const;

  /// Calls `ordinary(text, begin)` for each stretch of text between tokens, none of them empty, and `found(id)` for
  /// each token, from left to right.
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
  static std::size_t spaces_before(std::string_view text, std::size_t at);  // where the white space before `at` begins
  static std::size_t spaces_behind(std::string_view text, std::size_t at);  // where that from `at` on ends

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  std::array<bool, 256> begins_{};
  int only_first_byte_ = -1;  // where all begin alike, memchr finds the candidates
};

}  // namespace phalanx::data
