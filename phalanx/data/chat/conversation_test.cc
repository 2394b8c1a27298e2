#include "phalanx/data/chat/conversation.h"

#include <gtest/gtest.h>

#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/jinja/python_text.h"

namespace phalanx::data {
namespace {

std::string as_json(const Conversation& chat) { return jinja::to_json(jinja::Value::list(chat.messages), {}); }

std::string fault(const std::string& record) {
  return error_text<DataError>([&] { parse_conversation(record, "chat.jsonl, line 3"); });
}

TEST(Conversation, ReadsMessagesWithAllTheirKeys) {
  const auto chat = parse_conversation(
      R"({"id": 7, "messages": [{"role": "system", "content": null}, {"content": [{"type": "text", "text": "a"}, {"type": "image"}], "role": "user"},
          {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"z": 1, "a": 2.0}}}], "reasoning_content": "Hm"}],
          "tools": [{"function": {"name": "f"}}], "chat_template_kwargs": {"enable_thinking": false}})",
      "here");
  EXPECT_EQ(
      as_json(chat),
      R"([{"role": "system", "content": null}, {"content": [{"type": "text", "text": "a"}, {"type": "image"}], "role": "user"}, )"
      R"({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"z": 1, "a": 2.0}}}], "reasoning_content": "Hm"}])");
  EXPECT_EQ(jinja::to_json(chat.tools, {}), R"([{"function": {"name": "f"}}])");
  ASSERT_EQ(chat.variables.size(), 1u);
  EXPECT_EQ(chat.variables[0].first, "enable_thinking");
  EXPECT_EQ(chat.where, "here");
  EXPECT_EQ(chat.first_trained, 0u);
  EXPECT_EQ(chat.id, "7");
}

TEST(Conversation, ReadsShareGptAndPromptsWithCompletions) {
  const auto shared = parse_conversation(
      R"({"system": "S", "conversations": [{"from": "human", "value": "Hi", "weight": 1}, {"from": "gpt", "value": ""}, {"from": "observation", "value": "x"}]})",
      "x");
  EXPECT_EQ(
      as_json(shared),
      R"([{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}, {"role": "tool", "content": "x"}])");
  const auto texts = parse_conversation(R"({"prompt": "2+2?", "completion": "4"})", "x");
  EXPECT_EQ(as_json(texts), R"([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])");
  const auto lists = parse_conversation(
      R"({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]})",
      "x");
  EXPECT_EQ(lists.messages.size(), 4u);
  EXPECT_EQ(lists.first_trained, 3u);
}

TEST(Conversation, ASystemTextIsTheFirstMessageOfEachForm) {
  const std::string with_system = R"([{"role": "system", "content": "S"}, {"role": "user", "content": "a"})";
  for (const std::string messages : {R"([{"role": "user", "content": "a"}])",
                                     R"([{"role": "system", "content": "S"}, {"role": "user", "content": "a"}])"}) {
    EXPECT_EQ(as_json(parse_conversation(R"({"system": "S", "messages": )" + messages + "}", "x")), with_system + "]");
  }
  const auto lists = parse_conversation(
      R"({"system": "S", "prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]})",
      "x");
  EXPECT_EQ(as_json(lists), with_system + R"(, {"role": "assistant", "content": "b"}])");
  EXPECT_EQ(lists.first_trained, 2U);
  const auto texts = parse_conversation(R"({"system": "S", "prompt": "a", "completion": "b"})", "x");
  EXPECT_EQ(as_json(texts), as_json(lists));
  const auto preference = parse_preference(
      R"({"system": "S", "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]})",
      "x");
  EXPECT_EQ(as_json(preference.chosen), as_json(lists));
  EXPECT_EQ(preference.rejected.first_trained, 2U);
  EXPECT_EQ(fault(R"({"system": "S", "messages": [{"role": "system", "content": "T"}]})"),
            R"(chat.jsonl, line 3: it has a "system" and another message from "system": expected one of them)");
  EXPECT_EQ(fault(R"({"system": "S", "messages": [{"role": "developer", "content": "D"}]})"),
            R"(chat.jsonl, line 3: it has a "system" and another message from "developer": expected one of them)");
  EXPECT_EQ(fault(R"({"system": "S", "conversations": [{"from": "system", "value": "T"}]})"),
            R"(chat.jsonl, line 3: it has a "system" and another message from "system": expected one of them)");
  EXPECT_EQ(fault(R"({"system": "S", "conversations": []})"), "chat.jsonl, line 3: it has no messages");
  // The same text in another form is the same.
  for (const char* first : {R"("content": "S", "tool_calls": null)", R"("content": [{"type": "text", "text": "S"}])"}) {
    const std::string message = R"({"role": "system", )" + std::string(first) + "}";
    EXPECT_EQ(fault(R"({"system": "S", "messages": [)" + message + "]}"), "") << message;
  }
  const auto beside_null =
      parse_preference(R"({"system": "S", "conversations": null, "prompt": "a", "chosen": "b", "rejected": "c"})", "x");
  EXPECT_EQ(beside_null.chosen.messages.size(), 3U);
}

