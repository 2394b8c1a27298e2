// `phalanx generate` and `phalanx eval` on several ranks, as a user runs them: the same results with every layout,
// resumed jobs, and refused inputs.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/file.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

class GenerateCommandTest : public program_testing::FolderSuite<GenerateCommandTest> {
 protected:
  /// A model for all tests: a small one after a few steps, as a Hugging Face directory.
  static void SetUpTestSuite() {
    make_folder("generate_command");
    program_testing::write_periodic_tokens(file("tokens.bin"));
    write_file(file("run.toml"), program_testing::debug_run(file("tokens.bin")) +
                                     "[checkpoint]\nlast_save_in_hf = true\n[job]\ndump_folder = \"" + file("run") +
                                     "\"\n");
    std::string lines;
    for (int i = 0; i < 9; ++i) {
      lines += nlohmann::json{{"id", "q" + std::to_string(i)}, {"ids", std::vector<int>(1 + 5 * i % 13, 3 + 11 * i)}}
                   .dump() +
               "\n";
    }
    write_file(file("prompts.jsonl"), lines);
    EXPECT_EQ(call("train " + file("run.toml") + " --training.steps 3"), 0) << error_;
  }

  static int generate(const std::string& arguments, const std::string& prompts = "prompts.jsonl") {
    return call("generate --checkpoint " + file("run/hf") + " --prompts-file " + file(prompts) +
                " --max-new-tokens 10 --temperature 0.8 --batch-size 2 " + arguments);
  }
};

/// The prompt numbers of the results in a job's parts, with repetitions.
std::multiset<int> results_in(const std::filesystem::path& folder) {
  std::multiset<int> numbers;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!entry.path().filename().string().starts_with("part-")) continue;
    std::istringstream lines(read_file(entry.path()));
    for (std::string line; std::getline(lines, line);) numbers.insert(nlohmann::json::parse(line)["index"].get<int>());
  }
  return numbers;
}

TEST_F(GenerateCommandTest, EveryLayoutGivesWhatOneRankGives) {
  ASSERT_EQ(generate(""), 0) << error_;
  EXPECT_THAT(error_, AllOf(HasSubstr("prefill "), HasSubstr("decode ")));
  const std::string expected = out_;
  EXPECT_THAT(expected, HasSubstr("{\"id\":\"q8\",\"ids\":["));
  for (const char* layout : {"-n 2 --tp 2", "-n 2 --pp 2", "-n 4 --tp 2 --pp 2 --quiet"}) {
    ASSERT_EQ(generate(layout), 0) << layout << error_;
    EXPECT_EQ(out_, expected) << layout;
  }
  // Each rank also loads its part from a run's own checkpoint.
  const auto from_step = [](const std::string& layout) {
    return call("generate --checkpoint " + file("run/checkpoint") + " --prompts-file " + file("prompts.jsonl") +
                " --max-new-tokens 10 --temperature 0.8 --batch-size 2 " + layout);
  };
  for (const char* layout : {"", "-n 4 --tp 2 --pp 2"}) {
    ASSERT_EQ(from_step(layout), 0) << layout << error_;
    EXPECT_EQ(out_, expected) << layout;
  }
  ASSERT_EQ(call("generate --checkpoint " + file("run") + " --prompts-file " + file("prompts.jsonl") +
                 " --max-new-tokens 10 --temperature 0.8 --batch-size 2"),
            0)
      << error_;
  EXPECT_EQ(out_, expected) << "a run's folder stands for its newest step";
  for (const char* layout : {"-n 2", "-n 4 --pp 2"}) {
    const std::string folder = file(std::string("job") + layout[3]);
    ASSERT_EQ(generate(layout + std::string(" --output ") + folder), 0) << layout << error_;
    EXPECT_EQ(read_file(folder + "/results.jsonl"), expected) << layout;
    EXPECT_THAT(error_,
                AllOf(HasSubstr("generating: 9 in "), HasSubstr("results.jsonl: 9 results, 0 prompts skipped")));
    const auto numbers = results_in(folder);
    EXPECT_EQ(numbers.size(), 9u) << "a prompt was answered twice";
    EXPECT_EQ(std::set<int>(numbers.begin(), numbers.end()).size(), 9u);
  }
}

