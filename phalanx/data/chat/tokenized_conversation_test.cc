#include "phalanx/data/chat/tokenized_conversation.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/chat/token_places.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"

namespace phalanx::data {
namespace {

// Templates of the kinds that there are, in few lines.
constexpr const char* kChatMl =
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor "
    "%}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
constexpr const char* kMarked =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ "
    "m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
// Shows the reasoning of the last answer alone, as Qwen3 does.
constexpr const char* kLastReasoning =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}{{ "
    "'<think>\n' + (m.reasoning_content "
    "or '') + '\n</think>\n\n' }}{% endif %}{{ m.content.split('</think>')[-1].strip() + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{ "
    "'<think>\n\n</think>\n\n' }}{% endif %}{% endif %}";
// Its prompt opens a block that answers do not have.
constexpr const char* kOpensThinking =
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt "
    "%}[assistant]<think>\n{% endif %}";
// Nothing ends its answers but the next message.
constexpr const char* kEndless =
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '[answer]' }}{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}[answer]{% endif %}";
// Nothing says where its answers are.
constexpr const char* kShuffled =
    "{% for m in messages %}{{ m.content | reverse }}{% endfor %}{{ messages | length }}{% if add_generation_prompt "
    "%}>{% endif %}";

BpeTokenizer make_tokenizer() {
  BpeTrainer trainer({.vocab_size = 270, .special_tokens = {"<s>", "<|im_start|>", "<|im_end|>", "</s>"}});
  trainer.add("Hello there, assistant and user. Hello again.");
  return trainer.train();
}

ChatTemplate chat_of(const char* source) { return {source, "test.jinja", {{"bos_token", "<s>"}}}; }

Conversation conversation(const std::string& json) { return parse_conversation(json, "chat.jsonl, line 1"); }

const char* const kTwoTurns =
    R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello  there", "reasoning_content": "R1"},
        {"role": "user", "content": "é?"}, {"role": "assistant", "content": "Ü!", "reasoning_content": "R2"}]})";

/// The text with what is trained in brackets.
std::string trained_text(const char* source, const std::string& json) {
  const BpeTokenizer tokenizer = make_tokenizer();
  const auto made = ConversationTokenizer(chat_of(source), tokenizer)(conversation(json));
  std::string text;
  for (std::size_t i = 0; i < made.tokens.size(); ++i) {
    const bool is = made.is_trained[i] != 0, was = i > 0 && made.is_trained[i - 1] != 0;
    if (is != was) text += is ? "⟦" : "⟧";
    text += tokenizer.bytes_of(made.tokens[i]);
  }
  return made.is_trained.back() != 0 ? text + "⟧" : text;
}

std::string refusal(const char* source, const std::string& json) {
  return error_text<DataError>([&] { trained_text(source, json); });
}

TEST(ConversationTokenizer, TrainsAnswersWithTheTokenThatEndsTheirTurn) {
  EXPECT_EQ(trained_text(kChatMl, kTwoTurns),
            "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello  there<|im_end|>⟧\n"
            "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n⟦Ü!<|im_end|>⟧\n");
}

TEST(ConversationTokenizer, MarksComeFirst) {
  EXPECT_EQ(trained_text(kMarked, kTwoTurns),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello  there<|im_end|>⟧\n"
            "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n⟦Ü!<|im_end|>⟧\n");
  EXPECT_THAT(refusal("{% macro f() %}{% generation %}x{% endgeneration %}{% endmacro %}{{ f() }}", kTwoTurns),
              HasSubstr("chat.jsonl, line 1: its chat template has {% generation %} marks in a macro"));
}

TEST(ConversationTokenizer, FindsAnswersWhoseReasoningIsLeftOutLater) {
  EXPECT_EQ(trained_text(kLastReasoning, kTwoTurns),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello  there<|im_end|>⟧\n"
            "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nR2\n</think>\n\nÜ!<|im_end|>⟧\n");
}

TEST(ConversationTokenizer, FindsAnswersWhoseEndDependsOnWhatFollows) {
  // The last answer ends by another token, or the whole conversation does.
  constexpr const char* kReturn =
      "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{{ '</s>' if loop.last and m.role == "
      "'assistant' else '<|im_end|>' }}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
  EXPECT_EQ(trained_text(kReturn, kTwoTurns),
            "<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n⟦Hello  "
            "there<|im_end|>⟧<|im_start|>user\né?<|im_end|><|im_start|>assistant\n⟦Ü!</s>⟧");
  constexpr const char* kLastEos =
      "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
      "{{ '<|im_start|>assistant\n' if add_generation_prompt else '</s>' }}";
  EXPECT_EQ(trained_text(kLastEos, kTwoTurns),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello  there<|im_end|>⟧\n"
            "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n⟦Ü!<|im_end|>\n</s>⟧");
}

