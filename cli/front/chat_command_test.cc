// `phalanx chat` and `phalanx generate --chat`, as a user runs them.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

class ChatCommandTest : public ::testing::Test {
 protected:
  /// A model for all tests: a small one after a step, as a Hugging Face directory with a chat template.
  static void SetUpTestSuite() {
    folder_ = new TempDirectory("chat_command");
    std::string text;
    for (int i = 0; i < 200; ++i)
      text += "question " + std::to_string(i) + " has the answer " + std::to_string(i % 7) + ".\n";
    write_file(file("text.txt"), text);
    ASSERT_EQ(call("tokenize " + file("text.txt") + " --vocab-size 300 --tokenizer " + file("tok/tokenizer.json") +
                   " --output " + file("tokens") + " --quiet"),
              0)
        << error_;
    write_file(file("run.toml"),
               "[job]\ndump_folder = \"" + file("run") + "\"\n[model]\nflavor = \"debug\"\nhf_assets_path = \"" +
                   file("tok") + "\"\n[training]\ndataset_path = \"" + file("tokens.bin") +
                   "\"\nseq_len = 64\nlocal_batch_size = 2\nsteps = 1\n[checkpoint]\nlast_save_in_hf = true\n");
    ASSERT_EQ(call("train " + file("run.toml")), 0) << error_;
    replace_file(file("run/hf/chat_template.jinja"), kTemplate);
  }
  static void TearDownTestSuite() { delete folder_; }

  static constexpr const char* kTemplate =
      "{% if rules %}[{{ rules }}]{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% "
      "endfor %}"
      "{% if add_generation_prompt %}assistant: {% endif %}";

  static std::string file(const std::string& name) { return (folder_->path() / name).string(); }
  static int call(const std::string& arguments) {
    return finish(program_testing::run_line(folder_->path(), arguments));
  }
  /// `phalanx chat` with this input.
  static int chat(const std::string& input, const std::string& arguments) {
    replace_file(file("input"), input);
    const std::string line = program_testing::program() + " chat " + file("run/hf") + " --max-new-tokens 8 " +
                             arguments + " < " + file("input") + " > " + file("out") + " 2> " + file("err");
    const int status = std::system(line.c_str());
    return finish({WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                   program_testing::contents(file("out")), program_testing::contents(file("err"))});
  }
  static int finish(const program_testing::Outcome& outcome) {
    out_ = outcome.out;
    error_ = outcome.err;
    return outcome.status;
  }
  static std::string answer_to(const std::string& record) {
    replace_file(file("ask.jsonl"), record + "\n");
    EXPECT_EQ(call("generate --checkpoint " + file("run/hf") + " --chat " + file("ask.jsonl") +
                   " --greedy --max-new-tokens 8 --quiet"),
              0)
        << error_;
    return nlohmann::json::parse(out_)["completion"];
  }

  static TempDirectory* folder_;
  static std::string out_, error_;
};
TempDirectory* ChatCommandTest::folder_ = nullptr;
std::string ChatCommandTest::out_, ChatCommandTest::error_;

TEST_F(ChatCommandTest, AnswersWhatGenerateAnswersForTheSameConversation) {
  const std::string first = answer_to(R"({"messages": [{"role": "user", "content": "question 5"}]})");
  const nlohmann::json both = {{"messages",
                                {{{"role", "user"}, {"content", "question 5"}},
                                 {{"role", "assistant"}, {"content", first}},
                                 {{"role", "user"}, {"content", "and 6?"}}}}};
  const std::string second = answer_to(both.dump());
  ASSERT_EQ(chat("question 5\nand 6?\n", "--greedy --quiet"), 0) << error_;
  EXPECT_EQ(out_, first + "\n" + second + "\n");
  ASSERT_EQ(chat("question 5\n\n/new\nquestion 5\n/exit\nquestion 7\n", "--greedy --quiet"), 0) << error_;
  EXPECT_EQ(out_, first + "\n" + first + "\n");
  const std::string with_rules = answer_to(
      R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "x"}], "chat_template_kwargs": {"rules": "R"}})");
  ASSERT_EQ(chat("x", R"(--greedy --system S --variables '{"rules": "R"}')"), 0) << error_;
  EXPECT_EQ(out_, with_rules + "\n");
  EXPECT_THAT(error_, HasSubstr("tokens/s)"));
}