TEST_F(GenerateCommandTest, AJobGoesOnWithoutRepeatingWhatIsThere) {
  const std::string folder = file("stopped");
  ASSERT_EQ(generate("-n 2 --output " + folder + " --final-file all.jsonl"), 0) << error_;
  const std::string expected = read_file(folder + "/all.jsonl");
  // As if the ranks had been killed: rank 0 has one result and another half-written one.
  const std::string part = read_file(folder + "/part-00000.jsonl");
  const std::size_t line = part.find('\n') + 1;
  write_file(folder + "/part-00000.jsonl", part.substr(0, line + 20));
  std::filesystem::remove(folder + "/all.jsonl");
  ASSERT_EQ(generate("--output " + folder + " --final-file all.jsonl"), 0) << error_;
  EXPECT_THAT(error_, HasSubstr(" of 9 prompts are there already"));
  EXPECT_EQ(read_file(folder + "/all.jsonl"), expected);
  EXPECT_EQ(results_in(folder).size(), 9u);
  EXPECT_EQ(generate("--seed 5 --output " + folder), 1);
  EXPECT_THAT(error_, HasSubstr("is the folder of another job: its seed is 0, this one's 5"));
}

TEST_F(GenerateCommandTest, AJobGoesOnWithTheSameWeightsByContent) {
  const std::string folder = file("by_content"), moved = file("moved");
  const auto generate_with = [&](const std::string& model, const std::string& more = "") {
    return call("generate --checkpoint " + model + " --prompts-file " + file("prompts.jsonl") +
                " --greedy --max-new-tokens 2 --output " + folder + more);
  };
  ASSERT_EQ(generate_with(file("run/hf")), 0) << error_;
  const std::string expected = read_file(folder + "/results.jsonl");
  // A copy is the same model, although its path and file times differ.
  std::filesystem::copy(file("run/hf"), moved, std::filesystem::copy_options::recursive);
  ASSERT_EQ(generate_with(moved), 0) << error_;
  EXPECT_THAT(error_, HasSubstr("9 of 9 prompts are there already"));
  EXPECT_EQ(read_file(folder + "/results.jsonl"), expected);
  // The same path with other weights is another model.
  const std::string weights = moved + "/model.safetensors", before = read_file(weights);
  std::string other = before;
  other.back() = static_cast<char>(other.back() ^ 1);
  write_file(weights, other);
  EXPECT_EQ(generate_with(moved), 1);
  EXPECT_THAT(error_,
              AllOf(HasSubstr("is the folder of another job: its weights.hash is \""), HasSubstr("this one's \"")));
  write_file(weights, before);
  // So is the same file with another description, tokenizer or precision.
  const std::string config = read_file(moved + "/config.json");
  auto json = nlohmann::json::parse(config);
  json["max_position_embeddings"] = 48;
  write_file(moved + "/config.json", json.dump());
  EXPECT_EQ(generate_with(moved), 1);
  EXPECT_THAT(error_, HasSubstr("its model_config.max_seq_len is 32, this one's 48"));
  write_file(moved + "/config.json", config);
  EXPECT_EQ(generate_with(moved, " --dtype bfloat16"), 1);
  EXPECT_THAT(error_, HasSubstr("its dtype is \"float32\", this one's \"bfloat16\""));
  // A step of a run: by now the folder may have a newer one.
  EXPECT_EQ(generate_with(file("run/checkpoint")), 1);
  EXPECT_THAT(error_, HasSubstr("its weights.step is null, this one's 3"));
  // A job from a version that compared paths continues, and reports what it could not compare.
  auto old = nlohmann::json::parse(read_file(folder + "/job.json"));
  for (const char* key : {"format", "weights", "model_config", "end_tokens", "prompts_form"}) old.erase(key);
  old["model"] = "/elsewhere";
  old["tokenizer"] = "";
  write_file(folder + "/job.json", old.dump());
  ASSERT_EQ(generate_with(moved), 0) << error_;
  EXPECT_THAT(error_, HasSubstr("job.json: an earlier version of Phalanx began this job and did not write end_tokens, "
                                "model_config, prompts_form, weights: not compared"));
  EXPECT_EQ(generate_with(file("run/checkpoint")), 1);
}

