// Faults in real runs at random moments of every phase: ranks that are killed or stopped, stop signals, and launchers
// that are killed. Each must give a clear message and leave nothing behind.
//
// PHALANX_SOAK_FAULTS=500 (`make soak`) prints the time by phase; continuous integration runs only a few.
#include <fmt/format.h>
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
#include "phalanx/base/testing/matchers.h"

namespace phalanx::cli {
namespace {

using namespace program_testing;
using SoakClock = std::chrono::steady_clock;

class TrainingFaultSoak : public ProgramTest {
 protected:
  enum class Fault { kill, stop, request, request_beside_stopped, kill_launcher };
  struct Phase {
    const char* name;
    std::vector<std::string> options;
    std::function<bool()> has_begun;
    int spread_ms;     // the fault is delayed by at most this
    bool is_stepping;  // a stop signal ends the run with 0
  };
  struct Result {
    bool was_hit = false;
    double seconds = 0;  // from the fault to the end of the launcher, or of the ranks if the launcher is killed
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

  // The files that a launcher must not leave in the temporary folder of this test.
  std::vector<std::string> left_folders() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path(".")))
      if (entry.path().filename().string().starts_with("phalanx")) found.push_back(entry.path().filename().string());
    return found;
  }

  std::vector<Phase> phases(const std::string& file) const {
    const std::string endless = "--training.steps=1000000";
    return {
        {"start", {endless}, [this, file] { return !workers_of(file).empty(); }, 300, false},
        {"rendezvous", {endless}, [this] { return count(err(), ", from phalanx launch") > 0; }, 60, false},
        {"world made", {endless}, [this] { return count(err(), "backend: ") > 0; }, 40, false},
        {"first step", {endless}, [this] { return count(err(), "folder: ") > 0; }, 60, false},
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

  static bool strike(Fault fault, pid_t launcher, pid_t rank) {
    switch (fault) {
      case Fault::kill:
        return ::kill(rank, SIGKILL) == 0;
      case Fault::stop:
        return ::kill(rank, SIGSTOP) == 0;
      case Fault::request_beside_stopped:
        return ::kill(rank, SIGSTOP) == 0 && ::kill(launcher, SIGTERM) == 0;
      case Fault::request:
        return ::kill(launcher, SIGTERM) == 0;
      case Fault::kill_launcher:
        return ::kill(launcher, SIGKILL) == 0;
    }
    return false;
  }

  bool all_gone(const std::string& file) const { return workers_of(file).empty() && left_folders().empty(); }

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
                           hit = SoakClock::now();
                           result.was_hit = strike(fault, launcher, workers[victim % workers.size()]);
                           return true;
                         }});
    if (fault == Fault::kill_launcher)
      while (!all_gone(file) && SoakClock::now() - hit < std::chrono::seconds(30))
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    result.seconds = std::chrono::duration<double>(SoakClock::now() - hit).count();
    for (const pid_t left : workers_of(file)) {
      ADD_FAILURE() << "a rank is left: " << left;
      ::kill(left, SIGKILL);
    }
    EXPECT_THAT(left_folders(), IsEmpty());
    return result;
  }

  // Checks the message for the user and the exit status.
  void expect_told(const Phase& phase, Fault fault, const Result& result) const {
    const auto& [status, out, err] = result.outcome;
    const bool is_done = std::string(phase.name) == "exit";  // a rank that has finished its work may end without harm
    const auto expect_if = [&](bool applies, const ::testing::Matcher<std::string>& words) {
      if (applies) {
        EXPECT_THAT(err, words);
      }
    };
    switch (fault) {
      case Fault::kill:
        EXPECT_TRUE(status != 0 || is_done) << err;
        expect_if(status != 0, ContainsRegex("rank [0-9].* (was killed by signal 9|has died)"));
        break;
      case Fault::stop:
        EXPECT_TRUE(status != 0 || is_done) << err;
        expect_if(status != 0, ContainsRegex("rank [0-9] is stopped \\(SIGSTOP\\)"));
        break;
      case Fault::request:
      case Fault::request_beside_stopped:
        EXPECT_TRUE(status == 0 || fault != Fault::request || !phase.is_stepping) << err;
        expect_if(status != 0, HasSubstr("stopped by signal 15 (SIGTERM)"));
        expect_if(status == 0 && !is_done, HasSubstr("stopped on request after step"));
        break;
      case Fault::kill_launcher:
        break;  // the shell reports it
    }
    // 1 s, the heartbeat and 5 s on a quiet machine. The bound only checks that no rank waits for a timeout of 100 s or
    // more.
    EXPECT_LT(result.seconds, 30) << err;
  }
};

