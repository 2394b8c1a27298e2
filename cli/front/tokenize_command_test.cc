#include "cli/front/tokenize_command.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "cli/testing/command_fixture.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/corpus/unfinished_tokens.h"
#include "phalanx/data/testing/small_data.h"
#include "phalanx/data/token_file.h"
#include "phalanx/data/token_sidecar.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"

namespace phalanx::cli {
namespace {

class TokenizeCommandTest : public CommandTest {
 protected:
  TokenizeCommandTest() : CommandTest({"tokenize", "", "", tokenize_command}) {
    for (int i = 0; i < 20; ++i) {
      std::ofstream(path("corpus" + std::to_string(i) + ".txt")) << "the cat sat on the mat, number " << i << "\n";
    }
  }

  int train_with(Arguments more) {
    more.insert(more.begin(), {path("*.txt"), "--vocab-size", "259", "--quiet"});
    return run(more);
  }
};

// They are read for both parts of the corpus, and are in neither.
TEST_F(TokenizeCommandTest, RecordsWithoutTextAreToldOnce) {
  {
    std::ofstream records(path("records.jsonl"));
    for (int i = 0; i < 40; ++i) records << R"({"text": "the cat sat on the mat, number )" << i << "\"}\n";
    records << "{\"text\": \"\"}\n{\"text\": null}\n";
  }
  ASSERT_EQ(run({path("records.jsonl"), "--vocab-size", "259", "--tokenizer", path("tokenizer.json"), "--output",
                 path("train"), "--validation-fraction", "0.2", "--quiet"}),
            0)
      << error_;
  EXPECT_TRUE(std::filesystem::exists(path("train-validation.bin")));
  EXPECT_THAT(error_, HasSubstr("2 records have no text (null or empty) and were left out"));
  EXPECT_EQ(error_.find("have no text"), error_.rfind("have no text"));
}

TEST_F(TokenizeCommandTest, NothingIsWrittenIntoALivingRunsFolder) {
  const FolderLock lock(path("run"));
  const auto in_use = AllOf(HasSubstr(path("run") + " is in use by process " + std::to_string(::getpid())),
                            HasSubstr("choose another output"));
  EXPECT_EQ(train_with({"--tokenizer", path("tokenizer.json"), "--output", path("run/data/train")}), 1);
  EXPECT_THAT(error_, in_use);
  EXPECT_EQ(train_with({"--tokenizer", path("run/tokenizer.json")}), 1);
  EXPECT_THAT(error_, in_use);
  EXPECT_FALSE(std::filesystem::exists(path("tokenizer.json"))) << "before any work";
  EXPECT_EQ(train_with({"--tokenizer", path("tokenizer.json")}), 0) << error_;
}

TEST_F(TokenizeCommandTest, ShowsIdsAndTokens) {
  ASSERT_EQ(run({path("*.txt"), "--vocab-size", "259", "--tokenizer", path("tokenizer.json"), "--quiet"}), 0) << error_;
  ASSERT_EQ(run({"--show", "at\n\"é<|endoftext|>", "--tokenizer", path("tokenizer.json")}), 0) << error_;
  const auto tokenizer = data::BpeTokenizer::load(path("tokenizer.json"));
  const auto id = [&](const char* token) { return fmt::format("{:>8}", *tokenizer.id_of(token)); };
  EXPECT_EQ(out_, id("at") + "  \"at\"\n" + id("\n") + "  \"\\n\"\n" + id("\"") + "  \"\\\"\"\n" + id("\xC3") +
                      "  \"\\xC3\"\n" + id("\xA9") + "  \"\\xA9\"\n" + id("<|endoftext|>") +
                      "  \"<|endoftext|>\"  special\n6 tokens, 19 bytes; vocabulary of 259; a document ends with 0 "
                      "(\"<|endoftext|>\")\n");
  EXPECT_EQ(run({"--show", "a"}), 2);
  EXPECT_THAT(error_, HasSubstr("--tokenizer FILE is missing"));
  EXPECT_EQ(run({"x.txt", "--show", "a", "--tokenizer", path("tokenizer.json")}), 2);
  EXPECT_THAT(error_, HasSubstr("--show TEXT takes neither inputs nor"));
}

TEST_F(TokenizeCommandTest, TrainsEncodesAndSetsAside) {
  ASSERT_EQ(run({path("*.txt"), "--vocab-size", "270", "--tokenizer", path("new/tokenizer.json"),
                 "--output=" + path("ids/all"), "--validation-fraction", "0.2", "--quiet"}),
            0)
      << error_;
  const auto tokenizer = data::BpeTokenizer::load(path("new"));
  EXPECT_EQ(tokenizer.vocab_size(), 270);
  const data::TokenFile train(path("ids/all"), {.vocab_size = 270});
  const data::TokenFile validation(path("ids/all-validation"), {.vocab_size = 270});
  EXPECT_EQ(train.document_count() + validation.document_count(), 20);
  EXPECT_EQ(validation.document_count(), 4);
  EXPECT_THAT(out_, AllOf(HasSubstr("20 text files"), HasSubstr("270 ids"), HasSubstr("bytes/token"),
                          HasSubstr("unigram entropy"), HasSubstr("all-validation.bin")));
  EXPECT_EQ(error_, "");

  // With the existing tokenizer: the same ids again, all in one file.
  ASSERT_EQ(
      run({path("corpus3.txt"), "--tokenizer", path("new/tokenizer.json"), "-o", path("one"), "--no-end-of-text"}), 0);
  const data::TokenFile one(path("one"));
  std::vector<std::int64_t> ids(static_cast<std::size_t>(one.size()));
  one.read(0, ids);
  EXPECT_EQ(tokenizer.decode(ids), "the cat sat on the mat, number 3\n");
  EXPECT_THAT(error_, HasSubstr("tokenizing"));  // progress
}

TEST_F(TokenizeCommandTest, PutsTheTokensOfTheTemplateAroundDocuments) {
  const data::BpeTokenizer plain = data::small_tokenizer("the cat sat on the mat");
  const data::BpeTokenizer tokenizer = data::with_template(plain, {*plain.id_of("B")}, {});
  tokenizer.save(path("tokenizer.json"));
  const auto text_of = [&](const std::string& prefix) {
    const data::TokenFile file(path(prefix));
    std::vector<std::int64_t> ids(static_cast<std::size_t>(file.size()));
    file.read(0, ids);
    return tokenizer.decode(ids);
  };
  const std::vector<std::string> command = {path("corpus3.txt"), "--tokenizer", path("tokenizer.json"), "--quiet",
                                            "-o"};
  const auto encode = [&](const std::string& prefix, const std::vector<std::string>& more) {
    std::vector<std::string> words = command;
    words.push_back(path(prefix));
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(run(words), 0) << error_;
    return text_of(prefix);
  };
  EXPECT_EQ(encode("with", {}), "Bthe cat sat on the mat, number 3\n<|endoftext|>");
  EXPECT_THAT(out_,
              HasSubstr("with.bin: each document has what the tokenizer's template puts around a text: B before it\n"));
  EXPECT_EQ(encode("without", {"--no-special-tokens", "--no-end-of-text"}), "the cat sat on the mat, number 3\n");
  EXPECT_THAT(out_, HasSubstr("without.bin: each document is without what the tokenizer's template puts"));
}

TEST_F(TokenizeCommandTest, LeavesOutWhatWasReadBeforeAndShowsLengths) {
  {
    std::ofstream records(path("records.jsonl"));
    for (int i = 0; i < 40; ++i) records << R"({"text": "the cat sat on the mat, number )" << i % 9 << "\"}\n";
  }
  ASSERT_EQ(
      run({path("records.jsonl"), "--vocab-size", "259", "--tokenizer", path("tokenizer.json"), "--output",
           path("train"), "--validation-fraction", "0.2", "--deduplicate", "--histogram", "--threads", "3", "--quiet"}),
      0)
      << error_;
  const data::TokenFile train(path("train")), validation(path("train-validation"));
  EXPECT_EQ(train.document_count(), 7) << "no text is on both sides";
  EXPECT_EQ(validation.document_count(), 2) << "a fifth of the different texts";
  EXPECT_THAT(out_, AllOf(HasSubstr("train.bin: "), HasSubstr("31 texts were read before and are left out"),
                          HasSubstr("16 -         31"), HasSubstr("####")));
  EXPECT_EQ(run({path("records.jsonl"), "--vocab-size", "259", "--tokenizer", path("t.json"), "--deduplicate"}), 2);
  EXPECT_THAT(error_, HasSubstr("--deduplicate is of the token files: give --output PREFIX too"));
  EXPECT_EQ(run({path("records.jsonl"), "--tokenizer", path("tokenizer.json"), "-o", path("x"), "--threads", "0"}), 2);
  EXPECT_THAT(error_, HasSubstr("--threads is 0"));
}

