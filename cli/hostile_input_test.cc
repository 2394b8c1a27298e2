// Input files that are truncated, wrong, contradictory or malicious, with the whole program. Each must give one error
// that names the file and the reason, a nonzero status, no crash, and no more memory than a valid model. Each parser
// has its own tests and fuzzing (tests/fuzz) for each kind of damage.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

using nlohmann::json;

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

struct Told {
  int status;  // 128 and above: ended by a signal
  std::string out, err;
  double peak_mib;  // peak of the largest process
};

Told call(const std::filesystem::path& folder, const std::vector<std::string>& arguments) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "phalanx";
  std::vector<const char*> argv{program.c_str()};
  for (const auto& argument : arguments) argv.push_back(argument.c_str());
  argv.push_back(nullptr);
  const std::string out = folder / "out", err = folder / "err";
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit no_core{0, 0}, a_minute{60, 60};
    ::setrlimit(RLIMIT_CORE, &no_core);
    ::setrlimit(RLIMIT_CPU, &a_minute);  // a signal ends an endless loop
    ::dup2(::open("/dev/null", O_RDONLY), 0);
    ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 1);
    ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
    ::execv(program.c_str(), const_cast<char* const*>(argv.data()));
    ::_exit(127);
  }
  int status = 0;
  rusage usage{};
  EXPECT_EQ(::wait4(child, &status, 0, &usage), child);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out), read_file(err),
          static_cast<double>(usage.ru_maxrss) / 1024};
}

/// A file of the model and its replacement. An empty reason: only check that there is one error.
struct Damage {
  std::string file, content, reason;
};

class HostileInputTest : public ::testing::Test {
 protected:
  /// A valid model, made once: a small one after one step, with a tokenizer.
  static void SetUpTestSuite() {
    folder_ = new TempDirectory("hostile_input");
    std::string tokens, text;
    for (int i = 0; i < 2000; ++i) tokens += {static_cast<char>(i * 7), static_cast<char>(i % 2)};
    for (int i = 0; i < 200; ++i) text += fmt::format("question {} has the answer {}.\n", i % 10, i % 7);
    write_file(at("tokens.bin"), tokens);
    write_file(at("text.txt"), text);
    write_file(at("run.toml"), fmt::format("[job]\ndump_folder = \"{}\"\n[model]\nflavor = \"debug\"\n[training]\n"
                                           "dataset_path = \"{}\"\nseq_len = 32\nlocal_batch_size = 2\nsteps = 1\n"
                                           "[checkpoint]\nlast_save_in_hf = true\n",
                                           at("run"), at("tokens.bin")));
    write_file(at("sound.jsonl"), "{\"id\": \"a\", \"ids\": [1, 2, 3]}\n{\"id\": \"b\", \"prompt\": \"the answer\"}\n");
    const Told trained = call(folder_->path(), {"train", at("run.toml")});
    ASSERT_EQ(trained.status, 0) << trained.err;
    const Told tokenized = call(folder_->path(), {"tokenize", at("text.txt"), "--vocab-size", "300", "--tokenizer",
                                                  at("run/hf/tokenizer.json"), "--output", at("train")});
    ASSERT_EQ(tokenized.status, 0) << tokenized.err;
    const Told sound = call(folder_->path(), generate(at("run/hf"), at("sound.jsonl")));
    ASSERT_EQ(sound.status, 0) << sound.err;
    peak_of_sound_ = sound.peak_mib;
  }
  static void TearDownTestSuite() { delete folder_; }

  static std::string at(const std::string& name) { return (folder_->path() / name).string(); }
  static std::string sound(const std::string& name) { return read_file(at("run/hf/" + name)); }
  static std::string model() { return at("model"); }  // the damaged model

  static std::vector<std::string> generate(const std::string& checkpoint, const std::string& prompts) {
    return {"generate", "--checkpoint", checkpoint, "--prompts-file", prompts, "--max-new-tokens", "4"};
  }

  /// Makes a copy of the valid model with other files.
  static void make_model(const std::vector<Damage>& files) {
    std::filesystem::remove_all(model());
    std::filesystem::copy(at("run/hf"), model());
    for (const Damage& damage : files) write_file(model() + "/" + damage.file, damage.content);
  }

