#include "phalanx/data/chat/token_places.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

#include "phalanx/base/error.h"

namespace phalanx::data {
namespace {

bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

std::string quoted(std::string_view text) {
  constexpr std::size_t kLongest = 40;
  return nlohmann::json(std::string(text.substr(0, kLongest)))
      .dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

}  // namespace

std::vector<jinja::TextSpan> token_places(const BpeTokenizer& tokenizer, std::string_view text,
                                          std::span<const TokenId> ids) {
  std::vector<jinja::TextSpan> places;
  std::size_t at = 0;
  const auto skip_blanks = [&] {
    while (at < text.size() && is_blank(text[at])) ++at;
  };
  for (const TokenId id : ids) {
    std::string_view bytes = tokenizer.bytes_of(id);
    const std::size_t before = at;
    if (!text.substr(at).starts_with(bytes) && bytes.starts_with(' ')) bytes.remove_prefix(1);
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