TEST(ConversationTokenizer, FindsCallsOfTools) {
  constexpr const char* kCalls =
      "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}{{ "
      "'<think>\n</think>\n' }}{% endif %}"
      "{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}{{ 'CALL ' + c.function.name + "
      "c.function.arguments | tojson }}{% endfor %}"
      "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
  EXPECT_EQ(
      trained_text(
          kCalls,
          R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
                {"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"}]})"),
      "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦CALL f{\"x\": "
      "1}<|im_end|>⟧\n<|im_start|>tool\nb<|im_end|>\n"
      "<|im_start|>assistant\n⟦<think>\n</think>\nc<|im_end|>⟧\n");
}

TEST(ConversationTokenizer, WhatTheGenerationPromptSuppliesIsNotTrained) {
  const std::string one =
      R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], "chat_template_kwargs": {"enable_thinking": false}})";
  EXPECT_EQ(trained_text(kLastReasoning, one),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Ho<|im_end|>⟧\n");
  EXPECT_EQ(trained_text(kOpensThinking, one), "[user]Hi<|im_end|>[assistant]⟦Ho<|im_end|>⟧");
  EXPECT_EQ(trained_text(kOpensThinking, R"({"prompt": "Hi", "completion": "<think>\nHm</think>Ho"})"),
            "[user]Hi<|im_end|>[assistant]<think>\n⟦Hm</think>Ho<|im_end|>⟧");
}

TEST(ConversationTokenizer, OfPromptAndCompletionOnlyTheCompletionIsTrained) {
  const std::string json =
      R"({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]})";
  const std::string expected =
      "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>"
      "assistant\n⟦d<|im_end|>⟧\n";
  EXPECT_EQ(trained_text(kChatMl, json), "<s>" + expected);
  EXPECT_EQ(trained_text(kMarked, json), expected);
}

// The generation prompt opens a thinking block, which the mark holds, too.
TEST(ConversationTokenizer, WhatTheGenerationPromptSuppliesIsNotTrainedWhereAMarkHoldsIt) {
  constexpr const char* kMarksThinking =
      "{% for m in messages %}{% if m.role == 'assistant' %}[assistant]{% generation %}<think>\n{{ m.content }}"
      "<|im_end|>{% endgeneration %}{% else %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
      "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}";
  EXPECT_EQ(
      trained_text(
          kMarksThinking,
          R"({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]})"),
      "[user]a<|im_end|>[assistant]<think>\nb<|im_end|>[user]c<|im_end|>[assistant]<think>\n⟦d<|im_end|>⟧"
      "[user]e<|im_end|>[assistant]⟦<think>\nf<|im_end|>⟧");
}

TEST(ConversationTokenizer, SaysWhereNothingEndsAnAnswer) {
  const BpeTokenizer tokenizer = make_tokenizer();
  const auto counts = [&](std::vector<std::int64_t> ends) {
    const auto made =
        ConversationTokenizer(chat_of(kEndless), tokenizer, {.end_tokens = std::move(ends)})(conversation(kTwoTurns));
    return std::pair(made.trained_count(), made.answers_without_end);
  };
  const auto [without, unended] = counts({});
  EXPECT_EQ(unended, 2);
  EXPECT_EQ(counts({*tokenizer.id_of("<|im_start|>")}), std::pair(without + 1, std::int64_t{1}));
  EXPECT_EQ(ConversationTokenizer(chat_of(kChatMl), tokenizer)(conversation(kTwoTurns)).answers_without_end, 0);
}

TEST(ConversationTokenizer, PromptsThatBeginAsAnAnswerByChanceCutNoTag) {
  EXPECT_EQ(trained_text(kOpensThinking, R"({"prompt": "Hi", "completion": "<thinkers>"})"),
            "[user]Hi<|im_end|>[assistant]⟦<thinkers><|im_end|>⟧");
}