  static void expect_one_error(const std::vector<std::string>& arguments, const std::string& named,
                               const std::string& reason) {
    const Told told = call(folder_->path(), arguments);
    EXPECT_THAT(told.status, AnyOf(1, 2)) << told.err;
    EXPECT_THAT(told.err, AllOf(HasSubstr(named), HasSubstr(reason), Not(HasSubstr("terminate called"))));
    const std::string first = "phalanx " + arguments[0] + ": ";
    const auto begin = told.err.find(first);
    EXPECT_NE(begin, std::string::npos) << told.err;
    EXPECT_EQ(told.err.find(first, begin + 1), std::string::npos) << "more than one error: " << told.err;
    EXPECT_LT(told.err.size() - begin, 2500u) << told.err;
    for (const char c : told.err) EXPECT_TRUE(c == '\n' || (c >= ' ' && c <= '~')) << "unprintable: " << told.err;
    EXPECT_LT(told.peak_mib, peak_of_sound_ + 64) << told.err;
  }

  static void expect_refused(const Damage& damage, const std::vector<std::string>& more = {}) {
    SCOPED_TRACE(damage.file + ": " + damage.content.substr(0, 200));
    make_model({damage});
    auto arguments = generate(model(), at("sound.jsonl"));
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_one_error(arguments, model(), damage.reason);
  }

  static TempDirectory* folder_;
  static double peak_of_sound_;
};
TempDirectory* HostileInputTest::folder_ = nullptr;
double HostileInputTest::peak_of_sound_ = 0;

std::string with(const std::string& text, const std::function<void(json&)>& change) {
  json value = json::parse(text);
  change(value);
  return value.dump();
}

std::string with(const std::string& text, const std::string& key, const json& value) {
  return with(text, [&](json& object) { object[key] = value; });
}

std::string safetensors(const std::string& header, const std::string& data, std::uint64_t length) {
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + header + data;
}

/// A safetensors file with a changed header and unchanged data.
std::string with_header(const std::string& file, const std::function<void(json&)>& change) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const std::string header = with(file.substr(8, length), change);
  return safetensors(header, file.substr(8 + length), header.size());
}

