// Which tokens end an answer of a chat.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/data/chat/tokenized_conversation.h"

namespace phalanx::cli {

/// Adds the token by which the chat template ends an answer. A model's files name it as a rule, but not always.
void add_end_of_turn(std::vector<std::int64_t>& end_tokens, const data::ConversationTokenizer& tokenize);

}  // namespace phalanx::cli
