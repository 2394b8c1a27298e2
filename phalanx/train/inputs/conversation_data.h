// Makes the token files of a run's conversations ([sft]) or preferences ([dpo]): once, into a folder below the
// run's that is named by what they are made from. So a run that goes on, and another rank, read the same files;
// other data or settings make others.
//
//   DUMP_FOLDER/sft/HASH/train.bin, .idx, .mask, .json     and validation.*, with [validation] enable
//                       /made.txt                          what came of it, for the log
//
// Those of preferences are in DUMP_FOLDER/dpo. Pair i is documents 2 i, the chosen answer,
// and 2 i + 1, the rejected one.
//
//   const ConversationData made =
//       make_conversation_data(config, {.still_working = tell_the_other_ranks});   // one process
//   const config::TrainConfig reads = with_conversation_data(config, made.folder);
//   open_training_files(reads, plan);
//
// It does not use torch.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "phalanx/config/config.h"
#include "phalanx/data/chat/tokenized_conversation.h"
#include "phalanx/data/token_file.h"

namespace phalanx::train {

struct ConversationData {
  std::filesystem::path folder;
  std::vector<std::string> lines;  // for the log: how many conversations and tokens, what was left out
};

struct ConversationDataOptions {
  /// Called now and then while conversations are read. It may throw.
  std::function<void()> still_working = {};
  bool quiet = false;  // no progress
};

/// Throws DataError that names file, line and reason of a conversation that cannot be trained on, and where no token is
/// trained. Files that exist already are not made again.
/// Only one process makes files of a run at a time; another is refused.
/// REQUIRES: config::trains_on_chats(config).
ConversationData make_conversation_data(const config::TrainConfig& config, const ConversationDataOptions& options = {});

/// `config`, with the token files of this folder as its data.
config::TrainConfig with_conversation_data(config::TrainConfig config, const std::filesystem::path& folder);

/// Checks what needs no reading of conversations: that the files exist, and that tokenizer and template can be loaded.
void check_conversations(const config::TrainConfig& config);

/// The tokenizer and the chat template of a model's folder, or of the tokenizer.json in it. Answers end by the tokens
/// that its generation_config.json or config.json names, else by the tokenizer's. `named`: of several templates.
data::ConversationTokenizer load_conversation_tokenizer(const std::filesystem::path& model,
                                                        const std::string& named = "");

/// The first conversation that is not long, as text in which trained tokens are marked.
std::string sample_conversation(const data::TokenFile& tokens, const data::BpeTokenizer& tokenizer, bool color);
/// The first pair likewise.
std::string sample_preference(const data::TokenFile& tokens, const data::BpeTokenizer& tokenizer, bool color);

}  // namespace phalanx::train