const std::string kDeep(200'000, '[');

TEST_F(HostileInputTest, DescriptionsOfModels) {
  const std::string config = sound("config.json");
  for (const Damage& damage : sampled(
           std::vector<Damage>{
               {"config.json", "", "config.json: not valid JSON at column 1"},
               {"config.json", config.substr(0, config.size() / 2), "config.json: not valid JSON at line "},
               {"config.json", kDeep, "config.json: its JSON nests deeper than 100 levels"},
               {"config.json", "\xff\xff{\x1b[31m}", "config.json: not valid JSON at column 1"},
               {"config.json", "\xff\xfe{\x1b[31m}", "config.json: this is UTF-16LE text: expected UTF-8"},
               {"config.json", with(config, "model_type", "bert"),
                "model_type \"bert\" is not supported; expected one of"},
               {"config.json", with(config, "hidden_size", "64"), "\"hidden_size\" is \"64\": expected a whole number"},
               {"config.json", with(config, "rms_norm_eps", "x"), "\"rms_norm_eps\" is \"x\": expected a number"},
               {"config.json", with(config, "tie_word_embeddings", 3),
                "\"tie_word_embeddings\" is 3: expected true or"},
               {"config.json", with(config, "model_type", 3), "\"model_type\" is 3: expected a string"},
               {"config.json", with(config, "hidden_size", std::int64_t{1} << 62), "expected at most 2147483648"},
               {"config.json", with(config, "num_hidden_layers", 1'000'000'000),
                "n_layers = 1000000000: expected at most"},
               {"config.json", with(config, "num_hidden_layers", 9'999), "are not of this model, or not whole"},
               {"config.json", with(config, "num_attention_heads", 0), "n_heads = 0: expected a positive number"},
               {"config.json", with(config, "num_hidden_layers", 3),
                "\"model.layers.2.self_attn.q_proj.weight\" is missing"},
               {"config.json", with(config, "num_hidden_layers", 1), "is unexpected (found F32 [64])"},
               {"config.json", with(config, "vocab_size", 100), "expected F32 [100, 64], found F32 [512, 64]"},
               {"config.json", with(config, "rope_scaling", {{"rope_type", "linear"}, {"factor", 0}}), "a factor of 0"},
               {"config.json", with(config, "eos_token_id", {1, "b"}), "\"eos_token_id\" is [1,\"b\"]"},
               {"generation_config.json", "{", "generation_config.json: not valid JSON at column"},
           },
           6))
    expect_refused(damage);
  std::filesystem::remove(model() + "/generation_config.json");
  std::filesystem::remove(model() + "/config.json");
  expect_one_error(generate(model(), at("sound.jsonl")), model(), "has weights but no config.json");
}

TEST_F(HostileInputTest, Weights) {
  const std::string file = sound(kWeights);
  const auto tensor = [&](const char* key, const json& value) {
    return with_header(file, [&](json& header) { header["lm_head.weight"][key] = value; });
  };
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), 8);
  const std::string after_length = file.substr(8);
  for (const Damage& damage : sampled(
           std::vector<Damage>{
               {kWeights, "", "malformed safetensors file: "},
               {kWeights, file.substr(0, file.size() - 10), "pass the end of the data"},
               {kWeights, file + "more", "the tensors end at byte"},
               {kWeights, safetensors(after_length, "", std::uint64_t{1} << 63), "more than the 100000000 allowed"},
               {kWeights, safetensors(after_length, "", 50'000'000), "is given as 50000000 bytes, but the file has"},
               {kWeights, safetensors(kDeep, file, kDeep.size()), "the header does not begin with '{'"},
               {kWeights, tensor("shape", {std::int64_t{1} << 40, std::int64_t{1} << 40}), "overflows 64 bits"},
               {kWeights, tensor("shape", {-1, 2}), "shape contains the number -1"},
               {kWeights, tensor("shape", {64, 512}), "expected F32 [512, 64], found F32 [64, 512]"},
               {kWeights, tensor("dtype", "I32"), "expected F32 [512, 64], found I32 [512, 64]"},
               {kWeights, tensor("dtype", "F7"), "unknown dtype \"F7\""},
               {kWeights, tensor("data_offsets", {std::int64_t{1} << 40, (std::int64_t{1} << 40) + 4}), "pass the end"},
               {kWeights, tensor("data_offsets", {131'072, 4}), "run backwards"},
               {kWeights, with_header(file, [](json& header) { header.erase("model.norm.weight"); }),
                "the tensors end"},
           },
           6))
    expect_refused(damage);
  // NaN weights: detected when they are used.
  const std::string nothing(file.size() - 8 - header_bytes, '\xff');
  make_model({{kWeights, file.substr(0, 8 + header_bytes) + nothing, ""}});
  expect_one_error(generate(model(), at("sound.jsonl")), "sound.jsonl, line 1, token 1",
                   "the model's logits hold NaN: are the weights damaged");
  write_file(at("q.jsonl"), "{\"prompt\": \"the\", \"choices\": [\" cat\"]}\n");
  for (const char* input : {"--text", "--choices"}) {
    write_file(at("t.txt"), "the cat sat on the mat\n");
    expect_one_error({"eval", "--checkpoint", model(), input, at(std::string(input) == "--text" ? "t.txt" : "q.jsonl")},
                     "the log-likelihood of text 1 of 1 is ", "hold values that are not finite");
  }
  std::filesystem::remove(model() + "/" + kWeights);
  expect_one_error(generate(model(), at("sound.jsonl")), model(), "or one .safetensors file; found 0 such files");
}

TEST_F(HostileInputTest, IndexesOfWeights) {
  const std::string file = sound(kWeights);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), 8);
  json in_one_file = json::object();
  const json header = json::parse(file.substr(8, header_bytes));
  for (const auto& [name, tensor] : header.items())
    if (name != "__metadata__") in_one_file[name] = kWeights;
  const auto map = [](const json& weight_map) { return json{{"weight_map", weight_map}}.dump(); };
  const auto everything_in = [&](const json& place) {
    json places = in_one_file;
    for (auto& value : places) value = place;
    return map(places);
  };
  make_model({{kIndex, map(in_one_file), ""}});  // a valid model
  ASSERT_EQ(call(folder_->path(), generate(model(), at("sound.jsonl"))).status, 0);

  const std::string in_same_directory = "expected the name of a .safetensors file in the same directory";
  for (const Damage& damage : sampled(
           std::vector<Damage>{
               {kIndex, everything_in("../run/hf/model.safetensors"), in_same_directory},
               {kIndex, everything_in(at("run/hf/model.safetensors")), in_same_directory},
               {kIndex, everything_in("sub/../../x.safetensors"), in_same_directory},
               {kIndex, everything_in("/dev/zero"), in_same_directory},
               {kIndex, everything_in(std::string("x\0.safetensors", 14)), in_same_directory},
               {kIndex, everything_in(""), in_same_directory},
               {kIndex, everything_in(3), "is not a string"},
               {kIndex, everything_in("gone.safetensors"),
                "gone.safetensors is named there but is not in the directory"},
               {kIndex, map({{"foo", kWeights}}),
                "tensor \"foo\" is said to be in model.safetensors, which does not have"},
               {kIndex, "[]", "expected a JSON object, found array"},
               {kIndex, map("x"), "expected an object \"weight_map\""},
               {kIndex, kDeep, "its JSON nests deeper than 100 levels"},
           },
           6))
    expect_refused(damage);
  // If many ranks find it, only one reports it.
  expect_refused({kIndex, everything_in("../run/hf/model.safetensors"), in_same_directory}, {"-n", "2", "--tp", "2"});
  // A link to a file elsewhere is intended by the owner of the directory, as in caches of models.
  make_model({});
  std::filesystem::remove(model() + "/" + kWeights);
  std::filesystem::create_symlink(at("run/hf/model.safetensors"), model() + "/" + kWeights);
  EXPECT_EQ(call(folder_->path(), generate(model(), at("sound.jsonl"))).status, 0);
}

TEST_F(HostileInputTest, Tokenizers) {
  const std::string file = "tokenizer.json", good = sound(file);
  const auto in_model = [&](const char* key, const json& value) {
    return with(good, [&](json& root) { root["model"][key] = value; });
  };
  const auto id_of = [&](std::int64_t id) { return with(good, [&](json& root) { root["model"]["vocab"]["!"] = id; }); };
  const auto split = [&](const char* pattern) {
    return with(good, "pre_tokenizer",
                {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}});
  };
  for (const Damage& damage : sampled(
           std::vector<Damage>{
               {file, good.substr(0, good.size() / 2), "tokenizer.json: not valid JSON at line "},
               {file, kDeep, "its JSON nests deeper than 100 levels"},
               {file, "{}", "model: missing"},
               {file, in_model("type", "Unigram"), "'Unigram' is not supported"},
               {file, in_model("vocab", "x"), "model.vocab: expected an object"},
               {file, in_model("merges", {"a"}), "model.merges[0]: expected two tokens"},
               {file, in_model("merges", {"no such"}), "token 'no' is not in model.vocab"},
               {file, id_of(-1), "id -1 is outside 0 to"},
               {file, id_of(std::int64_t{1} << 40), "id 1099511627776 is outside 0 to"},
               {file, id_of(2), "id 2 belongs to another token as well"},
               {file, split("(((("), "the split pattern '((((' is not valid at character 4"},
               {file, with(good, "normalizer", {{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", "aa"}}),
                "normalizer.pattern.String: the pattern is empty"},
           },
           6))
    expect_refused(damage);
}

TEST_F(HostileInputTest, PromptsAndQuestions) {
  make_model({});
  const auto expect_prompts_refused = [&](const std::string& contents, const std::string& reason) {
    SCOPED_TRACE(contents.substr(0, 200));
    write_file(at("p.jsonl"), contents);
    expect_one_error(generate(model(), at("p.jsonl")), at("p.jsonl"), reason);
  };
  expect_prompts_refused("", "holds no prompts");
  expect_prompts_refused("{\"ids\": [1]}\nhello\n", "line 2: not valid JSON at column 1");
  expect_prompts_refused("{\"id\": 1, \"ids\": [1, 2", "line 1: not valid JSON at column ");
  expect_prompts_refused(kDeep, "line 1: its JSON nests deeper than 100 levels");
  expect_prompts_refused("{\"prompt\": \"\xff\xfe\"}\n", "line 1: not valid JSON at column 13");
  expect_prompts_refused("{\"prompt\": \"\\ud800\"}\n", "line 1: not valid JSON at column ");
  expect_prompts_refused("{\"ids\": [1]}\n{\"ids\": [-1]}\n", "line 2: token -1 is not in the model's vocabulary");
  expect_prompts_refused("{\"ids\": [1e300]}\n", "line 1: \"ids\" must be a list of integers");
  expect_prompts_refused("{\"ids\": []}\n", "line 1: it has no tokens");
  std::string ids = "1";
  for (int i = 0; i < 500'000; ++i) ids += ",1";
  expect_prompts_refused("{\"ids\": [" + ids + "]}\n", "line 1: it has 500001 tokens; the model's max_seq_len of 32");
  expect_prompts_refused(std::string(5000, '\0'), "is binary: expected prompts");

  const auto expect_questions_refused = [&](const std::string& contents, const std::string& reason) {
    SCOPED_TRACE(contents.substr(0, 200));
    write_file(at("q.jsonl"), contents);
    expect_one_error({"eval", "--checkpoint", model(), "--choices", at("q.jsonl")}, at("q.jsonl"), reason);
  };
  expect_questions_refused("{\"prompt\": \"a\", \"choices\": [\"b\", \"\"]}\n", "must be strings, none of them empty");
  expect_questions_refused("\x1f\x8b\x08" + std::string(60, '\1'),
                           "is gzip data: expected questions as JSON lines; unpack");
  expect_questions_refused("{\"prompt\": \"a\", \"choices\": [\"b\"], \"answer\": 1}\n",
                           "\"answer\" must be the number");
  expect_questions_refused("{\"prompt\": \"a\", \"choices\": [", "line 1: not valid JSON at column ");
}

TEST_F(HostileInputTest, OtherCommandsThatReadModels) {
  const auto train = [&] {
    return std::vector<std::string>{"train",
                                    at("run.toml"),
                                    "--job.dump_folder=" + at("tuned"),
                                    "--model.flavor=hf",
                                    "--model.hf_assets_path=" + model(),
                                    "--checkpoint.initial_load_path=" + model(),
                                    "--checkpoint.initial_load_in_hf",
                                    "--checkpoint.no-last_save_in_hf"};
  };
  make_model({});
  const Told sound_start = call(folder_->path(), train());
  ASSERT_EQ(sound_start.status, 0) << sound_start.err;
  std::filesystem::remove_all(at("tuned"));
  const std::string config = sound("config.json"), weights = sound(kWeights);
  for (const Damage& damage : sampled(
           std::vector<Damage>{
               {"config.json", kDeep, "its JSON nests deeper than 100 levels"},
               {"config.json", with(config, "num_hidden_layers", 1'000'000'000),
                "n_layers = 1000000000: expected at most"},
               {"config.json", with(config, "num_hidden_layers", 9'999), "are not of this model, or not whole"},
               {kWeights, weights.substr(0, weights.size() - 10), "pass the end of the data"},
               {kIndex, R"({"weight_map": {"a": "../b.safetensors"}})", "in the same directory"},
           },
           2)) {
    SCOPED_TRACE(damage.file + damage.content.substr(0, 100));
    make_model({damage});
    expect_one_error(train(), model(), damage.reason);
  }
  make_model({{"config.json", with(config, "hidden_size", -64), ""}});
  expect_one_error({"plan", "--model", model(), "--devices", "2x80GiB"}, model(),
                   "dim = -64: expected a positive number");
}

}  // namespace
}  // namespace phalanx::cli