TEST_F(TokenizeCommandTest, WhatIsThereIsReplacedByForceOnly) {
  const Arguments both = {path("*.txt"), "--vocab-size", "270", "--tokenizer", path("t.json"), "-o", path("ids"), "-q"};
  ASSERT_EQ(run(both), 0) << error_;
  const auto tokens = read_file(path("ids.bin")), tokenizer = read_file(path("t.json"));
  const data::TokenFile file(path("ids"));
  EXPECT_EQ(file.sidecar()->tokenizer, data::tokenizer_fingerprint(data::BpeTokenizer::load(path("t.json"))));
  EXPECT_EQ(file.sidecar()->vocab_size, 270);

  Arguments other = both;
  other[2] = "265";
  EXPECT_EQ(run(other), 1);
  EXPECT_THAT(error_, AllOf(HasSubstr("t.json, "), HasSubstr("ids.bin, "), HasSubstr("ids.idx, "),
                            HasSubstr("ids.json exist already: give --force to replace them")));
  EXPECT_EQ(out_, "");                                                                         // before any work
  EXPECT_EQ(run({path("*.txt"), "--tokenizer", path("t.json"), "-o", path("ids"), "-q"}), 1);  // only read
  EXPECT_THAT(error_, Not(HasSubstr("t.json")));
  std::ofstream(path("new-validation.idx")) << "somebody's";
  EXPECT_EQ(run({path("*.txt"), "--tokenizer", path("t.json"), "-o", path("new"), "--validation-fraction", "0.2"}), 1);
  EXPECT_THAT(error_, HasSubstr("new-validation.idx exists already"));
  EXPECT_EQ(read_file(path("ids.bin")), tokens);
  EXPECT_EQ(read_file(path("t.json")), tokenizer);

  other.push_back("--force");
  EXPECT_EQ(run(other), 0) << error_;
  EXPECT_EQ(data::TokenFile(path("ids")).sidecar()->vocab_size, 265);

  std::ofstream(path("mine.json")) << "{\"text\": \"mine\"}";
  EXPECT_EQ(run({path("*.txt"), "--tokenizer", path("t.json"), "-o", path("mine"), "--force"}), 1);
  EXPECT_THAT(error_, HasSubstr("mine.json exists and is no description of a token file"));
  EXPECT_EQ(run({path("*.txt"), "--tokenizer", path("t.json"), "-o", path("t"), "--force"}), 2);
  EXPECT_THAT(error_, HasSubstr("t.json is the tokenizer too"));
}