TEST_F(GenerateCommandTest, PromptsWithoutTheirFieldAreSkippedInAJob) {
  write_file(file("odd.jsonl"), "{\"unique_id\": 7, \"ids\": [1, 2]}\n{\"unique_id\": 8, \"text\": \"no\"}\n");
  ASSERT_EQ(generate("--allow-skipped --id-field unique_id --output " + file("odd"), "odd.jsonl"), 0) << error_;
  EXPECT_THAT(error_, AllOf(HasSubstr("skipped: " + file("odd.jsonl") + ", line 2: neither \"prompt\""),
                            HasSubstr("1 results, 1 prompts skipped")));
  EXPECT_THAT(read_file(file("odd/results.jsonl")), HasSubstr("{\"unique_id\":7,\"ids\":["));
  EXPECT_EQ(generate("", "odd.jsonl"), 1);
  EXPECT_THAT(error_, HasSubstr("odd.jsonl, line 2: neither \"prompt\" (text) nor \"ids\" (token ids)"));
}

TEST_F(GenerateCommandTest, AJobsFolderIsOneCommandsAtATime) {
  const std::string folder = file("locked");
  const FolderLock other(folder);
  EXPECT_EQ(generate("-n 2 --output " + folder), 1);
  EXPECT_THAT(error_, AllOf(HasSubstr(folder + " is in use by process " + std::to_string(::getpid()) + " on host "),
                            HasSubstr("choose another --output")));
  EXPECT_FALSE(std::filesystem::exists(folder + "/job.json"));
}

TEST_F(GenerateCommandTest, AMalformedPromptLeavesTheOthersAnsweredAndStatusOne) {
  write_file(file("mixed.jsonl"),
             "{\"id\": \"a\", \"ids\": [1, 2]}\n   \n{\"id\": \"b\", \"ids\": [1,\n{\"id\": \"c\", \"ids\": \"x\"}\n"
             "{\"id\": \"d\", \"ids\": [512]}\n{\"id\": \"e\", \"ids\": [3]}\n");
  const auto all_named =
      AllOf(HasSubstr("skipped: " + file("mixed.jsonl") + ", line 3: not valid JSON at column 23"),
            HasSubstr("skipped: " + file("mixed.jsonl") + ", line 4: \"ids\" must be a list"),
            HasSubstr("skipped: " + file("mixed.jsonl") + ", line 5: token 512 is not in the model's"),
            HasSubstr("mixed.jsonl: 2 results, 3 prompts skipped"));
  for (const char* layout : {"", "-n 2 "}) {
    const std::string folder = file(std::string("mixed") + (layout[0] == '-' ? "2" : "1"));
    EXPECT_EQ(generate(layout + ("--final-file mixed.jsonl --output " + folder), "mixed.jsonl"), 1);
    EXPECT_THAT(error_, AllOf(all_named, HasSubstr("mixed.jsonl: 3 prompts were skipped, as told above"))) << layout;
    EXPECT_THAT(read_file(folder + "/mixed.jsonl"), AllOf(HasSubstr("{\"id\":\"a\","), HasSubstr("{\"id\":\"e\",")));
    EXPECT_EQ(generate(layout + ("--allow-skipped --final-file mixed.jsonl --output " + folder), "mixed.jsonl"), 0);
    EXPECT_THAT(error_, AllOf(all_named, HasSubstr("2 of 3 prompts are there already")));
  }
  EXPECT_EQ(generate("--strict --output " + file("strict"), "mixed.jsonl"), 1);
  EXPECT_THAT(error_, HasSubstr("mixed.jsonl, line 3: not valid JSON"));
  EXPECT_FALSE(std::filesystem::exists(file("strict")));
  EXPECT_EQ(generate("--strict --allow-skipped --output x"), 2);
  EXPECT_EQ(generate("--strict"), 2);
  EXPECT_THAT(error_, HasSubstr("--strict is a part of --output DIR"));
}