TEST_F(ChatCommandTest, GenerateReadsConversationsFromAFileOrStandardInput) {
  const std::string records = R"({"id": "a", "messages": [{"role": "user", "content": "question 1"}]})"
                              "\n"
                              R"({"messages": [{"role": "user", "content": "question 2"}]})"
                              "\n";
  write_file(file("two.jsonl"), records);
  const std::string rest = " --greedy --max-new-tokens 4 --quiet";
  ASSERT_EQ(call("generate --checkpoint " + file("run/hf") + " --chat " + file("two.jsonl") + rest), 0) << error_;
  const std::string expected = out_;
  EXPECT_THAT(expected, AllOf(HasSubstr(R"({"id":"a",)"), HasSubstr(R"({"id":1,)")));
  const std::string line = "cat " + file("two.jsonl") + " | " + program_testing::program() + " generate --checkpoint " +
                           file("run/hf") + " --chat -" + rest + " > " + file("out");
  ASSERT_EQ(std::system(line.c_str()), 0);
  EXPECT_EQ(program_testing::contents(file("out")), expected);
  ASSERT_EQ(call("generate -n 2 --checkpoint " + file("run/hf") + " --chat " + file("two.jsonl") + rest + " --output " +
                 file("job")),
            0)
      << error_;
  EXPECT_EQ(read_file(file("job/results.jsonl")), expected);
}

TEST_F(ChatCommandTest, RefusesWhatItCannotAnswer) {
  const auto refused = [&](const std::string& record, const std::string& more = "") {
    replace_file(file("bad.jsonl"), "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}\n" + record + "\n");
    return call("generate --checkpoint " + file("run/hf") + " --quiet --max-new-tokens 2 --chat " + file("bad.jsonl") +
                more);
  };
  EXPECT_EQ(refused(R"({"messages": [{"role": "user"}]})"), 1);
  EXPECT_THAT(error_, HasSubstr("bad.jsonl, line 2: message 1 has no \"content\""));
  EXPECT_EQ(refused(R"({"prompt": "a", "completion": "b"})"), 1);
  EXPECT_THAT(error_, HasSubstr("bad.jsonl, line 2: its last message is the assistant's"));
  EXPECT_EQ(refused(R"({"prompt": "a", "completion": "b"})", " --output " + file("skips")), 1);
  EXPECT_THAT(error_, AllOf(HasSubstr("skipped: " + file("bad.jsonl") + ", line 2: its last message"),
                            HasSubstr("1 prompt was skipped")));
  EXPECT_EQ(call("generate --checkpoint " + file("run/hf") + " --chat a --prompts-file b"), 2);
  EXPECT_THAT(error_, HasSubstr("--chat and --prompts-file exclude each other"));
  EXPECT_EQ(call("generate --checkpoint " + file("run/hf") + " --chat a --id-field uid --output o"), 2);
  EXPECT_THAT(error_, HasSubstr("--prompt-field and --id-field are of --prompts-file FILE"));
  EXPECT_EQ(call("generate --checkpoint " + file("run/hf") + " --prompt a --chat-template b"), 2);
  EXPECT_THAT(error_, HasSubstr("--chat-template is a part of --chat FILE"));
  EXPECT_EQ(chat("x\n", "--variables 5"), 1);
  EXPECT_THAT(error_, HasSubstr("--variables: expected a JSON object"));
  EXPECT_EQ(call("chat"), 2);
  EXPECT_EQ(call("chat " + file("run/hf") + " --greedy --temperature 2"), 2);
  EXPECT_EQ(call("chat " + file("run")), 1) << "the run's folder has a tokenizer, but no chat template";
  EXPECT_THAT(error_, HasSubstr("has no chat template: expected one of chat_template.jinja"));
}

TEST_F(ChatCommandTest, AMessageThatIsTooLongIsLeftOut) {
  const std::string answer = answer_to(R"({"messages": [{"role": "user", "content": "question 5"}]})");
  ASSERT_EQ(chat(std::string(100000, 'x') + "\nquestion 5\n", "--greedy --quiet"), 0) << error_;
  EXPECT_THAT(error_, HasSubstr("the message is left out; /new begins a new conversation"));
  EXPECT_EQ(out_, answer + "\n");
}

