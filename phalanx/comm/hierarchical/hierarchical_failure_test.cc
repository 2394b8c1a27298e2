// Two levels when ranks die or stop: while such a group is being made, beside a rank that stands still, and where the
// ranks of one "node" cannot see the processes of the other. The bounds are explained in fault_world.h.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <stdexcept>

#include "phalanx/base/error.h"
#include "phalanx/comm/backend.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/fault_world.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/comm/testing/forwarding_backend.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

constexpr auto kTold = 1000ms;  // after the fault

void require_words(const std::string& text, const std::string& words) {
  if (text.find(words) == std::string::npos)
    throw std::runtime_error(fmt::format("'{}' is not in the error: {}", words, text));
}

// A backend whose operations the test is told of: as one starts, by the thread that drives it, which may be kept there;
// and as one is done.
class ToldBackend final : public ForwardingBackend {
 public:
  using Tell = std::function<void(const OperationDescription&)>;
  ToldBackend(std::shared_ptr<Backend> below, Tell at_start, Tell at_end = {})
      : ForwardingBackend(std::move(below)), at_start_(std::move(at_start)), at_end_(std::move(at_end)) {}

  std::unique_ptr<Operation> start(const OperationDescription& description) override {
    at_start_(description);
    return std::make_unique<ForwardingOperation>(ForwardingBackend::start(description), [this, &description] {
      if (at_end_) at_end_(description);
    });
  }

 private:
  Tell at_start_, at_end_;
};

// Keeps the rank, once it has begun `number` operations, until it is killed.
ToldBackend::Tell stay_in(FaultRank& self, int number) {
  return [&self, left = number](const OperationDescription&) mutable {
    if (left-- > 0) return;
    self.arrive();
    self.await_go(1);
  };
}

std::shared_ptr<Communicator> gloo_world(const TcpStoreServer& server, int rank, int size,
                                         CommunicatorOptions options = {}) {
  return make_gloo_communicator(std::make_shared<TcpStore>(server.address()), rank, size,
                                {.communicator = std::move(options)});
}

// --- while a group is being made

// Kills a rank of three while they make a group. prepare(rank, store) brings a rank there, and returns what makes the
// group, which must fail with the victim's name. The victim arrives where it is to die, the others before.
std::string dies_while(int victim,
                       const std::function<std::function<void()>(FaultRank&, const TcpStoreServer&)>& prepare) {
  TcpStoreServer server;
  FaultWorld world(3, [&](FaultRank& self) {
    const std::function<void()> make = prepare(self, server);
    const std::string text = self.error_within(kTold, [&] {
      make();
      throw std::runtime_error("the group was made");
    });
    require_words(text, fmt::format("rank {} has died", victim));
  });
  for (int rank = 0; rank < 3; ++rank)
    if (!world.await(rank, 1)) return fmt::format("rank {} did not come", rank);
  world.strike(victim, SIGKILL);
  return world.finish();
}

// What the making of a two-level world consists of: two exchanges to prove the nodes, three for the shared memory,
// one for agreement; each of two operations of gloo.
constexpr int kOperationsOfMaking = 12;

std::string dies_in_making(int victim, int operation) {
  return dies_while(victim, [&](FaultRank& self, const TcpStoreServer& server) -> std::function<void()> {
    auto flat = gloo_world(server, self.rank(), 3);
    if (self.rank() == victim)
      flat = std::make_shared<Communicator>(std::make_shared<ToldBackend>(flat->backend(), stay_in(self, operation)),
                                            CommunicatorOptions{});
    else
      self.arrive();
    HierarchicalOptions options;
    options.hint = self.rank() < 2 ? "one" : "other";
    return [flat = std::move(flat), options]() mutable { make_hierarchical_communicator(std::move(flat), options); };
  });
}

