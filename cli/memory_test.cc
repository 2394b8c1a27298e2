// `phalanx train` with a memory limit that is too small for the whole state of the model: the real programs, with
// RLIMIT_DATA set on every rank.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/under_sanitizer.h"

namespace phalanx::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kMebibyte = 1 << 20;

// 21.6 M parameters: 330 MiB of state on every rank without sharding, 82 MiB under ZeRO-3 over four.
constexpr const char* kModel = R"([model]
dim = 384
n_layers = 12
n_heads = 6
n_kv_heads = 6
ffn_hidden = 1024
vocab_size = 512
[training]
seq_len = 32
local_batch_size = 1
steps = 2
[lr_scheduler]
warmup_steps = 1
[checkpoint]
enable = false
[metrics]
enable_tensorboard = false
enable_report = false
)";
constexpr double kStateMebibytes = 330;

std::string text_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

/// The PSS without file mappings: the share of libtorch's code depends on which other processes run it.
std::int64_t own_pss(const std::string& rollup) {
  std::int64_t sum = 0;
  for (const char* key : {"\nPss_Anon:", "\nPss_Shmem:"}) {
    const std::size_t line = rollup.find(key);
    if (line == std::string::npos) continue;
    sum += std::stoll(rollup.substr(rollup.find_first_of("0123456789", line))) * 1024;
  }
  return sum;
}

class MemoryLimitTest : public ::testing::Test {
 protected:
  struct Outcome {
    int status = -1;
    std::string out, err;
    std::int64_t peak_pss = 0;  // of all ranks together, sampled
    std::size_t ranks_seen = 0;
  };

