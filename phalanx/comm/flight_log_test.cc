// What the flight recorder of a communicator records, and when it is written.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/observe/flight_recorder.h"

namespace phalanx {
namespace {

using nlohmann::json;

class FlightLogTest : public ::testing::Test {
 protected:
  FlightLogTest() {
    std::string name = ::testing::TempDir() + "flight_log_XXXXXX";
    folder_ = mkdtemp(name.data());
  }
  ~FlightLogTest() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path path_of(int rank) const { return folder_ / fmt::format("rank_{}.json", rank); }
  json dump_of(int rank) const { return json::parse(read_file(path_of(rank))); }
  CommunicatorOptions options() const { return {.trace_folder = (folder_ / "").string()}; }

  std::filesystem::path folder_;
};

TEST_F(FlightLogTest, CountsCollectivesAndMessagesTogether) {
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    at::Tensor x = at::full({6}, 1.0F);
    comm->all_reduce(x, {.op = ReduceOp::max});
    if (comm->rank() == 0)
      comm->send(x, 1, {.tag = 7});
    else
      comm->recv(x, 0, {.tag = 7});
    comm->broadcast(x, {.root = 1, .async = true}).wait();
    auto child = comm->split(0, comm->rank(), "child");
    child->barrier();
    comm->dump_flight_recorder(path_of(comm->rank()).string());
  });
  for (int rank = 0; rank < 2; ++rank) {
    const json dump = dump_of(rank);
    EXPECT_EQ(dump["rank"], rank);
    ASSERT_EQ(dump["groups"].size(), 2U);
    EXPECT_EQ(dump["groups"][1]["group"], "child");
    EXPECT_EQ(dump["groups"][1]["entries"][0]["verb"], "barrier");
    const json& entries = dump["groups"][0]["entries"];
    ASSERT_GE(entries.size(), 3U);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      EXPECT_EQ(entries[i]["seq"], i);
      EXPECT_EQ(entries[i]["state"], "finished") << entries[i];
      EXPECT_LE(entries[i]["started_us"], entries[i]["ended_us"]);
    }
    EXPECT_EQ(entries[0]["verb"], "all_reduce");
    EXPECT_EQ(entries[0]["dtype"], "float32");
    EXPECT_EQ(entries[0]["count"], 6);
    EXPECT_EQ(entries[0]["op"], "max");
    EXPECT_EQ(entries[1]["verb"], rank == 0 ? "send" : "recv");
    EXPECT_EQ(entries[1]["peer"], 1 - rank);
    EXPECT_EQ(entries[1]["tag"], 7);
    EXPECT_EQ(entries[2]["root"], 1);
  }
}

// Errors say batch_isend_irecv. Readers of earlier files know this name.
TEST_F(FlightLogTest, ABatchKeepsItsNameInFiles) {
  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& comm) {
    at::Tensor x = at::full({6}, 1.0F), y = at::full({6}, 2.0F);
    const int other = 1 - comm->rank();
    comm->batch_isend_irecv(
        {{.is_send = true, .tensor = x, .peer = other}, {.is_send = false, .tensor = y, .peer = other}});
    comm->dump_flight_recorder(path_of(comm->rank()).string());
  });
  EXPECT_EQ(dump_of(0)["groups"][0]["entries"][0]["verb"], "batch_peer_to_peer");
}

TEST_F(FlightLogTest, AnErrorIsWrittenByEveryRank) {
  EXPECT_THROW(run_local_ranks(
                   2,
                   [&](const std::shared_ptr<Communicator>& comm) {
                     at::Tensor x = at::full({3 + comm->rank()}, 1.0F);
                     comm->barrier();
                     comm->all_reduce(x);
                   },
                   options()),
               CommError);
  for (int rank = 0; rank < 2; ++rank) {
    const json dump = dump_of(rank);
    EXPECT_THAT(dump["reason"].get<std::string>(), HasSubstr("float32[4]"));
    const json& last = dump["groups"][0]["entries"].back();
    EXPECT_EQ(last["seq"], 1);
    EXPECT_EQ(last["count"], 3 + rank);
    EXPECT_EQ(last["state"], "failed");
  }
}

