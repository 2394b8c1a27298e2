#include "cli/worker/chat_end.h"

#include <algorithm>

namespace phalanx::cli {

void add_end_of_turn(std::vector<std::int64_t>& end_tokens, const data::ConversationTokenizer& tokenize) {
  const auto own = tokenize.end_of_turn();
  if (own && std::ranges::find(end_tokens, std::int64_t{*own}) == end_tokens.end()) end_tokens.push_back(*own);
}

}  // namespace phalanx::cli