TEST_F(TokenizeCommandTest, AStoppedCommandGoesOnBesideWhatItHasMade) {
  const Arguments command = {path("*.txt"), "--vocab-size",          "270", "--tokenizer", path("t.json"), "-o",
                             path("ids"),   "--validation-fraction", "0.2", "-q"};
  ASSERT_EQ(run(command), 0) << error_;
  const std::string ids = read_file(path("ids.bin")), aside = read_file(path("ids-validation.bin"));
  // As if it was stopped after it had trained the tokenizer and set text aside.
  const auto stop = [&](const std::string& set_aside) {
    for (const char* ending : {".bin", ".idx", ".json"}) std::filesystem::remove(path(std::string("ids") + ending));
    write_file(path("ids.bin.tmp"), "ids");
    data::UnfinishedTokens unfinished(
        path("ids"),
        {.identity = "of this command",
         .tokenizer = data::tokenizer_fingerprint(data::BpeTokenizer::load(path("t.json"))),
         .set_aside = set_aside},
        posix_file_system());
    unfinished.begin();
    unfinished.add(std::vector<std::int32_t>{1}, data::TokenType::u16);
  };
  stop(data::read_sidecar(path("ids-validation.bin"))->content);
  ASSERT_EQ(run(command), 0) << error_;
  EXPECT_EQ(read_file(path("ids.bin")), ids);
  EXPECT_EQ(read_file(path("ids-validation.bin")), aside);
  for (const char* left : {"ids.unfinished", "ids.bin.tmp"}) EXPECT_FALSE(std::filesystem::exists(path(left))) << left;
  // What was set aside of another text is somebody else's.
  stop("of another text");
  EXPECT_EQ(run(command), 1);
  EXPECT_THAT(error_, AllOf(HasSubstr("ids-validation.bin"), HasSubstr("give --force")));
  std::filesystem::remove(path("ids.unfinished"));
  EXPECT_EQ(run(command), 1);
  EXPECT_THAT(error_, AllOf(HasSubstr("t.json"), HasSubstr("ids-validation.bin")));
}