TEST_F(GenerateCommandTest, WhatCannotBeDoneIsNamed) {
  EXPECT_EQ(generate("-n 2"), 2);
  EXPECT_THAT(error_,
              HasSubstr("2 ranks have 2 copies of the model, whose results need a folder: expected --output DIR"));
  EXPECT_EQ(generate("-n 3 --tp 2"), 2);
  EXPECT_THAT(error_, HasSubstr("3 ranks, but --tp x --pp is 2: expected a multiple of it, such as -n 2"));
  EXPECT_EQ(generate("-n 3 --tp 3"), 2);
  EXPECT_THAT(error_, HasSubstr("--tp = 3 does not fit the model: "));
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "1", 1);
  EXPECT_EQ(generate("-n 2"), 2);
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  EXPECT_THAT(error_, HasSubstr("-n starts ranks, but this process is itself a rank already, from "));
  EXPECT_EQ(generate("--tp 0"), 2);
  EXPECT_THAT(error_, HasSubstr("--tp is 0: expected 1 or more"));
  EXPECT_EQ(generate("--repetition-penalty 0"), 2);
  EXPECT_THAT(error_, HasSubstr("repetition_penalty is 0"));
  EXPECT_EQ(generate("--cache-memory much"), 2);
  EXPECT_THAT(error_, HasSubstr("--cache-memory"));
  EXPECT_EQ(generate("--cache-memory 1K"), 1);
  EXPECT_THAT(error_, HasSubstr("and cache_bytes allows 1.00 KiB"));
  EXPECT_EQ(generate("--final-file a/b --output x"), 2);
  EXPECT_THAT(error_, HasSubstr("--final-file is 'a/b': expected the name of a file in the folder"));
  EXPECT_EQ(generate("--dtype float23"), 2);
  EXPECT_THAT(error_, HasSubstr("--dtype"));
  write_file(file("wrong.jsonl"), "{\"id\": \"a\", \"ids\": [1]}\n{\"id\": \"b\", \"ids\": [512]}\n");
  EXPECT_EQ(generate("-n 2 --output " + file("wrong"), "wrong.jsonl"), 1);
  EXPECT_THAT(error_, HasSubstr("wrong.jsonl, line 2: token 512 is not in the model's vocabulary of 512"));
}

TEST_F(GenerateCommandTest, RanksThatWereGivenOtherArgumentsAreAllTold) {
  write_file(file("rank.sh"), "exec " + program_testing::program() + " generate --checkpoint " + file("run/hf") +
                                  " --prompts-file " + file("prompts.jsonl") +
                                  " --tp 2 --max-new-tokens $((4 + RANK))\n");
  EXPECT_EQ(call("launch -n 2 -- sh " + file("rank.sh")), 2);
  EXPECT_THAT(error_, AllOf(HasSubstr("the ranks do not have the same command"),
                            HasSubstr("argument 08: \"4\" on rank 0; \"5\" on rank 1")));
}

// Only the first reader of a pipe gets its data.
TEST_F(GenerateCommandTest, APipeOfPromptsOrTextIsForOneRank) {
  ASSERT_EQ(::mkfifo(file("pipe").c_str(), 0600), 0);
  const std::string model = " -n 2 --checkpoint " + file("run/hf") + " ";
  for (const std::string& command :
       {"generate --tp 2" + model + "--prompts-file ", "eval" + model + "--text ", "eval" + model + "--choices "}) {
    EXPECT_EQ(call(command + file("pipe")), 1);
    EXPECT_THAT(error_, HasSubstr(file("pipe") + " is a pipe, and each rank reads it for itself"));
  }
}

// The ranks have different files under the same names, as on different nodes.
TEST_F(GenerateCommandTest, RanksWithOtherFilesAreAllTold) {
  ASSERT_EQ(call("train " + file("run.toml") + " --training.steps 4 --job.dump_folder " + file("longer")), 0) << error_;
  const auto on_ranks = [&](const std::string& name, const std::string& command) {
    for (const char* rank : {"0", "1"}) {
      const std::filesystem::path folder = file(name) + rank;
      std::filesystem::create_directories(folder);
      const bool other = *rank == '1';
      std::filesystem::copy(file(name == "step" && other ? "longer" : "run"), folder / "run",
                            std::filesystem::copy_options::recursive);
      for (const char* one : {"tokens.bin", "prompts.jsonl"}) {
        std::string contents = read_file(file(one));
        if (name == one && other) contents.replace(contents.rfind('3'), 1, "2");
        if (name == "missing" && other) continue;
        write_file(folder / one, contents);
      }
    }
    write_file(file("rank.sh"),
               "cd " + file(name) + "$RANK && exec " + program_testing::program() + " " + command + "\n");
    EXPECT_NE(call("launch -n 2 -- sh " + file("rank.sh")), 0);
    return error_;
  };
  const std::string eval = "eval --checkpoint run/checkpoint --tokens tokens.bin --seq-len 32 --quiet",
                    generate = "generate --checkpoint run/hf --prompts-file prompts.jsonl --max-new-tokens 2 --tp 2";
  EXPECT_THAT(on_ranks("step", eval), AllOf(HasSubstr("the ranks do not have the same model:"),
                                            HasSubstr("weights.step: 3 on rank 0; 4 on rank 1")));
  EXPECT_THAT(on_ranks("tokens.bin", eval),
              AllOf(HasSubstr("the ranks do not have the same data:"), HasSubstr("content: ")));
  EXPECT_THAT(on_ranks("missing", eval), HasSubstr("rank 1: "));
  EXPECT_THAT(on_ranks("prompts.jsonl", generate),
              AllOf(HasSubstr("the ranks do not have the same prompts and tokenizer:"), HasSubstr("prompts: ")));
}