TEST(ConversationTokenizer, RefusesWhatItCannotFind) {
  EXPECT_THAT(refusal(kShuffled, kTwoTurns),
              HasSubstr("chat.jsonl, line 1: where message 2 stands in the rendered text is not known"));
  EXPECT_THAT(refusal("{{ raise_exception('no') }}", kTwoTurns),
              HasSubstr("chat.jsonl, line 1: test.jinja, line 1: the template refuses this: no"));
}

TEST(ConversationTokenizer, AddsNoSecondBosAndGivesLabels) {
  BpeModel model = make_tokenizer().model();
  model.prefix = {*make_tokenizer().id_of("<s>")};
  const BpeTokenizer tokenizer(model);
  const auto made =
      ConversationTokenizer(chat_of(kChatMl), tokenizer)(conversation(R"({"prompt": "a", "completion": "b"})"));
  EXPECT_EQ(std::ranges::count(made.tokens, *tokenizer.id_of("<s>")), 1);
  EXPECT_EQ(made.trained_count(), 2);
  const auto labels = made.labels();
  for (std::size_t i = 0; i < labels.size(); ++i) EXPECT_EQ(labels[i], made.is_trained[i] != 0 ? made.tokens[i] : -100);
}

TEST(ConversationTokenizer, PromptsEndWithWhatBeginsAnAnswer) {
  const BpeTokenizer tokenizer = make_tokenizer();
  const ConversationTokenizer tokenize(chat_of(kChatMl), tokenizer);
  const auto ask = conversation(R"({"messages": [{"role": "user", "content": "a"}]})");
  EXPECT_EQ(tokenizer.decode(tokenize.prompt(ask)), "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(tokenize.end_of_turn(), tokenizer.id_of("<|im_end|>"));
  EXPECT_EQ(
      ConversationTokenizer(chat_of("{% for m in messages %}{{ m.content }}{% endfor %}"), tokenizer).end_of_turn(),
      std::nullopt);
  EXPECT_EQ(ConversationTokenizer(chat_of("{{ raise_exception('x') }}"), tokenizer).end_of_turn(), std::nullopt);
  EXPECT_THAT(error_text<DataError>([&] { tokenize.prompt(conversation(kTwoTurns)); }),
              HasSubstr("chat.jsonl, line 1: its last message is the assistant's"));
}

TEST(ConversationTokenizer, TakesItsClock) {
  const auto clock = [] {
    std::tm time{};
    time.tm_year = 126;
    return time;
  };
  const ConversationTokenizer tokenize(
      chat_of("{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"), make_tokenizer(),
      {.render = {.clock = clock}});
  const auto chat = conversation(R"({"messages": [{"role": "user", "content": "a"}]})");
  EXPECT_EQ(tokenize.tokenizer().decode(tokenize.prompt(chat)), "2026a");
  EXPECT_EQ(tokenize.tokenizer().decode(tokenize(chat).tokens), "2026a");
}

TEST(TokenPlaces, CoverTheText) {
  const BpeTokenizer tokenizer = make_tokenizer();
  const std::string text = "<s>Hello there é";
  const auto ids = tokenizer.encode(text);
  const auto places = token_places(tokenizer, text, ids);
  ASSERT_EQ(places.size(), ids.size());
  EXPECT_EQ(places.front(), (jinja::TextSpan{0, 3}));
  EXPECT_EQ(places.back().end, text.size());
  for (std::size_t i = 1; i < places.size(); ++i) EXPECT_EQ(places[i].begin, places[i - 1].end);
  EXPECT_THAT(error_text<DataError>([&] { token_places(tokenizer, "<s>Bye", ids); }),
              HasSubstr("does not stand in the text at byte 3, which goes on \"Bye\""));
  EXPECT_THAT(error_text<DataError>([&] { token_places(tokenizer, text + "x", ids); }),
              HasSubstr("the tokens end before \"x\""));
}

TEST(TokenPlaces, OfTokenizersThatChangeSpaces) {
  // Characters with ▁ for a space and one before a text, as Llama 2 and Gemma have them.
  const BpeTokenizer tokenizer =
      BpeTokenizer::from_json(R"({"added_tokens": [{"id": 7, "content": "<end▁of>", "special": true}],
      "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
      "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Fuse"},
                                                   {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
      "model": {"type": "BPE", "vocab": {"▁": 0, "a": 1, "b": 2, "▁a": 3, "<unk>": 4, "ab": 5, "é": 6}, "merges": [["▁", "a"]], "unk_token": "<unk>"}})");
  const std::string text = "a b<end▁of> é";
  const auto places = token_places(tokenizer, text, tokenizer.encode(text));
  const std::vector<jinja::TextSpan> expected = {{0, 1}, {1, 2}, {2, 3}, {3, 13}, {13, 13}, {13, 14}, {14, 16}};
  EXPECT_EQ(places, expected);
  EXPECT_THAT(error_text<DataError>([&] { token_places(tokenizer, "aXb", tokenizer.encode("aXb")); }),
              HasSubstr("the token 4 (\"<unk>\") does not stand in the text at byte 1"));
}

