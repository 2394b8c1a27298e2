#include "phalanx/data/added_tokens.h"

#include <algorithm>
#include <cstring>

namespace phalanx::data {

AddedTokenFinder::AddedTokenFinder(const std::vector<AddedToken>& tokens, bool normalized) {
  for (const AddedToken& token : tokens) {
    if (token.normalized != normalized || token.content.empty()) continue;
    if (nodes_.empty()) nodes_.emplace_back();
    std::uint32_t at = 0;
    for (const char byte : token.content) {
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
    nodes_[at].id = token.id;
    begins_[static_cast<unsigned char>(token.content[0])] = true;
  }
  if (!nodes_.empty() && nodes_[0].children.size() == 1) {
    only_first_byte_ = static_cast<unsigned char>(nodes_[0].children[0].first);
  }
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
      if (nodes_[at].id >= 0) longest = {begin, i + 1 - begin, nodes_[at].id};
    }
    if (longest.length > 0) return longest;
  }
  return {};
}

}  // namespace phalanx::data
