// `phalanx train` with a memory limit that is too small for the whole state of the model: the real programs, with
// RLIMIT_DATA set on every rank.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "cli/testing/program_fixture.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/under_sanitizer.h"

namespace phalanx::cli {
namespace {

using namespace program_testing;

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

class MemoryLimitTest : public ProgramTest {
 protected:
  struct Trained : Outcome {
    std::int64_t peak_pss = 0;  // of all ranks together, sampled
    std::size_t ranks_seen = 0;
  };

  MemoryLimitTest() {
    write_periodic_tokens(path("tokens.bin"));
    write("run.toml", kModel);
  }

  /// Trains on four ranks; `limit` bounds the private memory of each.
  Trained train(std::int64_t limit, const std::vector<std::string>& more) const {
    std::vector<std::string> words = {"train",
                                      "-n",
                                      "4",
                                      path("run.toml"),
                                      "--training.dataset_path=" + path("tokens.bin"),
                                      "--job.dump_folder=" + path("run")};
    words.insert(words.end(), more.begin(), more.end());
    Trained trained;
    int calls = 0;
    const Outcome outcome = run(words, {.environment = {{"OMP_NUM_THREADS", "1"}},
                                        .limits = {{RLIMIT_DATA, static_cast<rlim_t>(limit)}},
                                        .meanwhile = [&](pid_t) {
                                          if (++calls % 4 == 0) look_at_ranks(trained);
                                          return false;
                                        }});
    static_cast<Outcome&>(trained) = outcome;
    return trained;
  }

  nlohmann::json record() const { return nlohmann::json::parse(contents(path("run/run.json"))); }

  /// The memory that a rank uses at its start (libtorch's data, the stacks of threads), read from a refusal.
  static std::int64_t in_use_of(const std::string& refusal) {
    std::smatch found;
    const std::regex text("RLIMIT_DATA: [0-9.]+ MiB, of which ([0-9.]+) MiB are in use");
    return std::regex_search(refusal, found, text) ? static_cast<std::int64_t>(std::stod(found[1]) * kMebibyte) : 0;
  }

 private:
  /// Samples the memory of the ranks. When other ranks end, shared memory counts in full for the last rank that maps
  /// it, so a single rank's PSS rises. The sum over the ranks does not.
  void look_at_ranks(Trained& trained) const {
    std::int64_t sum = 0;
    std::size_t ranks = 0;
    for (const pid_t rank : workers_of(path("run.toml"))) {
      const std::int64_t pss = own_pss(contents("/proc/" + std::to_string(rank) + "/smaps_rollup"));
      if (pss == 0) continue;  // the rank has just ended
      sum += pss;
      ++ranks;
    }
    trained.peak_pss = std::max(trained.peak_pss, sum);
    trained.ranks_seen = std::max(trained.ranks_seen, ranks);
  }
};

TEST_F(MemoryLimitTest, AModelThatDoesNotFitTrainsUnderZero3) {
  if (kUnderSanitizer) GTEST_SKIP() << kWhyNoMemoryLimit;
  // Without sharding the run is refused before any allocation, with the numbers and advice.
  const Trained refused = train(280 * kMebibyte, {});
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
  const Trained failed = train(limit, {"--memory.no-check"});
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
  const Trained trained = train(limit, {"--parallelism.data_parallel_shard_degree=4"});
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
  EXPECT_TRUE(trained.ranks_seen == 4 || own_pss(contents("/proc/self/smaps_rollup")) == 0);
  EXPECT_LT(trained.peak_pss, 4 * limit);
}

}  // namespace
}  // namespace phalanx::cli
