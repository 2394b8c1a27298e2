// Flags of `phalanx launch` whose effect is visible only in processes, tested with the real program.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/comes_true.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/testing/collected_process.h"
#include "phalanx/launch/testing/launcher_process.h"
#include "phalanx/launch/testing/listeners.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/testing/free_address.h"

namespace phalanx::cli {
namespace {

// `phalanx launch FLAGS sh -c SCRIPT FOLDER`; the script writes its notes to "$0".
std::unique_ptr<CollectedProcess> launched(std::vector<std::string> flags, const std::string& script,
                                           const TempDirectory& notes, const EnvironmentMap& more = {}) {
  flags.insert(flags.begin(), {built_program("phalanx"), "launch"});
  flags.insert(flags.end(), {"sh", "-c", script, notes.path().string()});
  auto environment = clean_environment();
  environment["PHALANX_JOB_SECRET"] = "the secret of this test";
  for (const auto& [name, value] : more) environment[name] = value;
  return std::make_unique<CollectedProcess>(std::move(flags), std::move(environment));
}

TEST(LaunchProgramTest, ASignalThatIsNamedEndsTheJobAfterThePatienceThatIsGiven) {
  const TempDirectory notes("notes");
  const auto launcher = launched({"-n", "2", "--signals-to-handle=USR2", "--shutdown-timeout=1"},
                                 "trap '' USR2 TERM; echo $$ > $0/part.$RANK; mv $0/part.$RANK $0/pid.$RANK; "
                                 "while :; do sleep 1; done",
                                 notes);
  const std::vector<pid_t> ranks{noted_pid(notes, "pid.0"), noted_pid(notes, "pid.1")};
  const auto begin = std::chrono::steady_clock::now();
  kill(launcher->pid(), SIGUSR2);
  EXPECT_EQ(launcher->wait(), 128 + SIGUSR2) << launcher->output();
  const auto took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took, std::chrono::milliseconds(900));
  EXPECT_LT(took, std::chrono::seconds(20));  // without the flag: 30
  for (const pid_t rank : ranks) EXPECT_TRUE(comes_true([&] { return is_gone(rank); })) << rank;
}

// Part of a script: writes its rank's note of that name with this text, so that it appears complete, and waits for the
// test.
std::string noted(const std::string& name, const std::string& text) {
  return "echo \"" + text + "\" > $0/part.$RANK; mv $0/part.$RANK $0/" + name + ".$RANK; ";
}
const std::string kUntilGo = "while [ ! -e $0/go ]; do sleep 0.01; done";

TEST(LaunchProgramTest, QuitIsPassedOnAndEndsTheJob) {
  const TempDirectory notes("notes");
  const auto launcher =
      launched({"-n", "2"}, "trap '" + noted("told", "QUIT") + "exit 0' QUIT; " + noted("pid", "$$") + kUntilGo, notes);
  for (const char* rank : {"pid.0", "pid.1"}) noted_pid(notes, rank);
  kill(launcher->pid(), SIGQUIT);
  EXPECT_NE(launcher->wait(), 128 + SIGKILL) << launcher->output();
  for (const char* rank : {"told.0", "told.1"}) EXPECT_EQ(note_of(notes, rank), "QUIT\n");
}

// Every user of a machine can read all command lines.
TEST(LaunchProgramTest, TheSecretStandsOnNoCommandLine) {
  for (const std::string given : {"", "a secret that was given to the job"}) {
    const TempDirectory notes("notes");
    const auto launcher = launched({"-n", "2"}, noted("secret", "$PHALANX_JOB_SECRET") + kUntilGo, notes,
                                   {{"PHALANX_JOB_SECRET", given}});
    std::string secret = note_of(notes, "secret.0");
    EXPECT_EQ(note_of(notes, "secret.1"), secret);
    secret.pop_back();
    ASSERT_GE(secret.size(), 16U);
    EXPECT_TRUE(given.empty() || secret == given) << secret;
    int ours = 0;
    std::error_code gone;
    for (std::filesystem::directory_iterator entry("/proc"), end; entry != end; entry.increment(gone)) {
      std::ifstream file(entry->path() / "cmdline");
      const std::string line{std::istreambuf_iterator<char>(file), {}};
      EXPECT_EQ(line.find(secret), std::string::npos) << entry->path() << ": " << line;
      if (line.find(notes.path().string()) != std::string::npos) ++ours;
    }
    EXPECT_GE(ours, 3) << "the launcher and its ranks";
    write_note(notes, "go");
    EXPECT_EQ(launcher->wait(), 0) << launcher->output();
  }
}

TEST(LaunchProgramTest, AJobOnItsOwnHasAnIdOfItsOwnAndRanksTheirRole) {
  std::set<std::string> ids;
  for (int job = 0; job < 2; ++job) {
    const TempDirectory notes("notes");
    const auto launcher =
        launched({"--standalone", "-n", "2", "--role=trainer"}, noted("id", "$TORCHELASTIC_RUN_ID $ROLE_NAME"), notes);
    EXPECT_EQ(launcher->wait(), 0) << launcher->output();
    const std::string id = note_of(notes, "id.0");
    EXPECT_EQ(note_of(notes, "id.1"), id);
    EXPECT_THAT(id, testing::MatchesRegex("[0-9a-f]{16} trainer\n"));
    ids.insert(id);
  }
  EXPECT_EQ(ids.size(), 2U);
}

TEST(LaunchProgramTest, ThePrefixIsATemplateAndChosenLinesOfEitherStreamAreDuplicated) {
  const TempDirectory notes("notes"), logs("logs");
  const auto launcher = launched(
      {"-n", "2", "--tee=3", "--log-dir", logs.path().string(), "--role=trainer", "--duplicate-stderr-filters=bad"},
      "echo fine; echo a bad thing >&2; echo another >&2", notes,
      {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${role_name} ${rank}/${local_rank}> "}});
  EXPECT_EQ(launcher->wait(), 0) << launcher->output();
  std::string duplicated;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(logs.path()))
    if (entry.path().filename() == "filtered_stderr.log") {
      std::ifstream file(entry.path());
      duplicated.append(std::istreambuf_iterator<char>(file), {});
    }
  for (const char* prefix : {"<trainer 0/0> ", "<trainer 1/1> "}) {
    for (const char* line : {"fine", "a bad thing", "another"})
      EXPECT_EQ(times_in(launcher->output(), std::string(prefix) + line + "\n"), 1) << launcher->output();
    EXPECT_EQ(times_in(duplicated, std::string(prefix) + "a bad thing\n"), 1) << duplicated;
  }
  EXPECT_EQ(times_in(duplicated, "\n"), 2) << duplicated;
}

// Tests which address the host of the rendezvous listens on. A second node could host it too but must not.
class BoundRendezvous : public testing::TestWithParam<const char*> {};

TEST_P(BoundRendezvous, ListensWhereItIsTold) {
  const std::string bind = GetParam();
  const std::uint16_t port = free_address().port;
  const TempDirectory notes("notes");
  const auto node = [&](const std::string& endpoint, const std::string& configuration) {
    return launched({"--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=" + endpoint + ":" + std::to_string(port),
                     "--rdzv-conf=" + configuration, "--local-addr=127.0.0.1"},
                    noted("here", "yes") + kUntilGo, notes);
  };
  const auto host = node("127.0.0.1", "is_host=1,bind=" + bind), guest = node("127.0.0.5", "is_host=0");
  for (const char* rank : {"here.0", "here.1"}) note_of(notes, rank);
  const auto is_told =
      bind == "*" ? AnyOf("00000000", "00000000000000000000000000000000") : AnyOf("0500007F", "0500007F");
  EXPECT_THAT(listening_addresses(host->pid()), UnorderedElementsAre(is_told, "0100007F"));  // and the round's
  EXPECT_THAT(listening_addresses(guest->pid()), IsEmpty());
  write_note(notes, "go");
  for (const auto* process : {&host, &guest}) EXPECT_EQ((*process)->wait(), 0) << (*process)->output();
}

INSTANTIATE_TEST_SUITE_P(Addresses, BoundRendezvous, testing::Values("127.0.0.5", "*"),
                         [](const auto& info) { return info.index == 0 ? "One" : "All"; });

TEST(LaunchProgramTest, OtherNodesAreToldTheLocalAddress) {
  const HostPort endpoint = free_address();
  const TempDirectory notes("notes");
  std::vector<std::unique_ptr<CollectedProcess>> nodes;
  for (int node = 0; node < 2; ++node) {
    std::vector<std::string> flags{"-n",
                                   "1",
                                   "--nnodes=2",
                                   "--node-rank=" + std::to_string(node),
                                   "--master-addr=127.0.0.1",
                                   "--master-port=" + std::to_string(endpoint.port)};
    if (node == 0) flags.emplace_back("--local-addr=127.0.0.2");
    nodes.push_back(launched(flags, "echo $MASTER_ADDR $PHALANX_STORE > $0/address.$RANK", notes));
  }
  for (const auto& node : nodes) EXPECT_EQ(node->wait(), 0) << node->output();
  for (const char* rank : {"address.0", "address.1"})
    EXPECT_THAT(note_of(notes, rank), StartsWith("127.0.0.2 127.0.0.2:"));
}

}  // namespace
}  // namespace phalanx::cli
