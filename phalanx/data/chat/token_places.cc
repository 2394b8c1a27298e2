#include "phalanx/data/chat/token_places.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/data/tokenizer/bpe_model.h"

namespace phalanx::data {
namespace {

bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

std::string quoted(std::string_view text) {
  constexpr std::size_t kLongest = 40;
  return nlohmann::json(std::string(text.substr(0, kLongest)))
      .dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

/// An added token stands in a text as it is, also where the decoder would change it.
std::optional<std::string_view> added_content(const BpeTokenizer& tokenizer, TokenId id) {
  const auto& added = tokenizer.model().added_tokens;
  const auto found = std::ranges::find(added, id, &AddedToken::id);
  return found == added.end() ? std::nullopt : std::optional<std::string_view>(found->content);
}

}  // namespace

std::vector<jinja::TextSpan> token_places(const BpeTokenizer& tokenizer, std::string_view text,
                                          std::span<const TokenId> ids) {
  std::vector<jinja::TextSpan> places;
  std::size_t at = 0;
  const auto skip_blanks = [&] {
    while (at < text.size() && is_blank(text[at])) ++at;
  };
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const TokenId id = ids[i];
    std::string_view bytes = tokenizer.bytes_of(id);
    const std::size_t before = at;
    // Of more spaces in a row than the text has, the first is the one that the tokenizer puts there.
    const bool next_needs_space = bytes == " " && i + 1 < ids.size() &&
                                  tokenizer.bytes_of(ids[i + 1]).starts_with(' ') && !text.substr(at).starts_with("  ");
    if (next_needs_space || (!text.substr(at).starts_with(bytes) && bytes.starts_with(' '))) bytes.remove_prefix(1);
    if (!text.substr(at).starts_with(bytes)) bytes = added_content(tokenizer, id).value_or(bytes);
    if (!text.substr(at).starts_with(bytes)) skip_blanks();  // that an added token takes
    if (!text.substr(at).starts_with(bytes)) {
      throw DataError(
          fmt::format("the token {} ({}) does not stand in the text at byte {}, which goes on {}: a tokenizer that "
                      "changes texts, or has no token for a part of them, cannot say which tokens are an answer's",
                      id, quoted(tokenizer.bytes_of(id)), before, quoted(text.substr(before))));
    }
    places.push_back({at, at + bytes.size()});
    at += bytes.size();
  }
  skip_blanks();
  if (at != text.size()) throw DataError(fmt::format("the tokens end before {}", quoted(text.substr(at))));
  return places;
}

}  // namespace phalanx::data