// The shapes are the same, but the results would differ.
TEST_F(GenerateCommandTest, AConfigJsonThatWasChangedAfterTheExportIsRefused) {
  std::filesystem::copy(file("run/hf"), file("changed"));
  auto config = nlohmann::json::parse(read_file(file("changed/config.json")));
  config["rope_theta"] = 777.0;
  write_file(file("changed/config.json"), config.dump());
  for (const std::string& command : {"generate --max-new-tokens 2 --prompts-file " + file("prompts.jsonl"),
                                     "eval --max-tokens 40 --tokens " + file("tokens.bin")}) {
    EXPECT_EQ(call(command + " --checkpoint " + file("changed")), 1) << command;
    EXPECT_THAT(error_, AllOf(HasSubstr("rope.theta: the weights were saved with 10000.0, this model has 777.0"),
                              HasSubstr("--allow-model-mismatch")));
    EXPECT_EQ(call(command + " --allow-model-mismatch --checkpoint " + file("changed")), 0) << error_;
    EXPECT_THAT(error_, HasSubstr("rope.theta"));
  }
}

TEST_F(GenerateCommandTest, EvalGivesTheSamePerplexityInEveryLayout) {
  const std::string eval = "eval --checkpoint " + file("run/hf") + " --tokens " + file("tokens.bin") +
                           " --seq-len 32 --json " + file("figures.json") + " ";
  ASSERT_EQ(call(eval + "--max-tokens 700"), 0) << error_;
  const std::string expected = out_;
  EXPECT_THAT(expected, AllOf(HasSubstr("tokens: 699  loss: "), HasSubstr("  perplexity: ")));
  const auto figures = nlohmann::json::parse(read_file(file("figures.json")));
  EXPECT_NEAR(figures["perplexity"].get<double>(), std::exp(figures["loss"].get<double>()), 1e-9);
  EXPECT_LT(figures["loss"].get<double>(), std::log(512.0));  // it has learned something
  for (const char* layout : {"-n 2", "-n 2 --tp 2", "-n 2 --pp 2", "-n 4 --pp 2 --batch-size 3"}) {
    ASSERT_EQ(call(eval + "--max-tokens 700 " + layout), 0) << layout << error_;
    EXPECT_EQ(out_, expected) << layout;
  }
  // With more context before each token: another loss over as many tokens.
  ASSERT_EQ(call(eval + "--max-tokens 700 --stride 8"), 0) << error_;
  EXPECT_THAT(out_, HasSubstr("tokens: 699  loss: "));
  EXPECT_NE(out_, expected);
}

// Prompt i of seed N and prompt i - 1 of seed N + 1 are different draws.
TEST_F(GenerateCommandTest, PromptsOfNeighbouringSeedsDoNotShareTheirDraws) {
  std::string lines;
  for (int i = 0; i < 4; ++i) lines += "{\"ids\": [3, 14]}\n";
  write_file(file("same.jsonl"), lines);
  std::vector<std::string> texts;
  for (const char* seed : {"0", "1", "2"}) {
    ASSERT_EQ(generate(std::string("--seed ") + seed, "same.jsonl"), 0) << error_;
    std::istringstream results(out_);
    for (std::string line; std::getline(results, line);) texts.push_back(nlohmann::json::parse(line)["ids"].dump());
  }
  EXPECT_EQ(texts.size(), 12U);
  EXPECT_EQ(std::set<std::string>(texts.begin(), texts.end()).size(), 12U);
}