TEST(HierarchicalGlooFaults, ARankThatDiesWhileTheGroupIsMadeIsNamed) {
  // Rank 1 shares a node with rank 0; rank 2 is alone.
  for (int operation = 0; operation < kOperationsOfMaking; ++operation) {
    const int victim = operation % 3 == 0 ? 2 : 1;
    EXPECT_EQ(again_if_late([&] { return dies_in_making(victim, operation); }), "")
        << "rank " << victim << ", operation " << operation;
  }
}

TEST(HierarchicalGlooFaults, TheMakingHasAsManyOperationsAsWereTried) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(
                3,
                [&](int rank) {
                  int begun = 0;
                  auto flat = gloo_world(server, rank, 3);
                  flat = std::make_shared<Communicator>(
                      std::make_shared<ToldBackend>(flat->backend(), [&](const OperationDescription&) { ++begun; }),
                      CommunicatorOptions{});
                  HierarchicalOptions options;
                  options.hint = rank < 2 ? "one" : "other";
                  const auto comm = make_hierarchical_communicator(std::move(flat), options);
                  if (begun != kOperationsOfMaking || comm->backend_name() != "shm+gloo")
                    throw std::runtime_error(fmt::format("{}, {} operations", comm->backend_name(), begun));
                }),
            "");
}

