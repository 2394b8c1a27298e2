// Wrong inputs that users give to the real program. Each must cause a message in plain words without text of a library,
// a nonzero status, and nothing may be dropped silently.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

using namespace program_testing;

constexpr const char* kHub = "meta-llama/Llama-3.1-8B";

class WrongInputTest : public ProgramTest {
 protected:
  /// Makes a run of one step with a tokenizer: run/, tokenizer.json, text.txt.
  void make_run() {
    std::string text;
    for (int i = 0; i < 200; ++i)
      text += "question " + std::to_string(i) + " has the answer " + std::to_string(i % 7) + ".\n";
    write("text.txt", text);
    ASSERT_EQ(run({"tokenize", path("text.txt"), "--vocab-size", "300", "--tokenizer", tokenizer(), "--quiet"}).status,
              0);
    const Outcome trained = run({"train", config(), "--training.steps=1", "--model.hf_assets_path=" + path("tok")});
    ASSERT_EQ(trained.status, 0) << trained.err;
  }
  std::string tokenizer() const { return path("tok/tokenizer.json"); }

  void expect_refused(const std::vector<std::string>& arguments, int status, const std::string& text) const {
    SCOPED_TRACE(::testing::PrintToString(arguments));
    const Outcome outcome = run(arguments);
    expect_one_error(outcome, status, text);
    for (const char* library : {"json.exception", "c10::", "std::", "what()", "filesystem error", "not in range",
                                "required INT", "At Most", "not in {"}) {
      EXPECT_THAT(outcome.err, Not(HasSubstr(library)));
    }
  }
};

TEST_F(WrongInputTest, NamesOnTheHubAreToldFromPathsInEveryPlace) {
  make_run();
  const std::string hub = "a name on the Hugging Face hub, from which nothing is downloaded";
  const std::string other = "--job.dump_folder=" + path("other");
  const std::vector<std::pair<int, std::vector<std::string>>> cases = {
      {1, {"generate", "--checkpoint", kHub, "--prompt", "a"}},
      {1, {"generate", "--checkpoint", path("run"), "--tokenizer", kHub, "--prompt", "a"}},
      {1, {"eval", "--checkpoint", kHub, "--text", path("text.txt")}},
      {1, {"eval", "--checkpoint", path("run"), "--tokenizer", kHub, "--text", path("text.txt")}},
      {1, {"eval", "--checkpoint", path("run"), "--tokens", kHub}},
      {1, {"checkpoint", "inspect", kHub}},
      {1, {"checkpoint", "verify", kHub}},
      {1, {"checkpoint", "diff", path("run"), kHub}},
      {1, {"checkpoint", "consolidate", kHub, path("out")}},
      {2, {"checkpoint", "consolidate", path("run"), path("out"), "--hf", "--assets", kHub}},
      {1, {"checkpoint", "reshard", kHub, path("out"), "--ranks", "2"}},
      {1, {"tokenize", path("text.txt"), "--tokenizer", kHub, "--output", path("ids")}},
      {1, {"tokenize", kHub, "--tokenizer", tokenizer(), "--output", path("ids")}},
      {1, {"tokenize", "--show", "a", "--tokenizer", kHub}},
      {1, {"train", config(), other, std::string("--model.hf_assets_path=") + kHub}},
      {1, {"train", config(), other, "--model.flavor=hf", std::string("--model.hf_assets_path=") + kHub}},
      {1, {"train", config(), other, std::string("--checkpoint.initial_load_path=") + kHub}},
      {1, {"train", config(), other, "--training.dataset_path", kHub}},
      {2, {"plan", "--model", kHub, "--devices", "8xH100"}},
      {1, {"verify", "-n", "2", config(), "--model.flavor=hf", std::string("--model.hf_assets_path=") + kHub}},
  };
  for (const auto& [status, arguments] : cases) expect_refused(arguments, status, hub);
  EXPECT_FALSE(std::filesystem::exists(path("out")));
  expect_refused({"generate", "--checkpoint", "hf://openai/gpt2", "--prompt", "a"}, 1,
                 "an address, from which nothing");
}