TEST(Conversation, AnAnswerThatIsNotToBeTrainedIsRefused) {
  const std::string said =
      " has the weight 0: every answer is trained, so expected 1, or no weight; messages that are not trained go into "
      "a "
      R"("prompt" that is a list)";
  EXPECT_EQ(
      fault(R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]})"),
      "chat.jsonl, line 3: message 2" + said);
  EXPECT_EQ(fault(R"({"conversations": [{"from": "gpt", "value": "b", "weight": 0}]})"),
            "chat.jsonl, line 3: turn 1" + said);
  const std::string answer = R"({"role": "assistant", "content": "b", "weight": 0})";
  EXPECT_EQ(fault(R"({"prompt": [{"role": "user", "content": "a"}], "completion": [)" + answer + "]}"),
            "chat.jsonl, line 3: message 2" + said);
  // What is not trained may have any weight.
  EXPECT_EQ(fault(R"({"prompt": [)" + answer + R"(], "completion": [{"role": "assistant", "content": "c"}]})"), "");
  EXPECT_EQ(fault(R"({"messages": [{"role": "user", "content": "a", "weight": 0}]})"), "");
  EXPECT_EQ(fault(R"({"conversations": [{"from": "human", "value": "a", "weight": 0}]})"), "");
  EXPECT_EQ(fault(R"({"messages": [{"role": "assistant", "content": "b", "weight": null}]})"), "");
  for (const char* weight : {"false", "\"1\"", "0.5"}) {
    EXPECT_NE(fault(R"({"messages": [{"role": "assistant", "content": "b", "weight": )" + std::string(weight) + "}]}"),
              "")
        << weight;
  }
  EXPECT_EQ(parse_conversations(R"({"messages": [)" + answer + "]}", "x", {.trains = false}).all.size(), 1U);
  EXPECT_EQ(fault(R"({"messages": [{"role": "assistant", "content": "b", "weight": 1.0}]})"), "");
}

