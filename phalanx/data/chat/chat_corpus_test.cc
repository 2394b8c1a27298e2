// Files of conversations as token files with a mask.
#include "phalanx/data/chat/chat_corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"

namespace phalanx::data::chat_corpus_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ChatCorpusTest : public FolderTest {
 protected:
  ChatCorpusTest() {
    BpeTrainer trainer({.vocab_size = 262, .special_tokens = {"<|im_start|>", "<|im_end|>"}});
    trainer.add("Hello there, assistant and user. Hello again.");
    tokenizer_ = trainer.train();
  }
  ConversationTokenizer tokenize() const {
    return {
        ChatTemplate("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif "
                     "%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{% if "
                     "add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
                     "test.jinja"),
        *tokenizer_};
  }
  static std::string line(const std::string& question, const std::string& answer) {
    return R"({"prompt": ")" + question + R"(", "completion": ")" + answer + "\"}\n";
  }
  ChatSummary encode(const ChatEncodingOptions& options = {}) {
    return encode_conversations({path("chats.jsonl")}, tokenize(), path("chats"), options);
  }
  std::string refusal(const ChatEncodingOptions& options = {}) {
    return error_text<DataError>([&] { encode(options); });
  }
  /// Of each document.
  std::vector<std::string> marked(const std::string& prefix = "chats") {
    const TokenFile file(path(prefix), {.vocab_size = tokenizer_->vocab_size()});
    std::vector<std::string> texts;
    for (std::int64_t i = 0; i < file.document_count(); ++i) {
      texts.push_back(marked_text(file, file.document(i), *tokenizer_, false));
    }
    return texts;
  }

  std::optional<BpeTokenizer> tokenizer_;
};

TEST_F(ChatCorpusTest, EachConversationIsADocumentWhoseAnswersAreTrained) {
  write("chats.jsonl", line("Hi", "Hello") + "\n" +
                           R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
)" + "");
  // A record is one line.
  EXPECT_THAT(refusal(), HasSubstr("chats.jsonl, line 3"));
  EXPECT_FALSE(std::filesystem::exists(path("chats.bin")));
  write(
      "chats.jsonl",
      line("Hi", "Hello") +
          R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})");
  const ChatSummary made = encode();
  EXPECT_THAT(marked(),
              ::testing::ElementsAre("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello<|im_end|>]]\n",
                                     "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>]]\n"
                                     "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[[d<|im_end|>]]\n"));
  const TokenFile file(path("chats"));
  EXPECT_EQ(made.conversations, 2);
  EXPECT_EQ(made.tokens, file.size());
  EXPECT_EQ(made.trained, file.trained_count({0, file.size()}));
  EXPECT_EQ(made.path, path("chats.bin"));
  EXPECT_THAT(made.text(), HasSubstr("2 conversations"));
  EXPECT_THAT(file.description(), HasSubstr("a mask says which are trained"));
  EXPECT_EQ(file.sidecar()->document_end, tokenizer_->id_of("<|im_end|>"));
}

TEST_F(ChatCorpusTest, LongConversationsAreCutOrLeftOutAndCounted) {
  write("chats.jsonl", line("a", "bcdefghijklm") + line("a", "b") + line("abcdefghijklmnopqrstuvw", "z"));
  encode();
  const std::int64_t longest = TokenFile(path("chats")).document(1).size();
  const ChatSummary cut = encode({.longest = longest + 2});
  EXPECT_THAT(marked(),
              ::testing::ElementsAre("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[bcdef]]",
                                     "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>]]\n"));
  EXPECT_THAT(cut.text(), AllOf(HasSubstr("2 conversations"), HasSubstr("; 1 that was too long is cut"),
                                HasSubstr("; 1 without a trained token is left out")));
  EXPECT_EQ(cut.answers_without_end, 0);
  const ChatSummary left = encode({.longest = longest + 2, .too_long = TooLong::leave_out});
  EXPECT_THAT(marked(),
              ::testing::ElementsAre("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>]]\n"));
  EXPECT_THAT(left.text(), AllOf(HasSubstr("1 conversation,"), HasSubstr("; 2 that were too long are left out")));
}

TEST_F(ChatCorpusTest, WhatCannotBeTrainedIsAnErrorOrSkippedAndSaid) {
  write("chats.jsonl", line("a", "b") + R"({"messages": [{"role": "user"}]})" + "\n" +
                           R"({"messages": [{"role": "tool", "content": "x"}]})" + "\n" +
                           R"({"messages": [{"role": "user", "content": "x"}]})" + "\n");
  EXPECT_THAT(refusal(), HasSubstr("chats.jsonl, line 2: message 1 has no \"content\""));
  const ChatSummary made = encode({.skips_malformed = true});
  EXPECT_EQ(made.conversations, 1);
  EXPECT_EQ(made.skipped, 2);
  EXPECT_EQ(made.untrained, 1);
  EXPECT_THAT(made.text(),
              AllOf(HasSubstr("2 skipped, the first because of"), HasSubstr("line 2: message 1 has no \"content\""),
                    HasSubstr("1 without a trained token is left out")));
  write("chats.jsonl", R"({"messages": [{"role": "tool", "content": "x"}]})");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("chats.jsonl, line 1"), HasSubstr("no tools here")));
}