TEST_F(WrongInputTest, NumbersAndChoicesOfOptionsAreRefusedInWords) {
  const std::vector<std::string> generate = {"generate", "--checkpoint", "x", "--prompt", "y"};
  const auto with = [](std::vector<std::string> words, const std::vector<std::string>& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const std::string huge = "99999999999999999999";
  expect_refused(with(generate, {"--seed", "18446744073709551616"}), 2,
                 "--seed is '18446744073709551616': the number is too");
  expect_refused(with(generate, {"--top-k=" + huge}), 2, "--top-k is '" + huge + "': the number is too large");
  expect_refused(with(generate, {"--top-k", "1.5"}), 2, "--top-k is '1.5': expected a whole number");
  expect_refused(with(generate, {"--top-k", "010"}), 2, "--top-k is '010': expected a whole number");
  expect_refused(with(generate, {"--max-new-tokens="}), 2, "--max-new-tokens needs a value");
  expect_refused(with(generate, {"--stop"}), 2, "--stop needs a value");
  expect_refused(with(generate, {"--top-p", "0.5", "--top-p", "0.7"}), 2, "--top-p is given twice: expected it once");
  expect_refused(with(generate, {"--dtype", "int8"}), 2, "--dtype is 'int8': expected float32, bfloat16 or float16");
  expect_refused(with(generate, {"--backend", "glo"}), 2, "--backend is 'glo' (did you mean 'gloo'?)");
  const std::vector<std::string> eval = {"eval", "--checkpoint", "x", "--text", "y"};
  for (const char* option : {"--seq-len", "--stride", "--max-tokens", "--batch-size", "--tp", "--pp"}) {
    expect_refused(with(eval, {option, "0"}), 2, std::string(option) + " is 0: expected 1 or more");
    expect_refused(with(eval, {option, "x"}), 2, std::string(option) + " is 'x': expected a whole number");
  }
  expect_refused({"bench", "comm", "--check", "2"}, 2, "--check is 2: expected 0 or 1");
  expect_refused({"bench", "comm", "--iters", "0"}, 2, "--iters is 0: expected 1 or more");
  expect_refused({"checkpoint", "reshard", "x", "y", "--ranks", huge}, 2, "--ranks is '" + huge + "': the number is");
  expect_refused({"plan", "--model", "llama3_8b", "--devices", "8xH100", "--schedule", "1F1C"}, 2,
                 "(did you mean '1F1B'?)");
  expect_refused({"train", config(), "--parallelism.pipeline_parallel_schedule=1F1C"}, 2, "(did you mean '1F1B'?)");
  expect_refused({"train", config(), "--training.local_batch_size=9223372036854775807"}, 2, "at most 2147483647");
}

TEST_F(WrongInputTest, WhatAJobWouldLoseOrDropIsRefused) {
  write("p.jsonl", "{\"text\": \"a\"}\n");
  const std::vector<std::string> job = {"generate",      "--checkpoint", "x", "--prompts-file",
                                        path("p.jsonl"), "--output",     "o"};
  const auto refused = [&](const std::vector<std::string>& more, const std::string& text) {
    auto words = job;
    words.insert(words.end(), more.begin(), more.end());
    expect_refused(words, 2, text);
  };
  refused({"--final-file", "part-00000.jsonl"}, "as the job names a file of its own");
  refused({"--final-file", "job.json"}, "as the job names a file of its own");
  refused({"--prompt-field", "text", "--response-field", "text"}, "are both 'text': one of the two would be lost");
  refused({"--id-field", ""}, "--id-field is empty: expected the name of a field");
  refused({"--response-field", "ids"}, "which results use for something else");
  write("q.jsonl", "{}\n");
  expect_refused({"eval", "--checkpoint", "x", "--choices", path("q.jsonl"), "--output", path("q.jsonl")}, 2,
                 "q.jsonl is a file that is read");
  expect_refused({"eval", "--checkpoint", "x", "--choices", path("q.jsonl"), "--json", path("./q.jsonl")}, 2,
                 "q.jsonl is a file that is read");
  EXPECT_EQ(contents(path("q.jsonl")), "{}\n");
}

TEST_F(WrongInputTest, OtherKindsOfFilesAreNotTakenForText) {
  make_run();
  const std::string gzip("\x1f\x8b\x08\0\0\0\0\0\0\x03K\xcaH\xcd\xc9\xc9\x07\0\0\0", 20);
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976\n";
  const auto eval = [&](const std::string& name, const std::string& bytes) -> std::vector<std::string> {
    write(name, bytes);
    return {"eval", "--checkpoint", path("run"), "--text", path(name)};
  };
  expect_refused(eval("t.gz", gzip), 1, "t.gz is gzip data: expected plain text");
  expect_refused(eval("t.bin", contents(path("tokens.bin"))), 1, "t.bin is binary: expected plain text");
  expect_refused(eval("t.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n"), 1, "t.jsonl looks like JSON lines");
  expect_refused(eval("t.txt", pointer), 1, "t.txt: it is a Git LFS pointer");
  const auto generate = [&](const std::string& name, const std::string& bytes) -> std::vector<std::string> {
    write(name, bytes);
    return {"generate", "--checkpoint", path("run"), "--max-new-tokens", "2", "--prompts-file", path(name)};
  };
  expect_refused(generate("p.jsonl.gz", gzip), 1, "p.jsonl.gz is gzip data: expected prompts");
  expect_refused(generate("p.txt", "{\"prompt\": \"a\"}\n"), 1, "p.txt looks like JSON lines");
  expect_refused(generate("p2.txt", "caf\xe9 is not\n"), 1, "p2.txt, line 1: it is not valid UTF-8");
  expect_refused(generate("p.jsonl", "{\"prompt\": \"a\", \"prompt\": \"b\"}\n"), 1,
                 "its key \"prompt\" is there twice");
  EXPECT_EQ(run(generate("p.ndjson", "{\"prompt\": \"answer\"}\n")).status, 0);
  const Outcome cut = run({"generate", "--checkpoint", path("run"), "--prompt", "a", "--ignore-end"});
  EXPECT_THAT(cut.err, HasSubstr("tokens: with the prompt they are as many as the model can read"));

  std::filesystem::create_directories(path("broken/checkpoint"));
  std::filesystem::copy(path("run/checkpoint/step-1"), path("broken/checkpoint/step-1"),
                        std::filesystem::copy_options::recursive);
  write("broken/checkpoint/step-1/manifest.json", "{");
  expect_refused({"generate", "--checkpoint", path("broken"), "--prompt", "a"}, 1, "its checksum does not match");
  write("tokenizer.model", "\x0a\x0e\x0a\x05<unk>");
  expect_refused({"tokenize", "--show", "a", "--tokenizer", path("tokenizer.model")}, 1, "is a SentencePiece model");
}

TEST_F(WrongInputTest, WhatCannotBePrintedIsAFailure) {
  make_run();
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP() << "there is no /dev/full here";
  const auto to_full = [&](const std::string& command) {
    const std::string line = program() + " " + command + " > /dev/full 2> " + path("err");
    const int status = std::system(line.c_str());
    EXPECT_EQ(WEXITSTATUS(status), 1) << command;
    EXPECT_THAT(contents(path("err")), HasSubstr("cannot write to")) << command;
  };
  to_full("tokenize --show hello --tokenizer " + tokenizer());
  to_full("schedule 1F1B --ranks 2 --micro-batches 2 --table");
  to_full("plan --help");
  to_full("--help");
  to_full("version");
  to_full("checkpoint inspect " + path("run"));
}

TEST_F(WrongInputTest, AClosedStandardOutputIsNotAFileThatIsWritten) {
  make_run();
  const std::string line = program() + " tokenize " + path("text.txt") + " --tokenizer " + tokenizer() + " --output " +
                           path("ids") + " --quiet";
  ASSERT_EQ(std::system((line + " > " + path("printed")).c_str()), 0);
  const std::string ids = contents(path("ids.bin"));
  ASSERT_EQ(std::system((line + " --force >&-").c_str()), 0);
  EXPECT_EQ(contents(path("ids.bin")), ids);
}

TEST_F(WrongInputTest, FiguresCanGoToAPipeOrADevice) {
  make_run();
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  const int reader = ::open(path("pipe").c_str(), O_RDONLY | O_NONBLOCK);
  EXPECT_EQ(
      run({"eval", "--checkpoint", path("run"), "--text", path("text.txt"), "--quiet", "--json", path("pipe")}).status,
      0);
  char text[200] = {};
  EXPECT_GT(::read(reader, text, sizeof text - 1), 10);
  EXPECT_THAT(text, HasSubstr("\"perplexity\""));
  ::close(reader);
  EXPECT_TRUE(std::filesystem::is_fifo(path("pipe")));
}

TEST_F(WrongInputTest, AProcessThatIgnoresTheQuestionIsNotSaidToBeAsked) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGQUIT, SIG_IGN);
    for (;;) ::pause();
  }
  // The child ignores the signal only after its start. Until then the refusal is another one, so try again.
  Outcome outcome = run({"trace", "dump", std::to_string(child)});
  while (outcome.err.find("does not handle SIGQUIT") != std::string::npos)
    outcome = run({"trace", "dump", std::to_string(child)});
  expect_one_error(outcome, 1, "ignores SIGQUIT");
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace phalanx::cli