TEST_F(FlightLogTest, ATimeOutIsWrittenToTheFolderOfTheEnvironment) {
  setenv("PHALANX_COMM_TRACE_DIR", (folder_ / "new" / "deep").c_str(), 1);
  run_local_ranks(1,
                  [&](const std::shared_ptr<Communicator>& comm) {
                    at::Tensor x = at::full({2}, 1.0F);
                    EXPECT_THROW(comm->recv(x, 0), CommError);
                  },
                  {.first_timeout = std::chrono::milliseconds(20)});
  unsetenv("PHALANX_COMM_TRACE_DIR");
  const json dump = json::parse(read_file(folder_ / "new" / "deep" / "rank_0.json"));
  EXPECT_THAT(dump["reason"].get<std::string>(), HasSubstr("timed out"));
  EXPECT_EQ(dump["groups"][0]["entries"][0]["verb"], "recv");
}

TEST_F(FlightLogTest, AFolderThatCannotBeWrittenHidesNoError) {
  write_file(folder_ / "file", "");
  EXPECT_THAT(error_text<CommError>([&] {
                run_local_ranks(1,
                                [&](const std::shared_ptr<Communicator>& comm) {
                                  comm->abort("enough");
                                  comm->barrier();
                                },
                                {.trace_folder = (folder_ / "file" / "below").string()});
              }),
              HasSubstr("enough"));
}

