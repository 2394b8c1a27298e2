// `phalanx tokenize --chat`: conversations in, token files with a mask out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phalanx::cli {

struct TokenizeChatsArguments {
  std::vector<std::string> inputs;
  std::string model;  // the folder of the tokenizer and the chat template, or the tokenizer.json in it
  std::string chat_template;
  std::string output;
  double validation_fraction = 0;
  std::int64_t max_tokens = 0;  // 0: any number
  bool leave_out_longer = false;
  bool skip_malformed = false;
  bool quiet = false;
};

int tokenize_chats(const TokenizeChatsArguments& arguments);

}  // namespace phalanx::cli
