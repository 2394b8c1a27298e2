// Turns files of conversations into token files with a mask: one document a conversation, of which the assistant's
// tokens are trained (tokenized_conversation.h, token_file.h).
//
//   const ConversationTokenizer tokenize(ChatTemplate::load(folder), BpeTokenizer::load(folder));
//   const ChatSummary made = encode_conversations({"chats.jsonl"}, tokenize, "data/chats", {.longest = 4097});
//   log::info(made.text());
//
// Conversations without a trained token are left out and counted, and so are those that are too long, if asked for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/data/chat/tokenized_conversation.h"
#include "phalanx/data/corpus/documents.h"
#include "phalanx/data/token_file.h"

namespace phalanx::data {

/// What becomes of a conversation of more than `longest` tokens: its first `longest` are taken, or none.
enum class TooLong : std::uint8_t { cut, leave_out };

struct ChatEncodingOptions {
  std::int64_t longest = 0;  // tokens; 0: any number
  TooLong too_long = TooLong::cut;
  /// Whether a malformed record, or one that the template refuses, is left out and counted; else it is an error.
  bool skips_malformed = false;
  double held_out_fraction = 0;  // the share of the conversations, by their bytes, that is set aside
  bool is_held_out = false;      // true: takes those; false: the others
  std::string set_aside = {};    // TokenSidecar::set_aside
  /// Whether records are preferences (parse_preference()). Each becomes two documents, of the chosen and of the
  /// rejected answer. `longest` is that of both together, counted without their last tokens; longer pairs are left out.
  bool pairs = false;
  int threads = 0;          // 0: as many as this process may use
  Advance bytes_done = {};  // called by the caller's thread
};

struct ChatSummary {
  std::string path;  // of the ids
  bool of_pairs = false;
  std::int64_t conversations = 0, tokens = 0, trained = 0;         // conversations, or pairs
  std::int64_t cut = 0, too_long = 0;                              // of more than `longest` tokens: cut, left out
  std::int64_t untrained = 0;                                      // left out: without a trained token
  std::int64_t answers_without_end = 0, answers_inside_token = 0;  // tokenized_conversation.h
  std::int64_t skipped = 0;
  std::string first_skipped;    // "chats.jsonl, line 3: message 2 has no "content""
  std::string first_untrained;  // "chats.jsonl, line 7"

  /// "12 conversations, 3,456 tokens, of which 789 (22.8 %) are trained; 2 longer than 4097 tokens were cut; ..."
  std::string text() const;
};

/// Writes PREFIX.bin, .idx, .mask and .json. Throws DataError: a record is malformed (file, line, reason), a file holds
/// no conversation, or no token of any of them is trained (then nothing is written).
ChatSummary encode_conversations(const std::vector<std::string>& files, const ConversationTokenizer& tokenize,
                                 const std::string& prefix, const ChatEncodingOptions& options = {});

/// A tokenized text, of which trained tokens stand between [[ and ]], with `color` in green as well. Control characters
/// but line breaks are written as \x1B.
std::string marked_text(const TokenFile& tokens, TokenRange range, const BpeTokenizer& tokenizer, bool color);

}  // namespace phalanx::data