// A group of all ranks, split from a world of two levels: who belongs to it, shared memory, agreement.
std::string dies_in_split(int victim, int operation) {
  return dies_while(victim, [&](FaultRank& self, const TcpStoreServer& server) -> std::function<void()> {
    auto comm = make_hierarchical_communicator(gloo_world(server, self.rank(), 3),
                                               {.communicator = {}, .nodes = {0, 0, 1}, .hint = std::nullopt});
    comm->barrier();
    const bool is_victim = self.rank() == victim;
    if (!is_victim) self.arrive();
    comm = std::make_shared<Communicator>(
        std::make_shared<ToldBackend>(comm->backend(), stay_in(self, is_victim ? operation : 1'000)),
        CommunicatorOptions{});
    return [comm, rank = self.rank()] { comm->split(0, rank); };
  });
}

TEST(HierarchicalGlooFaults, ARankThatDiesWhileAGroupIsSplitIsNamed) {
  for (int operation = 0; operation < 8; ++operation) {
    const int victim = operation % 3 == 1 ? 2 : 1;
    EXPECT_EQ(again_if_late([&] { return dies_in_split(victim, operation); }), "")
        << "rank " << victim << ", operation " << operation;
  }
}

// --- in the middle of a collective

// Rank 1 waits for its neighbour, rank 0, to pass on what rank 2 of the other node sends. Rank 2 dies, and rank 0
// stands still, so that it tells rank 1 nothing: rank 1 must find out by itself.
TEST(HierarchicalGlooFaults, ARankInTheInnerStepHearsOfADeathOnAnotherNode) {
  const auto run = [] {
    TcpStoreServer server;
    FaultWorld world(3, [&](FaultRank& self) {
      const CommunicatorOptions options{.first_timeout = 100s};
      auto flat = gloo_world(server, self.rank(), 3, options);
      // Ranks 0 and 2 come to their message of the data, and no further. Rank 1 has no other business with gloo than
      // the comparison.
      const auto at_start = [&self](const OperationDescription& d) {
        if (d.transfers.empty()) return;
        self.arrive();
        self.await_go(1);
      };
      const auto at_end = [&self](const OperationDescription& d) {
        if (d.compare_only && self.rank() == 1) self.arrive();
      };
      flat = std::make_shared<Communicator>(std::make_shared<ToldBackend>(flat->backend(), at_start, at_end), options);
      const auto comm = make_hierarchical_communicator(
          std::move(flat), {.communicator = options, .nodes = {0, 0, 1}, .hint = std::nullopt, .smallest_bytes = 1});
      at::Tensor x = at::full({100'000}, 1.0F);
      const auto broadcast = [&] { comm->broadcast(x, {.root = 2}); };
      // Rank 0 goes on when rank 1 has its error.
      const std::string text = self.error_within(self.rank() == 0 ? 60s : std::chrono::seconds(kTold / 1s), broadcast);
      require_words(text, "rank 2 has died");
      require_words(text, "broadcast(float32[100000], root 2)");
    });
    for (int rank = 0; rank < 3; ++rank)
      if (!world.await(rank, 1)) return fmt::format("rank {} did not come", rank);
    world.strike(2, SIGKILL);
    if (!world.await_end(1)) return std::string("rank 1 has heard nothing");
    world.go(1);
    return world.finish();
  };
  EXPECT_EQ(again_if_late(run), "");
}

// --- ranks that cannot see each other's processes

// A PID namespace with a /proc of its own, kept by its first process. Whoever enters has its next children there.
class ProcessNamespace {
 public:
  /// Empty if there is one now; else why not.
  std::string make() {
    int end[2];
    if (pipe2(end, O_CLOEXEC) != 0) return "no pipe";
    maker_ = fork();
    if (maker_ == 0) make_and_keep(end[1]);
    close(end[1]);
    const std::string said = read_all(end[0]);
    if (said.empty() || said.find_first_not_of("0123456789") != std::string::npos)
      return said.empty() ? "its first process has died" : said;
    keeper_ = std::stoi(said);
    return {};
  }
  ~ProcessNamespace() {
    if (maker_ <= 0) return;
    kill(maker_, SIGKILL);  // the keeper dies with it, and with that whoever is in the namespace
    waitpid(maker_, nullptr, 0);
  }

  void enter() const {
    for (const char* name : {"pid", "mnt"}) {
      const int space = open(fmt::format("/proc/{}/ns/{}", keeper_, name).c_str(), O_RDONLY | O_CLOEXEC);
      if (space < 0 || setns(space, 0) != 0)
        throw std::runtime_error(fmt::format("setns({}): {}", name, std::strerror(errno)));
      close(space);
    }
  }

 private:
  static std::string read_all(int end) {
    std::array<char, 256> text{};
    std::size_t length = 0;
    for (ssize_t got = 1; got > 0 && length + 1 < text.size();
         length += static_cast<std::size_t>(std::max<ssize_t>(got, 0)))
      got = read(end, text.data() + length, text.size() - 1 - length);
    close(end);
    return text.data();
  }
  static void say(int end, const std::string& text) {
    if (write(end, text.data(), text.size()) < 0) _exit(1);
    close(end);
  }
  [[noreturn]] static void make_and_keep(int end) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int ready[2];
    if (unshare(CLONE_NEWPID | CLONE_NEWNS) != 0 || pipe2(ready, O_CLOEXEC) != 0) {
      say(end, fmt::format("unshare: {} (it needs root)", std::strerror(errno)));
      _exit(0);
    }
    const pid_t keeper = fork();
    if (keeper == 0) {
      close(end);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const bool is_mounted = mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                              mount("proc", "/proc", "proc", 0, nullptr) == 0;
      say(ready[1], is_mounted ? "" : fmt::format("mount of /proc: {}", std::strerror(errno)));
      while (is_mounted) pause();
      _exit(0);
    }
    close(ready[1]);
    const std::string failure_reason = read_all(ready[0]);
    say(end, failure_reason.empty() ? std::to_string(keeper) : failure_reason);
    waitpid(keeper, nullptr, 0);
    _exit(0);
  }

  pid_t maker_ = -1, keeper_ = -1;
};

// What ranks in the namespace write down for the test.
struct InnerRanks {
  std::array<std::atomic<pid_t>, 4> pids;
  std::array<std::array<char, 4096>, 4> errors;
};

// Runs body in a child of this process, which is in the namespace and dies with this one.
void run_in(const ProcessNamespace& space, InnerRanks& ranks, int rank, const std::function<void()>& body) {
  space.enter();
  const auto place = static_cast<std::size_t>(rank);
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int status = 0;
    try {
      body();
    } catch (const std::exception& e) {
      std::strncpy(ranks.errors[place].data(), e.what(), ranks.errors[place].size() - 1);
      status = 1;
    }
    _exit(status);
  }
  ranks.pids[place] = child;
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    throw std::runtime_error(WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status))
                                                 : std::string(ranks.errors[place].data()));
}