TEST(Conversation, ToolsMayBeTextThatHoldsAList) {
  EXPECT_EQ(
      jinja::to_json(
          parse_conversation(R"({"messages": [{"role": "user", "content": ""}], "tools": "[{\"name\": \"f\"}]"})", "x")
              .tools,
          {}),
      R"([{"name": "f"}])");
  EXPECT_TRUE(
      parse_conversation(R"({"messages": [{"role": "user", "content": ""}], "tools": []})", "x").tools.is_none());
}

TEST(Conversation, AMalformedRecordIsAnErrorWithFileLineAndReason) {
  const std::string at = "chat.jsonl, line 3: ";
  EXPECT_EQ(fault(R"([1])"), at + "expected a JSON object, found [1]");
  EXPECT_EQ(fault(R"({"message": []})"),
            at + R"(it has none of "messages", "conversations", "prompt" (did you mean 'messages'?))");
  EXPECT_EQ(fault(R"({"messages": [], "prompt": ""})"),
            at + R"(expected one of "messages", "conversations", "prompt", found "messages" and "prompt")");
  EXPECT_EQ(fault(R"({"messages": []})"), at + "it has no messages");
  EXPECT_EQ(fault(R"({"messages": "Hi"})"), at + R"("messages" is "Hi": expected a list of messages)");
  EXPECT_EQ(fault(R"({"messages": [3]})"), at + "message 1 is 3: expected an object");
  EXPECT_EQ(fault(R"({"messages": [{"content": "x"}]})"), at + R"(message 1 has no "role")");
  EXPECT_EQ(fault(R"({"messages": [{"role": 1, "content": "x"}]})"), at + "the role of message 1 is 1: expected text");
  EXPECT_EQ(fault(R"({"messages": [{"role": "user", "content": ""}, {"role": "user"}]})"),
            at + R"(message 2 has no "content")");
  EXPECT_EQ(fault(R"({"messages": [{"role": "user", "content": 5}]})"),
            at + "the content of message 1 is 5: expected text or a list of parts");
  EXPECT_EQ(fault(R"({"messages": [{"role": "user", "content": ["x"]}]})"),
            at + R"(message 1 has the part "x": expected an object with a "type")");
  EXPECT_EQ(fault(R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})"),
            at + R"(message 1 has the part {"type": "text"}: expected a "text" of text)");
  EXPECT_EQ(fault(R"({"messages": [{"role": "assistant", "tool_calls": {}}]})"),
            at + "the tool_calls of message 1 are {}: expected a list");
  EXPECT_EQ(fault(R"({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]})"),
            at + R"(message 1 has the tool call {"function": {}}: expected an object whose "function" has a "name")");
  EXPECT_EQ(
      fault(R"({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]})"),
      at + "message 1 calls f with the arguments 3: expected an object, or one as text");
  EXPECT_THAT(fault(R"({"conversations": [{"from": "humann", "value": ""}]})"),
              AllOf(HasSubstr(at + R"(turn 1 is from "humann": expected one of human, user)"),
                    HasSubstr("(did you mean 'human'?)")));
  EXPECT_EQ(fault(R"({"conversations": [{"from": "gpt"}]})"), at + R"(turn 1 has no "value" of text)");
  EXPECT_EQ(fault(R"({"prompt": "x"})"), at + R"(it has a "prompt" but no "completion")");
  EXPECT_EQ(fault(R"({"prompt": "x", "completion": []})"),
            at + R"("prompt" and "completion": expected two texts, or two lists of messages)");
  EXPECT_EQ(fault(R"({"messages": [{"role": "user", "content": ""}], "tools": [1]})"),
            at + R"("tools" is [1]: expected a list of objects)");
  EXPECT_THAT(fault(R"({"messages": [{"role": "user", "content": ""}], "tools": "x"})"),
              HasSubstr(at + R"("tools": not valid JSON)"));
  EXPECT_EQ(fault(R"({"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": 1})"),
            at + R"("chat_template_kwargs" is 1: expected an object)");
  EXPECT_THAT(fault("{"), HasSubstr(at + "not valid JSON"));
}

TEST(Conversation, SkipsMalformedRecordsOnlyWhereAsked) {
  const std::string text = "{\"prompt\": \"a\", \"completion\": \"b\"}\n\n{\"prompt\": 1}\n";
  EXPECT_THAT(error_text<DataError>([&] { parse_conversations(text, "c.jsonl"); }),
              HasSubstr("c.jsonl, line 3: it has a"));
  const auto read = parse_conversations(text, "c.jsonl", {.skips_malformed = true});
  EXPECT_EQ(read.all.size(), 1u);
  EXPECT_EQ(read.all[0].where, "c.jsonl, line 1");
  EXPECT_THAT(read.skipped, ElementsAre(HasSubstr("c.jsonl, line 3: it has a")));
  // A skipped line keeps its number.
  const auto numbered = parse_conversations("{\"prompt\": 1}\n" + text, "c.jsonl", {.skips_malformed = true});
  EXPECT_EQ(numbered.all[0].number, 1u);
  EXPECT_EQ(error_text<DataError>([&] { parse_conversations("\n", "c.jsonl"); }), "c.jsonl holds no conversations");
}

