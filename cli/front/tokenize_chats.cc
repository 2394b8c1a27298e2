#include "cli/front/tokenize_chats.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/progress.h"
#include "phalanx/data/chat/chat_corpus.h"
#include "phalanx/data/token_sidecar.h"
#include "phalanx/train/inputs/conversation_data.h"

namespace phalanx::cli {

int tokenize_chats(const TokenizeChatsArguments& arguments) {
  std::uint64_t bytes = 0;
  for (const std::string& input : arguments.inputs) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(input, error)) {
      throw DataError(
          fmt::format("{} is no file that is there: --chat takes files of conversations, as JSON lines", input));
    }
    bytes += std::filesystem::file_size(input);
  }
  const data::ConversationTokenizer tokenize =
      train::load_conversation_tokenizer(arguments.model, arguments.chat_template);
  const auto encode = [&](const std::string& prefix, bool is_held_out, const std::string& set_aside) {
    ProgressBar bar(
        "tokenizing conversations", bytes,
        {.unit = ProgressUnit::bytes, .style = arguments.quiet ? ProgressStyle::silent : ProgressStyle::automatic});
    const data::ChatSummary made = data::encode_conversations(
        arguments.inputs, tokenize, prefix,
        {.longest = arguments.max_tokens,
         .too_long = arguments.leave_out_longer ? data::TooLong::leave_out : data::TooLong::cut,
         .skips_malformed = arguments.skip_malformed,
         .held_out_fraction = arguments.validation_fraction,
         .is_held_out = is_held_out,
         .set_aside = set_aside,
         .bytes_done = [&](std::uint64_t amount) { bar.advance(amount); }});
    bar.finish();
    fmt::print("{}: {}\n", made.path, made.text());
  };
  std::string set_aside;
  if (arguments.validation_fraction > 0) {
    const std::string prefix = arguments.output + "-validation";
    encode(prefix, true, "");
    set_aside = data::read_sidecar(prefix + ".bin").value().content;
  }
  encode(arguments.output, false, set_aside);
  const data::TokenFile tokens(arguments.output);
  fmt::print("{}\n", train::sample_conversation(tokens, tokenize.tokenizer(),
                                                isatty(STDOUT_FILENO) != 0 && !env_string("NO_COLOR")));
  return 0;
}

}  // namespace phalanx::cli