// A tokenizer whose template puts a token before a text, after it, or neither.
TEST_F(GenerateCommandTest, EvalScoresWhatTheTokenizerMakesOfATextAndChoicesWithoutWhatItPutsBehindThem) {
  write_file(file("cat.txt"), "the cat sat on the mat. the cat sat on the hat. ");
  ASSERT_EQ(call("tokenize " + file("cat.txt") + " --vocab-size 270 --tokenizer " + file("plain.json")), 0) << error_;
  auto json = nlohmann::json::parse(read_file(file("plain.json")));
  const nlohmann::json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const nlohmann::json end = {{"SpecialToken", {{"id", "<|endoftext|>"}, {"type_id", 0}}}};
  const nlohmann::json tokens = {
      {"<|endoftext|>", {{"id", "<|endoftext|>"}, {"ids", {0}}, {"tokens", {"<|endoftext|>"}}}}};
  const auto with_template = [&](const std::string& name, const std::vector<nlohmann::json>& single) {
    json["post_processor"] = {{"type", "TemplateProcessing"}, {"single", single}, {"special_tokens", tokens}};
    write_file(file(name), json.dump());
  };
  with_template("suffix.json", {text, end});
  with_template("prefix.json", {end, text});
  write_file(file("cats.jsonl"),
             "{\"prompt\": \"the cat\", \"choices\": [\" sat\", \" on\"], \"answer\": 0}\n"
             "{\"prompt\": \"\", \"choices\": [\"the\", \"on\"]}\n");
  const auto eval = [&](const std::string& tokenizer, const std::string& more) {
    EXPECT_EQ(call("eval --checkpoint " + file("run/hf") + " --tokenizer " + file(tokenizer) + " " + more), 0)
        << error_;
    return out_;
  };
  const auto scores = [&](const std::string& tokenizer) {
    eval(tokenizer, "--choices " + file("cats.jsonl") + " --output " + file("cats.out"));
    return read_file(file("cats.out"));
  };
  EXPECT_EQ(scores("suffix.json"), scores("plain.json"));
  EXPECT_NE(scores("prefix.json"), scores("plain.json"));
  // As many tokens are predicted as in transformers: without a token before it, the first one is not.
  const auto count = [&](const std::string& tokenizer, const std::string& more = "") {
    eval(tokenizer, "--text " + file("cat.txt") + " --json " + file("cat.out") + " " + more);
    return nlohmann::json::parse(read_file(file("cat.out")))["tokens"].get<int>();
  };
  const int plain = count("plain.json");
  EXPECT_EQ(count("suffix.json"), plain + 1);
  EXPECT_EQ(count("prefix.json"), plain + 1);
  const auto with_prefix = read_file(file("cat.out"));
  EXPECT_EQ(count("plain.json", "--end-token-first"), plain + 1);
  EXPECT_EQ(read_file(file("cat.out")), with_prefix);
  EXPECT_EQ(call("eval --checkpoint " + file("run/hf") + " --tokenizer " + file("prefix.json") + " --text " +
                 file("cat.txt") + " --end-token-first"),
            2);
  EXPECT_THAT(error_, HasSubstr("puts a token of its own before a text already"));
}