// Ranks 0 and 1 are here, 2 and 3 in the namespace: two nodes, by the proof.
class StrangersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = space_.make(); !why.empty())
      GTEST_SKIP() << "a PID namespace cannot be made here: " << why;
    inner_ = static_cast<InnerRanks*>(
        mmap(nullptr, sizeof(InnerRanks), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  }
  void TearDown() override {
    if (inner_ != nullptr) munmap(inner_, sizeof(InnerRanks));
  }

  // Every rank goes round in all_reduce until it is told of the end. victims: 2, or 2 and 3.
  std::string run(const std::vector<int>& victims, int signal, std::chrono::milliseconds heartbeat,
                  std::chrono::milliseconds bound, const std::string& words) {
    TcpStoreServer server;
    FaultWorld world(4, [&](FaultRank& self) {
      const auto body = [&] {
        const CommunicatorOptions options{.heartbeat = heartbeat};
        const auto comm = make_hierarchical_communicator(gloo_world(server, self.rank(), 4, options),
                                                         {.communicator = options, .smallest_bytes = 1});
        if (comm->backend_name() != "shm+gloo") throw std::runtime_error(std::string(comm->backend_name()));
        at::Tensor x = at::full({10'000}, 1.0F);
        comm->all_reduce(x);
        if (x.const_data_ptr<float>()[9'999] != 4) throw std::runtime_error("a wrong sum");
        const auto bytes = comm_volume(*comm->backend());
        if (!bytes || bytes->intra_node == 0 || bytes->inter_node == 0)
          throw std::runtime_error("a transport is not used");
        self.arrive();
        if (std::ranges::find(victims, self.rank()) != victims.end()) return self.await_go(1);
        const std::string text = self.error_within(bound, [&] { comm->all_reduce(x); });
        require_words(text, words);
        require_words(text, "all_reduce(float32[10000], sum)");
      };
      if (self.rank() < 2)
        body();
      else
        run_in(space_, *inner_, self.rank(), body);
    });
    for (int rank = 0; rank < 4; ++rank)
      if (!world.await(rank, 1)) return fmt::format("rank {} did not come", rank) + world.finish();
    if (signal == SIGKILL) {
      for (const int victim : victims) world.strike(victim, SIGKILL);  // the rank dies with its parent
      return world.finish();
    }
    // Notes the time; the parents have nothing to do but to wait.
    for (const int victim : victims) world.strike(victim, signal);
    for (const int victim : victims) kill(inner_->pids[static_cast<std::size_t>(victim)], signal);
    for (int rank = 0; rank < 2; ++rank)
      if (!world.await_end(rank)) return fmt::format("rank {} hangs", rank);
    world.go(1);
    for (const int victim : victims) {
      kill(inner_->pids[static_cast<std::size_t>(victim)], SIGCONT);
      world.send(victim, SIGCONT);
    }
    return world.finish();
  }

 private:
  ProcessNamespace space_;
  InnerRanks* inner_ = nullptr;
};
using HierarchicalGlooStrangers = StrangersTest;

TEST_F(HierarchicalGlooStrangers, ADeathIsNamed) {
  EXPECT_EQ(again_if_late([&] { return run({2}, SIGKILL, 5s, kTold, "rank 2 has died"); }), "");
}

// Nobody is left on the other node who could see it.
TEST_F(HierarchicalGlooStrangers, ASilentNodeIsNamed) {
  EXPECT_EQ(again_if_late([&] { return run({2, 3}, SIGSTOP, 2s, 4s, " has given no sign of life"); }), "");
}

}  // namespace
}  // namespace phalanx