TEST_F(TrainingFaultSoak, IsToldInEveryPhase) {
  const char* const asked = std::getenv("PHALANX_SOAK_FAULTS");
  const int faults = asked != nullptr ? std::atoi(asked) : 8;  // one in every phase, and each kind
  const char* const given = std::getenv("PHALANX_SOAK_SEED");
  const unsigned seed = given != nullptr   ? static_cast<unsigned>(std::atoi(given))
                        : asked != nullptr ? std::random_device()()
                                           : 1U;
  std::mt19937 random(seed);
  const std::string file = config();
  const std::vector<Phase> all = phases(file);
  const std::pair<Fault, const char*> kinds[] = {{Fault::kill, "rank killed"},
                                                 {Fault::stop, "rank stopped"},
                                                 {Fault::request, "asked to stop"},
                                                 {Fault::request_beside_stopped, "asked, a rank stopped"},
                                                 {Fault::kill_launcher, "launcher killed"}};
  std::map<std::pair<std::size_t, std::string>, std::vector<double>> times;
  int hits = 0;
  const std::size_t first = random() % all.size();
  for (int number = 0; number < faults; ++number) {
    const std::size_t chosen = (first + static_cast<std::size_t>(number)) % all.size();
    const Phase& phase = all[chosen];
    const std::size_t kind = asked != nullptr ? random() : static_cast<std::size_t>(number);
    const auto& [fault, verb] = kinds[kind % std::size(kinds)];
    const int ranks = 2 + static_cast<int>(random() % 3);
    const std::string backend = random() % 2 == 0 ? "shm" : "gloo";
    SCOPED_TRACE(fmt::format("PHALANX_SOAK_SEED={}, fault {}: {} ranks on {}, {} in phase '{}'", seed, number, ranks,
                             backend, verb, phase.name));
    const Result result = run_with(phase, fault, ranks, backend, random);
    if (!result.was_hit) continue;
    ++hits;
    times[{chosen, verb}].push_back(result.seconds);
    expect_told(phase, fault, result);
    if (asked != nullptr ? number % 10 != 3 : phase.name != std::string("save")) continue;
    // The saved checkpoint can be resumed.
    std::vector<std::string> command{"train", "-n", "2", file};
    command.insert(command.end(), phase.options.begin(), phase.options.end());
    command.push_back(fmt::format("--training.steps={}", steps_done() + 2));
    const Outcome resumed = run(command);
    EXPECT_EQ(resumed.status, 0) << resumed.err;
  }
  EXPECT_GT(2 * hits, faults) << "most runs had ended before their fault";
  if (asked == nullptr) return;
  fmt::print("{:<12}{:<23}{:>8}{:>9}{:>10}   seconds to the end\n", "phase", "fault", "faults", "median", "longest");
  for (auto& [key, seconds] : times) {
    std::sort(seconds.begin(), seconds.end());
    fmt::print("{:<12}{:<23}{:>8}{:>9.2f}{:>10.2f}\n", all[key.first].name, key.second, seconds.size(),
               seconds[seconds.size() / 2], seconds.back());
  }
}

}  // namespace
}  // namespace phalanx::cli