/// Questions with one answer to all of them.
std::string conversations(int count) {
  std::string lines;
  for (int i = 0; i < count; ++i) {
    lines += R"({"prompt": "question )" + std::to_string(i) + R"(", "completion": "has the answer 5."})" + "\n";
  }
  return lines;
}

std::vector<double> numbers_of(const std::string& metrics, const char* key) {
  std::vector<double> found;
  std::istringstream lines(program_testing::contents(metrics));
  for (std::string line; std::getline(lines, line);) {
    const auto entry = nlohmann::json::parse(line);
    if (entry.contains(key)) found.push_back(entry[key]);
  }
  return found;
}

class TuningTest : public ChatCommandTest {
 protected:
  static void SetUpTestSuite() {
    ChatCommandTest::SetUpTestSuite();
    // A prompt that ends by a line break: no token of an answer reaches into it.
    replace_file(file("run/hf/chat_template.jinja"),
                 "{% for m in messages %}{{ m.role + ':\n' + m.content + '<|endoftext|>' }}{% endfor %}"
                 "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}");
  }
  static std::string config(const std::string& run, const std::string& more = "") {
    write_file(
        file("sft.toml"),
        "[job]\ndump_folder = \"" + file(run) + "\"\n[model]\nflavor = \"hf\"\nhf_assets_path = \"" + file("run/hf") +
            "\"\n[training]\nseq_len = 64\nlocal_batch_size = 4\nsteps = 40\n" +
            "[optimizer]\nlr = 3e-3\n[lr_scheduler]\nwarmup_steps = 4\n[checkpoint]\ninitial_load_in_hf = true\n" +
            "last_save_in_hf = true\n[validation]\nenable = true\nfreq = 20\nfraction = 0.2\n[sft]\n" +
            "conversations = [\"" + file("chats.jsonl") + "\"]\n" + more);
    return file("sft.toml");
  }
};

TEST_F(TuningTest, AModelTunedOnConversationsAnswersAndStops) {
  write_file(file("chats.jsonl"), conversations(60));
  ASSERT_EQ(call("train -n 2 " + config("tuned")), 0) << error_;
  EXPECT_THAT(error_, AllOf(HasSubstr("conversations, train: 48 conversations"), HasSubstr("%) are trained"),
                            HasSubstr("conversations, validation: 12 conversations"),
                            HasSubstr("user:\nquestion 0<|endoftext|>assistant:\n[[has the answer 5.<|endoftext|>]]"),
                            HasSubstr("labels are trained")));
  const auto losses = numbers_of(file("tuned/metrics.jsonl"), "loss");
  ASSERT_EQ(losses.size(), 40U);
  EXPECT_LT(losses.back(), losses.front() / 8);
  EXPECT_LT(numbers_of(file("tuned/metrics.jsonl"), "validation_loss").back(), losses.front() / 8);
  replace_file(file("ask.jsonl"), R"({"messages": [{"role": "user", "content": "question 71"}]})"
                                  "\n");
  ASSERT_EQ(call("generate --checkpoint " + file("tuned/hf") + " --chat " + file("ask.jsonl") +
                 " --greedy --max-new-tokens 60 --quiet"),
            0)
      << error_;
  EXPECT_EQ(nlohmann::json::parse(out_)["completion"], "has the answer 5.");
  // The same command goes on, from the same token files.
  ASSERT_EQ(call("train " + file("sft.toml") + " --training.steps 41"), 0) << error_;
  EXPECT_THAT(error_, HasSubstr("are up to date"));
  EXPECT_EQ(numbers_of(file("tuned/metrics.jsonl"), "loss").size(), 41U);
  // Other answers are other data, although their number and length are the same.
  std::string other = conversations(60);
  other.replace(other.rfind("answer 5"), 8, "answer 6");
  replace_file(file("chats.jsonl"), other);
  EXPECT_EQ(call("train " + file("sft.toml") + " --training.steps 42"), 1);
  EXPECT_THAT(error_, HasSubstr("the data are not those that the checkpoint's run read"));
}