TEST_F(GenerateCommandTest, EvalAnswersQuestions) {
  std::string text;
  for (int i = 0; i < 400; ++i)
    text += "question " + std::to_string(i % 10) + " has the answer " + std::to_string(i % 7) + ".\n";
  write_file(file("text.txt"), text);
  ASSERT_EQ(call("tokenize " + file("text.txt") + " --vocab-size 300 --tokenizer " + file("tokenizer.json") +
                 " --output " + file("train")),
            0)
      << error_;
  write_file(file("questions.jsonl"),
             "{\"prompt\": \"question 1 has the \", \"choices\": [\"answer\", \"question\", \"has\"], \"answer\": 0}\n"
             "{\"id\": \"x\", \"prompt\": \"\", \"choices\": [\"question\", \"the\"], \"answer\": 1}\n");
  const std::string eval = "eval --checkpoint " + file("run/hf") + " --tokenizer " + file("tokenizer.json");
  const std::string choices = eval + " --choices " + file("questions.jsonl") + " --output " + file("answers.jsonl");
  ASSERT_EQ(call(choices), 0) << error_;
  const std::string expected = out_;
  EXPECT_THAT(expected, AllOf(HasSubstr("questions: 2  accuracy: "), HasSubstr("accuracy by byte: ")));
  // The answers follow from the log-likelihoods.
  std::istringstream lines(read_file(file("answers.jsonl")));
  std::string line;
  int right = 0;
  for (const int answer : {0, 1}) {
    ASSERT_TRUE(std::getline(lines, line));
    const auto json = nlohmann::json::parse(line);
    const auto scores = json["log_likelihoods"].get<std::vector<double>>();
    EXPECT_EQ(scores.size(), answer == 0 ? 3u : 2u);
    EXPECT_EQ(json["choice"], std::max_element(scores.begin(), scores.end()) - scores.begin());
    EXPECT_LT(scores[0], 0.0);
    right += json["choice"] == answer;
  }
  EXPECT_THAT(expected, HasSubstr(right == 2   ? "accuracy: 1.0000"
                                  : right == 1 ? "accuracy: 0.5000"
                                               : "accuracy: 0.0000"));
  ASSERT_EQ(call(choices + " -n 2 --pp 2"), 0) << error_;
  EXPECT_EQ(out_, expected);
  ASSERT_EQ(call(eval + " --text " + file("text.txt") + " --quiet"), 0) << error_;
  EXPECT_THAT(out_, HasSubstr("  bits per byte: "));

  // A malformed question does not lose the scores of the others.
  write_file(file("spoiled.jsonl"), read_file(file("questions.jsonl")) + "{\"prompt\": 3}\n  \n");
  const std::string spoiled = eval + " --choices " + file("spoiled.jsonl");
  EXPECT_EQ(call(spoiled), 1);
  EXPECT_THAT(out_, AllOf(HasSubstr(expected.substr(0, expected.size() - 1)), HasSubstr("  skipped: 1\n")));
  EXPECT_THAT(error_, AllOf(HasSubstr("skipped: " + file("spoiled.jsonl") + ", line 3: expected \"prompt\", a string"),
                            HasSubstr("spoiled.jsonl: 1 question was skipped, as told above")));
  EXPECT_EQ(call(spoiled + " --allow-skipped"), 0) << error_;
  EXPECT_EQ(call(spoiled + " --strict"), 1);
  EXPECT_EQ(out_, "");

  // Nor does a question with a choice that is too long for the model; the others keep their numbers.
  std::string long_choice;
  for (int i = 0; i < 200; ++i) long_choice += " question";
  write_file(file("long.jsonl"), "{\"prompt\": \"a\", \"choices\": [\"answer\", \"" + long_choice +
                                     "\"], \"answer\": 1}\n" +
                                     "{\"prompt\": \"question 1 has the \", \"choices\": [\"answer\", \"has\"]}\n");
  const std::string with_long = eval + " --choices " + file("long.jsonl") + " --output " + file("long.out");
  EXPECT_EQ(call(with_long), 1);
  EXPECT_THAT(error_, ContainsRegex("skipped: .*long.jsonl, line 1: choice 1 has [0-9]+ tokens: expected at most the "
                                    "model's max_seq_len of [0-9]+"));
  EXPECT_THAT(read_file(file("long.out")), StartsWith("{\"id\":1,"));
  EXPECT_EQ(call(with_long + " --strict"), 1);
  EXPECT_EQ(out_, "");

  const auto refused = [&](const std::string& arguments, int status, const std::string& reason) {
    EXPECT_EQ(call(eval + " " + arguments), status);
    EXPECT_THAT(error_, HasSubstr(reason));
  };
  refused("", 2, "expected one of --text FILE, --tokens FILE and --choices FILE.jsonl");
  refused("--text a --seq-len 8 --stride 9", 2, "--stride is 9: expected at most --seq-len, 8");
  refused("--text a --output b", 2, "--output is a part of --choices");
  refused("--choices a --stride 2", 2, "--seq-len, --stride and --max-tokens are for --text and --tokens");
  refused("--text " + file("text.txt") + " --seq-len 100000", 2, "--seq-len is 100000: the model's max_seq_len is");
  refused("--text " + file("no.txt"), 1, file("no.txt"));
  write_file(file("one.txt"), "");
  refused("--text " + file("one.txt"), 1, "tokens: expected at least 2");
}

}  // namespace
}  // namespace phalanx::cli