  MemoryLimitTest() {
    std::ofstream tokens(path("tokens.bin"), std::ios::binary);
    for (int i = 0; i < 4000; ++i) {
      const std::uint16_t id = static_cast<std::uint16_t>((i * 7 + i / 50) % 512);
      tokens.write(reinterpret_cast<const char*>(&id), sizeof id);
    }
    std::ofstream(path("run.toml")) << kModel;
  }

  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }

  /// Trains on four ranks; `limit` bounds the private memory of each.
  Outcome train(std::int64_t limit, const std::vector<std::string>& more) const {
    const std::string program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "phalanx";
    std::vector<std::string> words = {program,
                                      "train",
                                      "-n",
                                      "4",
                                      path("run.toml"),
                                      "--training.dataset_path=" + path("tokens.bin"),
                                      "--job.dump_folder=" + path("run")};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const std::string out = path("stdout.txt"), err = path("stderr.txt");
    const pid_t child = ::fork();
    if (child == 0) {
      ::setpgid(0, 0);
      ::dup2(::open(out.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDOUT_FILENO);
      ::dup2(::open(err.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDERR_FILENO);
      ::setenv("OMP_NUM_THREADS", "1", 1);
      const rlimit bytes{static_cast<rlim_t>(limit), static_cast<rlim_t>(limit)};
      ::setrlimit(RLIMIT_DATA, &bytes);
      ::execv(program.c_str(), arguments.data());
      ::_exit(127);
    }
    Outcome outcome;
    int status = 0;
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(3);
    while (::waitpid(child, &status, WNOHANG) == 0) {
      look_at_ranks(outcome);
      if (std::chrono::steady_clock::now() > give_up) ::kill(-child, SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // between two samples; nothing depends on it
    }
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    outcome.out = text_of(out);
    outcome.err = text_of(err);
    return outcome;
  }

  nlohmann::json record() const { return nlohmann::json::parse(text_of(path("run/run.json"))); }

  /// The memory that a rank uses at its start (libtorch's data, the stacks of threads), read from a refusal.
  static std::int64_t in_use_of(const std::string& refusal) {
    std::smatch found;
    const std::regex text("RLIMIT_DATA: [0-9.]+ MiB, of which ([0-9.]+) MiB are in use");
    return std::regex_search(refusal, found, text) ? static_cast<std::int64_t>(std::stod(found[1]) * kMebibyte) : 0;
  }

 private:
  /// Samples the memory of the ranks. When other ranks end, shared memory counts in full for the last rank that maps
  /// it, so a single rank's PSS rises. The sum over the ranks does not.
  void look_at_ranks(Outcome& outcome) const {
    std::int64_t sum = 0;
    std::size_t ranks = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      const std::string words = text_of(entry.path() / "cmdline");
      if (words.find("phalanx-worker") == std::string::npos || words.find(path("run.toml")) == std::string::npos)
        continue;
      const std::int64_t pss = own_pss(text_of(entry.path() / "smaps_rollup"));
      if (pss == 0) continue;  // the rank has just ended
      sum += pss;
      ++ranks;
    }
    outcome.peak_pss = std::max(outcome.peak_pss, sum);
    outcome.ranks_seen = std::max(outcome.ranks_seen, ranks);
  }

  TempDirectory folder_;
};

TEST_F(MemoryLimitTest, AModelThatDoesNotFitTrainsUnderZero3) {
  if (kMapsTerabytes) GTEST_SKIP() << kWhyNoMemoryLimit;
  // Without sharding the run is refused before any allocation, with the numbers and advice.
  const Outcome refused = train(280 * kMebibyte, {});
  EXPECT_EQ(refused.status, 1) << refused.err;
  const std::string refusal = refused.out + refused.err;
  EXPECT_THAT(refusal, HasSubstr("not enough memory: rank "));
  EXPECT_THAT(refusal, HasSubstr("of shared memory, which this limit does not count"));
  EXPECT_THAT(refusal, HasSubstr("MiB are missing\n  limit: RLIMIT_DATA: "));
  EXPECT_THAT(refusal, HasSubstr("predicted: "));
  EXPECT_THAT(refusal,
              HasSubstr("it would fit with parallelism.data_parallel_shard_degree = 4, parallelism.zero_stage = "));
  EXPECT_THAT(refusal, HasSubstr("memory.check = false starts all the same"));
  EXPECT_THAT(refusal, Not(HasSubstr("step:  1")));
  EXPECT_FALSE(std::filesystem::exists(path("run/metrics.jsonl")));

  const std::int64_t in_use = in_use_of(refusal);
  ASSERT_GT(in_use, 0);
  const std::int64_t limit = in_use + 195 * kMebibyte;
  ASSERT_LT(static_cast<double>(limit), kStateMebibytes * kMebibyte) << "a rank without a model has " << in_use;

  // If it is started anyway, the failing allocation gives an error of the same kind.
  const Outcome failed = train(limit, {"--memory.no-check"});
  EXPECT_EQ(failed.status, 1) << failed.err;
  const std::string failure = failed.out + failed.err;
  EXPECT_THAT(failure, HasSubstr("not enough memory: an allocation failed on rank "));
  EXPECT_THAT(failure, HasSubstr("MiB were missing from the beginning: rank "));
  EXPECT_THAT(failure, HasSubstr("limit: RLIMIT_DATA: "));
  EXPECT_THAT(failure, HasSubstr("predicted: "));
  EXPECT_THAT(failure, HasSubstr("counted until then: "));
  EXPECT_THAT(failure,
              HasSubstr("saves most: parallelism.data_parallel_shard_degree = 4, parallelism.zero_stage = 3 ("));
  EXPECT_THAT(failure,
              HasSubstr("it would fit with parallelism.data_parallel_shard_degree = 4, parallelism.zero_stage = "));

  // With sharding it trains. RLIMIT_DATA does not count shared memory, so the test checks that too.
  const Outcome trained = train(limit, {"--parallelism.data_parallel_shard_degree=4"});
  ASSERT_EQ(trained.status, 0) << trained.err << trained.out;
  EXPECT_THAT(trained.out + trained.err, HasSubstr("step:  2"));
  const auto run = record();
  EXPECT_EQ(run["steps_done"], 2);
  ASSERT_EQ(run["memory"]["measured"].size(), 4U);
  for (const auto& rank : run["memory"]["measured"]) {
    EXPECT_LT(in_use + rank["total"].get<std::int64_t>(), limit) << rank;
    const auto predicted = run["memory"]["predicted"]["total"].get<double>();
    EXPECT_NEAR(rank["total"].get<double>(), predicted, 0.05 * predicted);
  }
  // Kernels before 5.9 report the PSS only as one number.
  EXPECT_TRUE(trained.ranks_seen == 4 || own_pss(text_of("/proc/self/smaps_rollup")) == 0);
  EXPECT_LT(trained.peak_pss, 4 * limit);
}

}  // namespace
}  // namespace phalanx::cli
