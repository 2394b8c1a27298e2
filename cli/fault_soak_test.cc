// Faults of real runs at random moments of every phase: ranks that are killed or stopped, and wishes to stop.
//
// PHALANX_SOAK_FAULTS=500 (`make soak`) prints how long it took by phase; continuous integration does a few.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cli/testing/program_fixture.h"

namespace phalanx::cli {
namespace {

using namespace program_testing;
using SoakClock = std::chrono::steady_clock;

class TrainingFaultSoak : public ProgramTest {
 protected:
  enum class Fault { kill, stop, request };
  struct Phase {
    const char* name;
    std::vector<std::string> options;
    std::function<bool()> has_begun;
    int spread_ms;     // the fault comes so much later at most
    bool is_stepping;  // then a wish to stop ends the run with 0
  };
  struct Result {
    bool was_hit = false;
    double seconds = 0;  // from the fault to the launcher's end
    Outcome outcome;
  };

  std::string err() const { return contents(path("stderr.txt")); }
  int steps_done() const { return count(contents(path("run/metrics.jsonl")), "\"grad_norm\""); }
  bool is_saving() const {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(path("run/checkpoint"), error))
      if (entry.path().extension() == ".tmp") return true;
    return false;
  }

  std::vector<Phase> phases(const std::string& file) const {
    const std::string endless = "--training.steps=1000000";
    return {
        {"start", {endless}, [this, file] { return !workers_of(file).empty(); }, 300, false},
        {"rendezvous", {endless}, [this] { return count(err(), ", from phalanx launch") > 0; }, 60, false},
        {"first step", {endless}, [this] { return count(err(), "backend: ") > 0; }, 150, false},
        {"steps", {endless}, [this] { return steps_done() > 2; }, 200, true},
        {"save", {endless, "--checkpoint.interval=2"}, [this] { return steps_done() > 2 && is_saving(); }, 0, true},
        {"validation",
         {endless, "--validation.enable", "--validation.fraction=0.5", "--validation.freq=1"},
         [this] { return count(err(), "validate step:") > 1; },
         200,
         true},
        {"exit", {"--training.steps=8"}, [this] { return count(err(), "/step-8 (") > 0; }, 60, false},
    };
  }

  Result run_with(const Phase& phase, Fault fault, int ranks, const std::string& backend, std::mt19937& random) const {
    const std::string file = path("run.toml");
    std::filesystem::remove_all(path("run"));
    std::vector<std::string> command{
        "train", "-n", std::to_string(ranks), file, "--comm.backend=" + backend, "--comm.heartbeat_seconds=2"};
    command.insert(command.end(), phase.options.begin(), phase.options.end());
    const auto delay = std::chrono::milliseconds(random() % static_cast<unsigned>(phase.spread_ms + 1));
    const auto victim = random();
    SoakClock::time_point due{}, hit{};
    Result result;
    result.outcome = run(command, {.meanwhile = [&](pid_t launcher) {
                           const auto now = SoakClock::now();
                           if (due == SoakClock::time_point{}) {
                             if (!phase.has_begun()) return false;
                             due = now + delay;
                           }
                           if (now < due) return false;
                           const std::vector<pid_t> workers = workers_of(file);
                           if (workers.empty()) return true;
                           const pid_t rank = workers[victim % workers.size()];
                           hit = SoakClock::now();
                           result.was_hit = fault == Fault::request
                                                ? ::kill(launcher, SIGTERM) == 0
                                                : ::kill(rank, fault == Fault::kill ? SIGKILL : SIGSTOP) == 0;
                           return true;
                         }});
    result.seconds = std::chrono::duration<double>(SoakClock::now() - hit).count();
    for (const pid_t left : workers_of(file)) {
      ADD_FAILURE() << "a rank is left: " << left;
      ::kill(left, SIGKILL);
    }
    return result;
  }
};

TEST_F(TrainingFaultSoak, IsToldInEveryPhase) {
  const char* const asked = std::getenv("PHALANX_SOAK_FAULTS");
  const int faults = asked != nullptr ? std::atoi(asked) : 4;
  const char* const given = std::getenv("PHALANX_SOAK_SEED");
  const unsigned seed = given != nullptr ? static_cast<unsigned>(std::atoi(given)) : std::random_device()();
  std::mt19937 random(seed);
  const std::string file = config();
  const std::vector<Phase> all = phases(file);
  const std::pair<Fault, const char*> kinds[] = {
      {Fault::kill, "killed"}, {Fault::stop, "stopped"}, {Fault::request, "asked to stop"}};
  std::map<std::string, std::vector<double>> times;
  const std::size_t first = random() % all.size();
  for (int number = 0; number < faults; ++number) {
    const Phase& phase = all[(first + static_cast<std::size_t>(number)) % all.size()];
    const auto& [fault, verb] = kinds[random() % 3];
    const int ranks = 2 + static_cast<int>(random() % 3);
    const std::string backend = random() % 2 == 0 ? "shm" : "gloo";
    SCOPED_TRACE(fmt::format("seed {}, fault {}: {} ranks on {}, {} in phase '{}'", seed, number, ranks, backend, verb,
                             phase.name));
    const Result result = run_with(phase, fault, ranks, backend, random);
    if (!result.was_hit) continue;
    times[fmt::format("{:<12}{}", phase.name, verb)].push_back(result.seconds);
    const int status = result.outcome.status;
    // A rank that had done all its work may be killed, or a wish come, without harm.
    const bool may_be_good = std::string(phase.name) == "exit" || (fault == Fault::request && phase.is_stepping) ||
                             (fault == Fault::request && steps_done() > 0);
    EXPECT_TRUE(status != 0 || may_be_good) << result.outcome.err;
    if (fault == Fault::stop && status != 0) {
      EXPECT_THAT(result.outcome.err, ::testing::ContainsRegex("rank [0-9] is stopped \\(SIGSTOP\\)"));
    }
    // 1 s, the heartbeat and 5 s on a quiet machine; this says that nobody waited for a time-out of 100 s and more.
    EXPECT_LT(result.seconds, 30) << result.outcome.err;
    // What was saved goes on.
    if (number % 10 == 3) {
      EXPECT_EQ(run({"train", "-n", "2", file, fmt::format("--training.steps={}", steps_done() + 2)}).status, 0);
    }
  }
  if (asked == nullptr) return;
  fmt::print("{:<26}{:>7}{:>10}{:>10}  seconds to the end\n", "phase, rank", "faults", "median", "longest");
  for (auto& [name, seconds] : times) {
    std::sort(seconds.begin(), seconds.end());
    fmt::print("{:<26}{:>7}{:>10.2f}{:>10.2f}\n", name, seconds.size(), seconds[seconds.size() / 2], seconds.back());
  }
}

}  // namespace
}  // namespace phalanx::cli