TEST_F(TokenizeCommandTest, WhatWasSetAsideBeforeIsNotKeptBesideItsText) {
  const Arguments whole = {path("*.txt"),  "--vocab-size", "270",       "--tokenizer",
                           path("t.json"), "-o",           path("ids"), "-q"};
  Arguments split = whole, again = whole;
  split.insert(split.end(), {"--validation-fraction", "0.3"});
  ASSERT_EQ(run(split), 0) << error_;
  EXPECT_EQ(run(whole), 1);
  EXPECT_THAT(error_, HasSubstr("ids-validation.bin exist already: give --force"));
  again.push_back("--force");
  EXPECT_EQ(run(again), 0) << error_;
  EXPECT_THAT(error_, HasSubstr("ids-validation.bin, .idx and .json are removed"));
  for (const char* file : {"ids-validation.bin", "ids-validation.idx", "ids-validation.json"})
    EXPECT_FALSE(std::filesystem::exists(path(file))) << file;

  // A file that was made on its own belongs to the user.
  const Arguments own = {path("corpus1.txt"), "--tokenizer", path("t.json"), "-o", path("ids-validation"), "-q"};
  ASSERT_EQ(run(own), 0) << error_;
  EXPECT_EQ(run(again), 0) << error_;
  EXPECT_THAT(error_, Not(HasSubstr("removed")));
  EXPECT_TRUE(std::filesystem::exists(path("ids-validation.bin")));
}

TEST_F(TokenizeCommandTest, SpecialTokensInTextsAreSaid) {
  std::ofstream(path("chat.jsonl")) << "{\"text\": \"a <|endoftext|> b\"}\n{\"text\": \"plain\"}\n";
  EXPECT_EQ(run({path("chat.jsonl"), "--vocab-size", "270", "--tokenizer", path("t.json"), "-o", path("ids"), "-q"}),
            0);
  EXPECT_THAT(error_,
              AllOf(HasSubstr("special tokens of the tokenizer stand in 1 of 2 texts, such as '<|endoftext|>' in"),
                    HasSubstr("chat.jsonl"), HasSubstr("as ordinary text")));
}

TEST_F(TokenizeCommandTest, TooLittleTextIsSaid) {
  EXPECT_EQ(run({path("corpus1.txt"), "--vocab-size", "5000", "--tokenizer", path("t.json"), "-q"}), 0);
  EXPECT_THAT(error_, AllOf(HasSubstr("5000 were asked for"), HasSubstr("--vocab-size")));
}

TEST_F(TokenizeCommandTest, WhatIsReadBelowADirectoryOrByAnotherNameIsNotWrittenOver) {
  ASSERT_EQ(run({path("corpus1.txt"), "--vocab-size", "257", "--tokenizer", path("t.json"), "-q"}), 0);
  std::filesystem::create_directory(path("below"));
  std::ofstream(path("below/ids.bin")) << "a text that ends in .bin";
  EXPECT_EQ(run({path("below"), "--tokenizer", path("t.json"), "-o", path("below/ids"), "--force"}), 2);
  EXPECT_THAT(error_, AllOf(HasSubstr("ids.bin is an input too"), HasSubstr("--exclude")));
  std::filesystem::create_hard_link(path("corpus2.txt"), path("linked.bin"));
  EXPECT_EQ(run({path("corpus2.txt"), "--tokenizer", path("t.json"), "-o", path("linked"), "--force"}), 2);
  EXPECT_THAT(error_, HasSubstr("linked.bin is an input too"));
  EXPECT_EQ(read_file(path("corpus2.txt")), "the cat sat on the mat, number 2\n");
}

TEST_F(TokenizeCommandTest, TextOfAnotherEncodingIsSaid) {
  ASSERT_EQ(run({path("corpus1.txt"), "--vocab-size", "257", "--tokenizer", path("t.json"), "-q"}), 0);
  std::ofstream(path("latin1.txt")) << "caf\xe9 au lait, as Latin-1 has it";
  ASSERT_EQ(run({path("corpus1.txt"), path("latin1.txt"), "--tokenizer", path("t.json"), "-o", path("ids"), "-q"}), 0);
  EXPECT_THAT(error_, AllOf(HasSubstr("1 of 2 texts are not UTF-8 throughout, such as " + path("latin1.txt")),
                            HasSubstr("iconv")));
}