TEST(Preference, FormsOfTrlBecomeTwoConversations) {
  const auto both = [](const std::string& json) {
    const Preference made = parse_preference(json, "p.jsonl, line 2");
    std::string text;
    for (const Conversation* one : {&made.chosen, &made.rejected}) {
      for (const auto& message : one->messages) {
        text += role_of(message) + "=" + message.dict().named("content")->text() + " ";
      }
      text += "trained from " + std::to_string(one->first_trained) + "; ";
    }
    return text;
  };
  EXPECT_EQ(both(R"({"prompt": "Q", "chosen": "A", "rejected": "B"})"),
            "user=Q assistant=A trained from 0; user=Q assistant=B trained from 0; ");
  const std::string expected =
      "user=Q assistant=A user=R assistant=C trained from 3; "
      "user=Q assistant=A user=R assistant=D trained from 3; ";
  const std::string prompt =
      R"({"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "R"})";
  const std::string c = R"({"role": "assistant", "content": "C"})", d = R"({"content": "D", "role": "assistant"})";
  EXPECT_EQ(both("{\"prompt\": [" + prompt + "], \"chosen\": [" + c + "], \"rejected\": [" + d + "]}"), expected);
  // What both begin with is the prompt, also where the prompt is there as a text, too.
  const std::string implicit = "\"chosen\": [" + prompt + "," + c + "], \"rejected\": [" + prompt + "," + d + "]}";
  EXPECT_EQ(both("{" + implicit), expected);
  EXPECT_EQ(both("{\"prompt\": \"R\"," + implicit), expected);
}

TEST(Preference, NamesWhatIsWrong) {
  const auto fault = [](const std::string& json) {
    return error_text<DataError>([&] { parse_preference(json, "p.jsonl, line 2"); });
  };
  const std::string at = "p.jsonl, line 2: ";
  EXPECT_EQ(fault(R"([1])"), at + "expected a JSON object, found [1]");
  EXPECT_EQ(fault(R"({"prompt": "Q", "chosen": "A"})"), at + R"(it has no "rejected")");
  EXPECT_EQ(fault(R"({"prompt": "Q", "rejected": "A"})"), at + R"(it has no "chosen")");
  EXPECT_EQ(fault(R"({"chosen": "A", "rejected": "B"})"),
            at + R"("chosen" and "rejected" without a "prompt": expected two lists of messages)");
  EXPECT_EQ(fault(R"({"prompt": "Q", "chosen": "A", "rejected": 1})"),
            at + R"("prompt" and "rejected": expected two texts, or two lists of messages)");
  const std::string q = R"({"role": "user", "content": "Q"})", a = R"({"role": "assistant", "content": "A"})";
  const auto lists = [](const std::string& chosen, const std::string& rejected) {
    return "{\"chosen\": [" + chosen + "], \"rejected\": [" + rejected + "]}";
  };
  EXPECT_EQ(fault(lists(q + "," + a, a)),
            at + R"("chosen" and "rejected" begin with different messages: expected the same prompt)");
  EXPECT_EQ(fault(lists(q + "," + a, q + "," + a)),
            at + R"("chosen" and "rejected" are the same messages: expected two answers)");
  EXPECT_EQ(fault(R"({"prompt": "Q", "chosen": "A", "rejected": "A"})"),
            at + R"("chosen" and "rejected" are the same messages: expected two answers)");
  EXPECT_EQ(fault(lists(q + "," + a, q)),
            at + R"("rejected" has no answer of its own: all its messages begin the other one, too)");
  EXPECT_EQ(fault(lists(q + "," + a, q + R"(, {"role": "assistant"})")), at + R"(message 2 has no "content")");
}

}  // namespace
}  // namespace phalanx::data
