// Where ranks without our launcher write their flight recorders if no folder is given.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/testing/comes_true.h"
#include "phalanx/launch/testing/collected_process.h"
#include "phalanx/launch/testing/launcher_process.h"

namespace phalanx {
namespace {

class FlightFolder : public testing::TestWithParam<int> {};

TEST_P(FlightFolder, IsOneForAllRanksUnderTheTemporaryFolderAndSigQuitKillsNone) {
  const int ranks = GetParam();
  TempDirectory notes("notes"), temporary("temporary");
  auto environment = clean_environment();
  environment["TMPDIR"] = temporary.path().string();
  environment.erase("PHALANX_COMM_TRACE_DIR");
  std::vector<std::unique_ptr<CollectedProcess>> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::string> command{worker(), "--notes", notes.path().string()};
    if (ranks > 1) {
      command.emplace_back("--method");
      command.push_back(fmt::format("file://{}/rendezvous?rank={}&world_size={}", notes.path().string(), rank, ranks));
    }
    processes.push_back(std::make_unique<CollectedProcess>(command, environment));
  }
  for (int rank = 0; rank < ranks; ++rank) kill(noted_pid(notes, fmt::format("sum.{}", rank)), SIGQUIT);
  const auto folder = [&]() -> std::filesystem::path {
    for (const auto& entry : std::filesystem::directory_iterator(temporary.path()))
      if (entry.path().filename().string().starts_with("phalanx_traces_")) return entry.path();
    return {};
  };
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_TRUE(comes_true([&] {
      const auto path = folder();
      return !path.empty() && std::filesystem::exists(path / fmt::format("rank_{}.json", rank));
    })) << rank;
  const std::string said = "`phalanx trace analyze " + folder().string() + "`";
  // The line comes after the file.
  EXPECT_TRUE(comes_true([&] { return processes.front()->output().find(said) != std::string::npos; }));
  write_note(notes, "go");
  for (auto& process : processes) EXPECT_EQ(process->wait(), 0) << process->output();
}

INSTANTIATE_TEST_SUITE_P(Ranks, FlightFolder, testing::Values(1, 2), testing::PrintToStringParamName());

}  // namespace
}  // namespace phalanx