TEST_F(TokenizeCommandTest, OtherTokenizersAreNamed) {
  std::ofstream(path("tokenizer.model")) << "\x0a\x0e\x0a\x05<unk>";
  std::ofstream(path("gpt.tiktoken")) << "IQ== 0\n";
  std::filesystem::create_directory(path("slow"));
  std::ofstream(path("slow/vocab.json")) << "{}";
  for (const auto& [place, text] : {std::pair{"tokenizer.model", "is a SentencePiece model"},
                                    {"gpt.tiktoken", "is a vocabulary of tiktoken"},
                                    {"slow", "there is no tokenizer"}}) {
    EXPECT_EQ(run({"--show", "a", "--tokenizer", path(place)}), 1);
    EXPECT_THAT(error_, AllOf(HasSubstr(text), HasSubstr("save_pretrained")));
  }
}

TEST_F(TokenizeCommandTest, HelpHasAnExample) {
  EXPECT_EQ(run({"--help"}), 0);
  EXPECT_THAT(out_, AllOf(HasSubstr("usage: phalanx tokenize INPUT..."), HasSubstr("--validation-fraction 0.1")));
}

TEST_F(TokenizeCommandTest, WrongInputIsOneErrorAndTheRightStatus) {
  const std::string text = path("corpus1.txt"), tokenizer = path("t.json");
  ASSERT_EQ(run({text, "--vocab-size", "257", "--tokenizer", tokenizer, "-q"}), 0);
  std::ofstream(path("bad.json")) << "{\"model\": {\"type\": \"Unigram\"}}";
  struct Case {
    Arguments arguments;
    int status;
    std::string message;
  };
  const std::vector<Case> cases = {
      {{}, 2, "expected at least one input"},
      {{text}, 2, "--tokenizer FILE is missing"},
      {{text, "--tokenizer", tokenizer}, 2, "nothing to do"},
      {{text, "--tokenizer", tokenizer, "--outptu", "x"}, 2, "--outptu"},
      {{text, "--tokenizer", tokenizer, "--vocab-size", "many"}, 2, "--vocab-size"},
      {{text, "--tokenizer", tokenizer, "-o", "x", "--validation-fraction", "1.5"}, 2, "--validation-fraction is 1.5"},
      {{text, "--tokenizer", tokenizer, "--vocab-size", "300", "--min-frequency", "0"}, 2, "--min-frequency is 0"},
      {{text, "--tokenizer", tokenizer, "--vocab-size", "100", "--force"}, 2, "vocab_size is 100: expected 257"},
      {{path("none.txt"), "--tokenizer", tokenizer, "-o", path("x")}, 1, "none.txt: no such file"},
      {{text, "--tokenizer", path("none.json"), "-o", path("x")}, 1, "none.json"},
      {{text, "--tokenizer", path("bad.json"), "-o", path("x")}, 1, "bad.json: model.type: 'Unigram' is not supported"},
      {{text, "--tokenizer", tokenizer, "-o", path("corpus2.txt/x")}, 1, "corpus2.txt"},
      {{text, "--tokenizer", tokenizer, "-o", path("x"), "--validation-fraction", "0.1"}, 2, "leaves no document"},
      {{text, "--tokenizer", tokenizer, "-o", path("x"), "--min-frequency", "3"}, 2, "give --vocab-size too"},
      {{text, "--tokenizer", tokenizer, "-o", path("x"), "--field", "body"}, 2, "--field body: no input holds records"},
      {{text, "--tokenizer", tokenizer, "-o", path("x.bin")}, 2, "without the ending"},
      {{text, "--tokenizer", tokenizer, "-o", path("x") + "/"}, 2, "is a directory: expected the beginning"},
      {{text, "--tokenizer", tokenizer, "-o", path("")}, 2, "is a directory: expected the beginning"},
      {{"-", "-", "--tokenizer", tokenizer, "-o", path("x")}, 2, "standard input) is given twice"},
      {{"--show", "a", "--tokenizer", tokenizer, "--force"}, 2, "--force has no meaning beside --show"},
  };
  for (const Case& test : cases) {
    EXPECT_EQ(run(test.arguments), test.status) << test.message;
    EXPECT_THAT(error_, AllOf(HasSubstr("phalanx tokenize: "), HasSubstr(test.message)));
    EXPECT_EQ(out_.find("terminate"), std::string::npos);
    EXPECT_FALSE(std::filesystem::exists(path("x.bin")));
  }
}

}  // namespace
}  // namespace phalanx::cli
