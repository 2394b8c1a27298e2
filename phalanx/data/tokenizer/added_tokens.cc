#include "phalanx/data/tokenizer/added_tokens.h"

#include <algorithm>
#include <cstring>

#include "phalanx/base/utf8.h"
#include "phalanx/data/tokenizer/unicode.h"

namespace phalanx::data {

void AddedTokenFinder::add(std::string_view content, const AddedToken& token) {
  if (content.empty()) return;
  if (nodes_.empty()) nodes_.emplace_back();
  std::uint32_t at = 0;
  for (const char byte : content) {
    auto& children = nodes_[at].children;
    const auto found = std::find_if(children.begin(), children.end(), [&](const auto& c) { return c.first == byte; });
    if (found != children.end()) {
      at = found->second;
      continue;
    }
    const auto made = static_cast<std::uint32_t>(nodes_.size());
    children.emplace_back(byte, made);
    nodes_.emplace_back();
    at = made;
  }
  if (nodes_[at].token == kNone) nodes_[at].token = tokens_.size();
  tokens_.push_back(token);
  begins_[static_cast<unsigned char>(content[0])] = true;
  only_first_byte_ = nodes_[0].children.size() == 1 ? static_cast<unsigned char>(content[0]) : -1;
}

bool AddedTokenFinder::stands_alone(std::string_view text, const Match& match) {
  const std::string_view before = text.substr(0, match.begin), behind = text.substr(match.begin + match.length);
  return (before.empty() || !is_word(last_char(before).code_point)) &&
         (behind.empty() || !is_word(first_char(behind).code_point));
}

std::size_t AddedTokenFinder::spaces_before(std::string_view text, std::size_t at) {
  while (at > 0) {
    const Utf8Char c = last_char(text.substr(0, at));
    if (c.length == 0 || class_of(c.code_point) != CharClass::space) break;
    at -= static_cast<std::size_t>(c.length);
  }
  return at;
}

std::size_t AddedTokenFinder::spaces_behind(std::string_view text, std::size_t at) {
  while (at < text.size()) {
    const Utf8Char c = first_char(text.substr(at));
    if (c.length == 0 || class_of(c.code_point) != CharClass::space) break;
    at += static_cast<std::size_t>(c.length);
  }
  return at;
}

AddedTokenFinder::Match AddedTokenFinder::next(std::string_view text, std::size_t from) const {
  if (nodes_.empty()) return {};
  for (std::size_t begin = from; begin < text.size(); ++begin) {
    if (only_first_byte_ >= 0) {
      const void* found = std::memchr(text.data() + begin, only_first_byte_, text.size() - begin);
      if (!found) return {};
      begin = static_cast<std::size_t>(static_cast<const char*>(found) - text.data());
    } else if (!begins_[static_cast<unsigned char>(text[begin])]) {
      continue;
    }
    Match longest;
    std::uint32_t at = 0;
    for (std::size_t i = begin; i < text.size(); ++i) {
      const auto& children = nodes_[at].children;
      const auto found =
          std::find_if(children.begin(), children.end(), [&](const auto& c) { return c.first == text[i]; });
      if (found == children.end()) break;
      at = found->second;
      if (nodes_[at].token != kNone) longest = {begin, i + 1 - begin, nodes_[at].token};
    }
    if (longest.length > 0) return longest;
  }
  return {};
}

}  // namespace phalanx::data