TEST_F(TuningTest, EveryLayoutIsVerifiedOnConversations) {
  replace_file(file("chats.jsonl"), conversations(60));
  ASSERT_EQ(call("verify -n 2 " + config("verified") +
                 " --steps 2 --layout dp_replicate=2 --layout dp_shard=2,zero=3 --layout tp=2 --layout pp=2"),
            0)
      << error_ << out_;
  EXPECT_THAT(out_, HasSubstr("4 of 4 layouts right"));
}

TEST_F(TuningTest, ConversationsThatCannotBeTrainedOnAreOneError) {
  const auto refused = [&](const std::string& more, const std::string& flags = "") {
    return call("train -n 2 " + config("refused", more) + " " + flags);
  };
  replace_file(file("chats.jsonl"), conversations(5) + "{\"messages\": [{\"role\": \"user\"}]}\n" + conversations(5));
  EXPECT_EQ(refused(""), 1);
  EXPECT_EQ(program_testing::count(error_, "chats.jsonl, line 6: message 1 has no \"content\""), 1) << error_;
  EXPECT_EQ(refused("skip_malformed = true\n", "--training.steps 1 --checkpoint.no-last_save_in_hf"), 0) << error_;
  EXPECT_THAT(error_, HasSubstr("1 skipped, the first because of"));
  EXPECT_EQ(refused("chat_template = \"rag\"\n"), 1);
  EXPECT_THAT(error_, HasSubstr("no chat template named 'rag'"));
  replace_file(file("chats.jsonl"), R"({"messages": [{"role": "user", "content": "x"}]})");
  EXPECT_EQ(refused("", "--validation.no-enable"), 1);
  EXPECT_THAT(error_, AllOf(HasSubstr("0 % of the tokens are trained"), HasSubstr("chats.jsonl, line 1")));
  EXPECT_EQ(call("train " + config("refused") + " --sft.conversations " + file("none.jsonl")), 1);
  EXPECT_THAT(error_, HasSubstr("[sft] conversations: '" + file("none.jsonl") + "' does not exist"));
  EXPECT_FALSE(std::filesystem::exists(file("refused/sft/unfinished/train.bin")));
}

TEST_F(TuningTest, TokenizeWritesTheTokenFilesOfConversations) {
  replace_file(file("chats.jsonl"), conversations(40));
  const std::string rest = " --tokenizer " + file("run/hf") + " --output " + file("chat-tokens") + " --quiet";
  ASSERT_EQ(call("tokenize --chat " + file("chats.jsonl") + rest + " --validation-fraction 0.25"), 0) << error_;
  EXPECT_THAT(out_,
              AllOf(HasSubstr("chat-tokens.bin: 30 conversations"), HasSubstr("-validation.bin: 10 conversations"),
                    HasSubstr("assistant:\n[[has the answer 5.<|endoftext|>]]")));
  ASSERT_EQ(
      call("train " + file("run.toml") + " --job.dump_folder " + file("from-tokens") + " --training.dataset_path " +
           file("chat-tokens") + " --training.attn_mask_type block_causal --training.packing best_fit"),
      0)
      << error_;
  EXPECT_THAT(error_, HasSubstr("labels are trained"));
  EXPECT_EQ(call("tokenize --chat " + file("chats.jsonl") + rest), 1);
  EXPECT_THAT(error_, HasSubstr("chat-tokens.mask"));
  ASSERT_EQ(call("tokenize --chat " + file("chats.jsonl") + rest + " --force --max-tokens 20 --leave-out-longer"), 1);
  EXPECT_THAT(error_, HasSubstr("longer than 20 tokens"));
  const auto wrong = [&](const std::string& arguments) {
    EXPECT_EQ(call("tokenize " + arguments), 2) << arguments;
    return error_;
  };
  EXPECT_THAT(wrong("--chat a.jsonl --tokenizer b --output c --field text"), HasSubstr("--field is of texts"));
  EXPECT_THAT(wrong("a.txt --tokenizer b --output c --max-tokens 5"), HasSubstr("--max-tokens is of conversations"));
  EXPECT_THAT(wrong("--chat a.jsonl --tokenizer b"), HasSubstr("--output PREFIX is missing"));
  EXPECT_THAT(wrong("--chat a.jsonl --tokenizer b --output c --leave-out-longer"), HasSubstr("needs --max-tokens"));
}

}  // namespace
}  // namespace phalanx::cli
