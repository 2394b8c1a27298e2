// `phalanx chat` and `phalanx generate --chat`, as a user runs them.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

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

}  // namespace
}  // namespace phalanx::cli