TEST_F(FlightLogTest, ASignalAsksAllRanksWhateverTheyDo) {
  std::atomic<Communicator*> rank_0{nullptr};
  run_local_ranks(
      2,
      [&](const std::shared_ptr<Communicator>& comm) {
        comm->barrier();
        if (comm->rank() == 0) rank_0 = comm.get();
        if (comm->rank() == 1) {
          // Is in no operation itself.
          const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
          const auto until = [&](const auto& condition) {
            while (!condition() && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
          };
          until([&] { return rank_0.load() != nullptr; });
          until([&] { return rank_0.load()->recent_operations().back().verb == "all_reduce"; });
          kill(getpid(), SIGQUIT);
          until([&] { return std::filesystem::exists(path_of(0)) && std::filesystem::exists(path_of(1)); });
        }
        comm->all_reduce(at::full({2}, 1.0F));
      },
      options());
  const json waiting = dump_of(0), absent = dump_of(1);
  EXPECT_EQ(waiting["reason"], "SIGQUIT");
  EXPECT_EQ(waiting["pid"], getpid());
  EXPECT_EQ(waiting["groups"][0]["entries"][1]["collective"], 1);
  EXPECT_EQ(absent["reason"], "SIGQUIT");
  EXPECT_EQ(absent["groups"][0]["entries"].size(), 1U);
}

// Nothing is written on an error or a signal, whatever the environment says; and neither ends a rank.
TEST_F(FlightLogTest, NothingIsWrittenWhereThatIsAskedFor) {
  auto asked = options();
  asked.trace_files = false;
  const auto elsewhere = folder_ / "of_the_environment";
  ::setenv("PHALANX_COMM_TRACE_DIR", elsewhere.c_str(), 1);
  const std::string errors = folder_.string() + ".stderr";
  const int kept = ::dup(STDERR_FILENO), file = ::open(errors.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
  ::dup2(file, STDERR_FILENO);
  const auto answers = [&] {
    const std::string said = read_file(errors), answer = "are not written, as [comm] trace_buf_size is 0";
    std::size_t count = 0;
    for (auto at = said.find(answer); at != std::string::npos; at = said.find(answer, at + 1)) ++count;
    return count;
  };
  std::size_t to_signal = 0;
  run_local_ranks(
      2,
      [&](const std::shared_ptr<Communicator>& comm) {
        comm->barrier();
        if (comm->rank() == 0) {
          kill(getpid(), SIGQUIT);
          const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
          while (answers() == 0 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
          to_signal = answers();
        }
        comm->barrier();
        EXPECT_GE(comm->recent_operations().size(), 2U);
        EXPECT_THROW(comm->all_reduce(at::full({comm->rank() + 1}, 1.0F)), CommError);
      },
      asked);
  ::unsetenv("PHALANX_COMM_TRACE_DIR");
  ::dup2(kept, STDERR_FILENO);
  ::close(kept);
  ::close(file);
  EXPECT_GE(to_signal, 1U);
  EXPECT_GT(answers(), to_signal) << "the error's own";
  std::filesystem::remove(errors);
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(FlightLogTest, PrefixCapacityAndMembersAreAsAskedFor) {
  auto asked = options();
  asked.trace_prefix = "job7_";
  asked.trace_capacity = 3;
  write_file(folder_ / "job7_2.json", "of an earlier run");
  EXPECT_THROW(run_local_ranks(
                   3,
                   [&](const std::shared_ptr<Communicator>& comm) {
                     for (int i = 0; i < 5; ++i) comm->barrier();
                     const auto last = comm->recent_operations();
                     ASSERT_EQ(last.size(), 3U);
                     EXPECT_EQ(last.back().collective, 4);
                     // The two last change places.
                     auto pair = comm->split(comm->rank() > 0 ? 5 : -1, -comm->rank(), "pair");
                     if (pair) pair->barrier();
                     if (comm->rank() == 2) comm->abort("enough");
                     comm->barrier();
                   },
                   asked),
               CommError);
  EXPECT_EQ(read_file(folder_ / "job7_2.json.previous"), "of an earlier run");
  const json dump = json::parse(read_file(folder_ / "job7_2.json"));
  EXPECT_EQ(dump["size"], 3);
  EXPECT_EQ(dump["groups"][0]["entries"].size(), 3U);
  EXPECT_EQ(dump["groups"][0]["members"], json({0, 1, 2}));
  EXPECT_EQ(dump["groups"][1]["members"], json({2, 1}));
  EXPECT_EQ(dump["groups"][1]["rank"], 0);
  EXPECT_EQ(dump["groups"][1]["id"], "world/0.5");
}

TEST_F(FlightLogTest, TheFirstFailureIsTheReasonOfWhatIsWrittenLater) {
  run_local_ranks(
      1,
      [&](const std::shared_ptr<Communicator>& comm) {
        auto other = comm->split(0, 0, "other");
        comm->abort("first");
        EXPECT_THROW(comm->barrier(), CommError);
        other->abort("second");
        EXPECT_THROW(other->barrier(), CommError);
      },
      options());
  EXPECT_THAT(dump_of(0)["reason"].get<std::string>(), HasSubstr("first"));
}

// An error destroys the communicator; then a signal has the file written again.
TEST_F(FlightLogTest, AGroupThatFailedStaysInWhatIsWrittenAfterItsEnd) {
  run_local_ranks(1, [&](const std::shared_ptr<Communicator>& comm) {
    for (int i = 0; i < 10; ++i) {
      auto other = comm->split(0, 0, fmt::format("other {}", i));
      other->barrier();
      other->abort("broken");
      EXPECT_THROW(other->barrier(), CommError);
    }
    const auto well = comm->split(0, 0, "well");
    well->barrier();
    comm->dump_flight_recorder(path_of(0).string());
  });
  const json dump = dump_of(0);
  std::vector<std::string> groups;
  for (const json& group : dump["groups"]) {
    groups.push_back(group["group"]);
    EXPECT_EQ(group["entries"].back()["state"], groups.back().starts_with("other") ? "failed" : "finished") << group;
  }
  ASSERT_EQ(groups.size(), 8U + 2) << json(groups);  // the last eight that failed, the world, and "well"
  EXPECT_EQ(groups.front(), "other 2");
  EXPECT_EQ(groups.back(), "well");
}

}  // namespace
}  // namespace phalanx