class ChatTemplateTest : public ::testing::Test {
 protected:
  std::string file(const std::string& name) const { return (folder_.path() / name).string(); }
  std::string rendered(const std::string& named = "", const std::string& tools = "") const {
    const std::string json = R"({"messages": [{"role": "user", "content": "x"}])" + tools + "}";
    return ChatTemplate::load(folder_.path(), named).render(conversation(json)).text;
  }
  std::string fault() const {
    return error_text<DataError>([&] { rendered(); });
  }
  TempDirectory folder_{"chat-template"};
};

TEST_F(ChatTemplateTest, IsReadFromTheFileThatComesFirst) {
  EXPECT_FALSE(ChatTemplate::exists(folder_.path()));
  EXPECT_THAT(
      fault(),
      HasSubstr(
          "has no chat template: expected one of chat_template.jinja, tokenizer_config.json, chat_template.json"));
  write_file(file("chat_template.json"), R"({"chat_template": "third"})");
  EXPECT_EQ(rendered(), "third");
  write_file(
      file("tokenizer_config.json"),
      R"({"chat_template": "second {{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": "</s>"})");
  EXPECT_EQ(rendered(), "second <s></s>");
  write_file(file("chat_template.jinja"), "first {{ bos_token }}\n");
  EXPECT_EQ(rendered(), "first <s>");
  EXPECT_TRUE(ChatTemplate::exists(file("tokenizer.json")));
}

TEST_F(ChatTemplateTest, ChoosesAmongNamedOnes) {
  write_file(
      file("tokenizer_config.json"),
      R"({"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, {"name": "rag", "template": "{{ x.y }}"}]})");
  EXPECT_EQ(rendered(), "d");
  EXPECT_EQ(rendered("", R"(, "tools": [{"name": "f"}])"), "t");
  EXPECT_EQ(rendered("default", R"(, "tools": [{"name": "f"}])"), "d");
  EXPECT_THAT(error_text<DataError>([&] { rendered("rag"); }),
              HasSubstr("tokenizer_config.json: the chat template 'rag', line 1: 'x' is undefined"));
  EXPECT_THAT(error_text<DataError>([&] { rendered("rags"); }),
              HasSubstr("has no chat template named 'rags': expected one of default, rag, tool_use"));
}

TEST_F(ChatTemplateTest, MalformedFilesAreNamed) {
  write_file(file("tokenizer_config.json"), R"({"chat_template": 3})");
  EXPECT_THAT(
      fault(),
      HasSubstr(
          "tokenizer_config.json: \"chat_template\" is of type number: expected text, or a list of named templates"));
  replace_file(file("tokenizer_config.json"), R"({"chat_template": [{"name": "default"}]})");
  EXPECT_THAT(fault(), HasSubstr("has an entry without \"name\" and \"template\""));
  replace_file(file("tokenizer_config.json"),
               R"({"chat_template": [{"name": "a", "template": ""}, {"name": "a", "template": ""}]})");
  EXPECT_THAT(fault(), HasSubstr("two of its chat templates are named 'a'"));
}

TEST_F(ChatTemplateTest, MessagesComeAsTransformersGivesThem) {
  const ChatTemplate chat = chat_of(
      "{% for m in messages %}{{ m.keys() | join(',') }};{% endfor %}{{ tools is none }}{{ documents is none }}{{ x "
      "}}");
  EXPECT_EQ(
      chat
          .render(conversation(
              R"({"messages": [{"role": "user", "content": null, "tool_calls": [], "thinking": "T"}, {"role": "user", "content": "", "name": null}], "chat_template_kwargs": {"x": 5}})"))
          .text,
      "thinking,role,tool_calls,reasoning_content;role,content;TrueTrue5");
}

}  // namespace
}  // namespace phalanx::data