TEST_F(ChatCorpusTest, NothingToTrainIsRefused) {
  write("chats.jsonl", R"({"messages": [{"role": "user", "content": "x"}]})");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("chats.jsonl: 0 % of the tokens are trained"),
                               HasSubstr("1 without a trained token, such as"), HasSubstr("chats.jsonl, line 1")));
  write("chats.jsonl", line("abc", "d"));
  EXPECT_THAT(refusal({.longest = 4}), HasSubstr("within its first 4 tokens"));
  EXPECT_THAT(refusal({.longest = 4, .too_long = TooLong::leave_out}), HasSubstr("1 longer than 4 tokens"));
  EXPECT_THAT(refusal({.held_out_fraction = 0.1, .is_held_out = true}),
              AllOf(HasSubstr("held out by the validation fraction of 0.1"), HasSubstr("more conversations")));
  write("chats.jsonl", "\n \n");
  EXPECT_THAT(refusal(), HasSubstr("chats.jsonl holds no conversations"));
  EXPECT_FALSE(std::filesystem::exists(path("chats.bin")));
  EXPECT_FALSE(std::filesystem::exists(path("chats.mask.tmp")));
}

TEST_F(ChatCorpusTest, HeldOutConversationsAreTheOthersAndThreadsChangeNothing) {
  std::string text;
  for (int i = 0; i < 1200; ++i) text += line("q" + std::to_string(i), "a" + std::to_string(i));
  write("chats.jsonl", text);
  encode({.threads = 1});
  const std::string ids = read_file(path("chats.bin")), mask = read_file(path("chats.mask"));
  const std::vector<std::string> all = marked();
  ASSERT_EQ(all.size(), 1200U);
  encode({.threads = 5});
  EXPECT_EQ(read_file(path("chats.bin")), ids);
  EXPECT_EQ(read_file(path("chats.mask")), mask);
  encode({.held_out_fraction = 0.1});
  std::vector<std::string> both = marked();
  encode({.held_out_fraction = 0.1, .is_held_out = true});
  const std::vector<std::string> held = marked();
  EXPECT_NEAR(static_cast<double>(held.size()), 120, 12);
  both.insert(both.end(), held.begin(), held.end());
  EXPECT_THAT(both, ::testing::UnorderedElementsAreArray(all));
}

TEST_F(ChatCorpusTest, AnswersThatShareATokenWithThePromptAreSaid) {
  write("chats.jsonl", line("Hi", "Hello"));
  EXPECT_EQ(encode().answers_inside_token, 0);
  BpeTrainer trainer({.vocab_size = 262, .special_tokens = {"<|im_end|>"}});
  trainer.add("a Hello a Hello a Hello");
  const BpeTokenizer tokenizer = trainer.train();
  ASSERT_TRUE(tokenizer.id_of(" Hello"));
  const ConversationTokenizer spaced{
      ChatTemplate("{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}{% if "
                   "add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
                   "test.jinja"),
      tokenizer};
  const ChatSummary made = encode_conversations({path("chats.jsonl")}, spaced, path("spaced"));
  EXPECT_EQ(made.answers_inside_token, 1);
  EXPECT_THAT(made.text(), HasSubstr("; 1 answer begins inside a token of the prompt"));
}

TEST_F(ChatCorpusTest, ASampleShowsNoControlCharacters) {
  write("chats.jsonl", line("\\u001b[2J", "é\\u0007"));
  encode();
  const TokenFile file(path("chats"));
  EXPECT_EQ(marked_text(file, file.document(0), *tokenizer_, true),
            "<|im_start|>user\n\\x1B[2J<|im_end|>\n<|im_start|>assistant\n\x1b[32m[[é\\x07<|im_end|>]]\x1b[0m\n");
}

TEST_F(ChatCorpusTest, APreferenceIsTwoDocuments) {
  const auto pair = [](const std::string& chosen, const std::string& rejected) {
    return R"({"prompt": "Hi", "chosen": ")" + chosen + R"(", "rejected": ")" + rejected + "\"}\n";
  };
  write("chats.jsonl", pair("Hello", "No") + pair("Hello again, user.", "Never") + pair("Yes", "x") + "{}\n");
  EXPECT_EQ(refusal({.pairs = true}), path("chats.jsonl") + ", line 4: it has no \"chosen\"");
  const ChatSummary made = encode({.longest = 50, .skips_malformed = true, .pairs = true});
  const std::string head = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
  EXPECT_THAT(marked(), ::testing::ElementsAre(head + "[[Hello<|im_end|>]]\n", head + "[[No<|im_end|>]]\n",
                                               head + "[[Yes<|im_end|>]]\n", head + "[[x<|im_end|>]]\n"));
  EXPECT_EQ(made.conversations, 2);
  EXPECT_EQ(made.too_long, 1);
  EXPECT_THAT(made.text(), AllOf(HasSubstr("2 pairs, "), HasSubstr("; 1 that was too long is left out"),
                                 HasSubstr("; 1 skipped, the first because of ")));
  write("chats.jsonl", pair("", "No"));
  EXPECT_EQ(encode({.pairs = true}).trained, 4);  // the ends of the turns, and two letters
  EXPECT_THAT(refusal({.longest = 5, .pairs = true}),
              AllOf(HasSubstr("1 longer than 5 tokens"), HasSubstr("expected preferences with answers to learn from")));
}

}  // namespace
}  // namespace phalanx::data::chat_corpus_test
