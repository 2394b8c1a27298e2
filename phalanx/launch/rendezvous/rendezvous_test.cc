// Slurm's lists, init methods, addresses and the rendezvous file: the tests that need no second process.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/rendezvous/init_method.h"
#include "phalanx/launch/rendezvous/launcher_variables.h"
#include "phalanx/launch/rendezvous/own_address.h"
#include "phalanx/launch/rendezvous/rendezvous_file.h"
#include "phalanx/launch/rendezvous/slurm_nodes.h"
#include "phalanx/store/job_secret.h"
#include "phalanx/store/testing/free_address.h"

namespace phalanx {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Rendezvous = WorkerEnvironment::Rendezvous;

TEST(SlurmNodesTest, ExpandsWhatSlurmWrites) {
  const auto nodes = [](const char* list) { return expand_slurm_nodes(list, "SLURM_JOB_NODELIST"); };
  EXPECT_THAT(nodes("login"), ElementsAre("login"));
  EXPECT_THAT(nodes("a,b-7,c.d"), ElementsAre("a", "b-7", "c.d"));
  EXPECT_THAT(nodes("node[01-03,7]"), ElementsAre("node01", "node02", "node03", "node7"));
  EXPECT_THAT(nodes("n[9-11]"), ElementsAre("n9", "n10", "n11"));
  EXPECT_THAT(nodes("n[098-101]"), ElementsAre("n098", "n099", "n100", "n101"));
  EXPECT_THAT(nodes("gpu[1-2]-ib,x[3]"), ElementsAre("gpu1-ib", "gpu2-ib", "x3"));
  EXPECT_THAT(nodes("r[1-2]n[3,5]s"), ElementsAre("r1n3s", "r1n5s", "r2n3s", "r2n5s"));
  EXPECT_THAT(nodes("[1-2]"), ElementsAre("1", "2"));
  EXPECT_EQ(nodes("n[0001-1024]").size(), 1024);
  EXPECT_EQ(first_slurm_node("c[012-300],d1", "X"), "c012");
}

TEST(SlurmNodesTest, SaysWhereAListIsWrong) {
  for (const char* list : {"", ",", "a,", ",a", "n[", "n[1", "n]", "n[]", "n[1-]", "n[-2]", "n[3-1]", "n[1,,2]",
                           "n[a-b]", "n[1-2", "n[1-99999999999]", "n[0-9999]m[0-9999]", "n[1-2]]"})
    EXPECT_THAT(error_with_kind([&] { expand_slurm_nodes(list, "SLURM_JOB_NODELIST"); }),
                AllOf(HasSubstr(fmt::format("ConfigError: SLURM_JOB_NODELIST is '{}': expected ", list)),
                      HasSubstr(" at character ")))
        << list;
}

TEST(SlurmNodesTest, ExpandsCounts) {
  const auto counts = [](const char* list) { return expand_slurm_counts(list, "SLURM_TASKS_PER_NODE"); };
  EXPECT_THAT(counts("4"), ElementsAre(4));
  EXPECT_THAT(counts("2(x3),1"), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(counts("1,16(x2)"), ElementsAre(1, 16, 16));
  for (const char* list : {"", "x", "2(", "2(x", "2(x)", "2(3)", "2(x3)4", "2,", "1(x99999999)"})
    EXPECT_THAT(error_with_kind([&] { counts(list); }), HasSubstr("SLURM_TASKS_PER_NODE is '")) << list;
}

// ---- init methods ----

WorkerEnvironment method(const std::string& text, int rank = -1, int world_size = -1,
                         const std::map<std::string, std::string>& variables = {}) {
  return resolve_init_method(text, rank, world_size, [&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(InitMethodTest, RankAndWorldSizeComeFromMethodCallerOrEnvironment) {
  const std::map<std::string, std::string> ranks{{"RANK", "1"}, {"WORLD_SIZE", "4"}};
  for (const WorkerEnvironment& environment :
       {method("tcp://node7:4000?rank=1&world_size=4"), method("tcp://node7:4000", 1, 4),
        method("tcp://node7:4000?world_size=4", 1), method("tcp://node7:4000?rank=1", 1, 4),
        method("tcp://node7:4000", -1, -1, ranks)}) {
    EXPECT_EQ(environment.rendezvous, Rendezvous::static_master);
    EXPECT_EQ(environment.rank, 1);
    EXPECT_EQ(environment.world_size, 4);
    EXPECT_EQ(environment.master.text(), "node7:4000");
    EXPECT_THAT(environment.launcher, EndsWith("tcp://node7:4000"));
  }
  EXPECT_EQ(method("tcp://[::1]:4000", 0, 2).master.host, "::1");
  const auto file = method("file:///shared/run7?rank=0&world_size=2");
  EXPECT_EQ(file.rendezvous, Rendezvous::shared_file);
  EXPECT_EQ(file.file_folder, "/shared");
  EXPECT_EQ(file.file_name, "run7");
  EXPECT_EQ(method("file:///shared/run7", -1, -1, ranks).rank, 1);
  EXPECT_EQ(method("tcp://node7:4000", 0, 1).rendezvous, Rendezvous::none);
  EXPECT_EQ(method("env://").rendezvous, Rendezvous::none);
  EXPECT_EQ(method("env://", -1, -1, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"PHALANX_STORE", "a:1"}}).launcher,
            "phalanx launch");
}

TEST(InitMethodTest, WhatIsWrongIsNamed) {
  const auto error = [](const std::string& text, int rank = -1, int world_size = -1,
                        const std::map<std::string, std::string>& variables = {}) {
    return error_with_kind([&] { method(text, rank, world_size, variables); });
  };
  EXPECT_THAT(error("udp://a:1", 0, 2), HasSubstr("expected env://, tcp://HOST:PORT or file:///PATH"));
  EXPECT_THAT(error("a:1", 0, 2), HasSubstr("expected env://"));
  EXPECT_THAT(error("tcp://a", 0, 2), AllOf(HasSubstr("'tcp://a'"), HasSubstr("expected host:port")));
  EXPECT_THAT(error("tcp://a:0", 0, 2), HasSubstr("port 0"));
  EXPECT_THAT(error("file://relative", 0, 2), HasSubstr("the whole path of a file"));
  EXPECT_THAT(error("file:///folder/", 0, 2), HasSubstr("the whole path of a file"));
  EXPECT_THAT(error("tcp://a:1"), HasSubstr("the rank and the world size are not given"));
  EXPECT_THAT(error("tcp://a:1?rank=0"), HasSubstr("the world size is not given"));
  EXPECT_THAT(error("tcp://a:1", -1, 4), HasSubstr("the rank is not given"));
  EXPECT_THAT(error("tcp://a:1?rnak=0", 0, 2), HasSubstr("'rnak' (did you mean 'rank'?)"));
  EXPECT_THAT(error("tcp://a:1?rank=x", 0, 2), HasSubstr("rank is 'x'"));
  EXPECT_THAT(error("tcp://a:1?rank=-1", 0, 2), HasSubstr("rank is '-1'"));
  EXPECT_THAT(error("tcp://a:1?rank=2&world_size=2"), HasSubstr("rank 2 and world size 2"));
  EXPECT_THAT(error("tcp://a:1?rank=1", 0, 2), HasSubstr("its rank is 1, and the program gives 0"));
  EXPECT_THAT(error("env://", 0, 2), HasSubstr("leave rank and world size out"));
  EXPECT_THAT(error("tcp://a:1?rank=0", -1, -1, {{"RANK", "1"}, {"WORLD_SIZE", "2"}}),
              HasSubstr("it says rank 0, and the variables RANK and WORLD_SIZE rank 1 of 2"));
}

// ---- addresses ----

TEST(OwnAddressTest, IsOneOfThisMachine) {
  const auto interfaces = network_interfaces();
  ASSERT_FALSE(interfaces.empty());
  for (const auto& own : interfaces) {
    EXPECT_EQ(address_of_interface(own.address, "X"), own.address);
    EXPECT_FALSE(address_of_interface(own.name, "X").empty());
  }
  EXPECT_THAT(error_with_kind([] { address_of_interface("no-such0", "PHALANX_SOCKET_IFNAME"); }),
              AllOf(HasSubstr("ConfigError: PHALANX_SOCKET_IFNAME is 'no-such0'"), HasSubstr(interfaces[0].address)));
  const std::string own = own_address();
  EXPECT_TRUE(own == "127.0.0.1" || std::any_of(interfaces.begin(), interfaces.end(),
                                                [&](const auto& entry) { return entry.address == own; }))
      << own;
  // A process that listens there can be reached.
  const UniqueFd listener = listen_on({own, 0});
  connect_to({own, local_port(listener.get())}, seconds(5), "itself");
}

TEST(LauncherVariablesTest, AnAncestorIsTheSameForAllItsDescendants) {
  const std::string parent = ancestor_identity("no process has this name");
  EXPECT_THAT(parent, testing::MatchesRegex("[0-9]+-[0-9]+"));
  std::string name;
  std::ifstream(fmt::format("/proc/{}/comm", getppid())) >> name;
  EXPECT_EQ(ancestor_identity(name), parent);
}

// ---- the rendezvous file ----

class RendezvousFileTest : public testing::Test {
 protected:
  TempDirectory folder_{"rendezvous"};
  RendezvousFile file_{(folder_.path() / "rendezvous").string()};
};

TEST_F(RendezvousFileTest, CarriesAddressAndSecretPrivately) {
  EXPECT_FALSE(file_.read().has_value());
  const std::string secret = generate_job_secret();
  TcpStoreServer server({.secret = secret});
  std::thread late([&] { file_.publish({server.address(), secret}); });
  const auto store = file_.connect(seconds(20), "");
  late.join();
  store->set("k", "v");
  EXPECT_EQ(store->get("k"), "v");
  struct stat status {};
  ASSERT_EQ(stat(file_.path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600);
  file_.remove();
  EXPECT_FALSE(file_.read().has_value());
}

TEST_F(RendezvousFileTest, ASecretFromTheEnvironmentStaysOutOfIt) {
  const std::string secret = generate_job_secret();
  TcpStoreServer server({.secret = secret});
  file_.publish({server.address(), ""});
  EXPECT_EQ(file_.connect(seconds(20), secret)->server().text(), server.address().text());
  EXPECT_THAT(error_with_kind([&] { file_.connect(seconds(20), ""); }),
              AllOf(HasSubstr("ConfigError"), HasSubstr("this one has none: set PHALANX_JOB_SECRET")));
}

// The file of a crashed job is tried, found to be stale, and read again until rank 0 has replaced it.
TEST_F(RendezvousFileTest, AStaleFileDoesNoHarm) {
  const HostPort gone = free_address();
  file_.publish({gone, generate_job_secret()});
  const std::string secret = generate_job_secret();
  TcpStoreServer server({.secret = secret});
  std::shared_ptr<TcpStore> store;
  std::thread reader([&] { store = file_.connect(seconds(20), ""); });
  EXPECT_THAT(error_with_kind([&] { file_.connect(milliseconds(50), ""); }),
              AllOf(HasSubstr("CommError: rank 0 was not reached within 0.05 s"), HasSubstr(gone.text())));
  file_.publish({server.address(), secret});
  reader.join();
  ASSERT_TRUE(store);
  EXPECT_EQ(store->server().text(), server.address().text());
}

TEST_F(RendezvousFileTest, SaysWhatIsMissingOrWrong) {
  EXPECT_THAT(error_with_kind([&] { file_.connect(milliseconds(30), ""); }),
              AllOf(HasSubstr("CommError: rank 0 has not come within 0.03 s"), HasSubstr(file_.path()),
                    HasSubstr("PHALANX_RENDEZVOUS_DIR")));
  write_private_file(file_.path(), "notes of mine\n");
  EXPECT_THAT(error_with_kind([&] { file_.read(); }), HasSubstr("was not written by a Phalanx rank"));
  file_.publish({{"127.0.0.1", 1}, "x"});
  ASSERT_EQ(chmod(file_.path().c_str(), 0644), 0);
  EXPECT_THAT(error_with_kind([&] { file_.read(); }),
              AllOf(HasSubstr("ConfigError: the rendezvous file"), HasSubstr("mode 0644")));
  const RendezvousFile nowhere((folder_.path() / "no" / "file").string());
  EXPECT_THAT(error_with_kind([&] { nowhere.publish({{"127.0.0.1", 1}, ""}); }), HasSubstr("cannot create"));
}

TEST_F(RendezvousFileTest, ThePrivateFolderIsPrivate) {
  ASSERT_EQ(setenv("TMPDIR", folder_.path().c_str(), 1), 0);
  const std::string path = private_temp_folder();
  EXPECT_EQ(private_temp_folder(), path);
  ASSERT_EQ(chmod(path.c_str(), 0755), 0);
  EXPECT_THAT(error_with_kind([] { private_temp_folder(); }), HasSubstr("is to be a folder of mode 0700"));
  std::filesystem::remove(path);
  std::filesystem::create_symlink("/tmp", path);
  EXPECT_THAT(error_with_kind([] { private_temp_folder(); }), HasSubstr("is to be a folder of mode 0700"));
  unsetenv("TMPDIR");
}

}  // namespace
}  // namespace phalanx
