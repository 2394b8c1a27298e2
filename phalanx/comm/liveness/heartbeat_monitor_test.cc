// Monitors without a backend: what they cost, and what the ranks of a world and of its groups tell each other.
#include "phalanx/comm/liveness/heartbeat_monitor.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/comes_true.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/store/hash_store.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/testing/tcp_proxy.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

/// The threads of this process that monitor ranks. One that was joined may be there for a moment.
int monitor_threads() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
    count += name == "phalanx-monitor";
  }
  return count;
}

/// The connections of this process to the server.
int connections_to(const HostPort& server) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    sockaddr_in peer{};
    socklen_t size = sizeof peer;
    if (getpeername(std::stoi(entry.path().filename()), reinterpret_cast<sockaddr*>(&peer), &size) == 0)
      count += peer.sin_family == AF_INET && ntohs(peer.sin_port) == server.port;
  }
  return count;
}

/// Makes both wait in their group until each has read what the other waits for.
void exchange_states(HeartbeatMonitor& a, HeartbeatMonitor& b, const std::string& text) {
  a.wait_in(text + " of a");
  b.wait_in(text + " of b");
  const std::vector<std::string> both{text + " of a", text + " of b"};
  EXPECT_TRUE(comes_true([&] { return a.states() == both && b.states() == both; })) << text;
  a.end_wait();
  b.end_wait();
}

/// A HashStore whose waiting calls go through a function first. It may return the answer, or throw.
class ScriptedStore final : public Store {
 public:
  using Keys = std::vector<std::string>;
  using Script = std::function<std::optional<Keys>(const Keys& keys)>;
  explicit ScriptedStore(Script script, std::shared_ptr<Store> base = std::make_shared<HashStore>())
      : Store(base->timeout()), base_(std::move(base)), script_(std::move(script)) {}
  std::string describe() const override { return base_->describe(); }
  std::shared_ptr<Store> clone() const override { return std::make_shared<ScriptedStore>(script_, base_->clone()); }

 private:
  void do_set(const std::string& key, const std::string& value) override { base_->set(key, value); }
  std::optional<std::string> do_try_get(const std::string& key) override { return base_->try_get(key); }
  std::int64_t do_add(const std::string& key, std::int64_t amount) override { return base_->add(key, amount); }
  std::vector<std::string> do_wait(const Keys& keys, WaitFor mode, Milliseconds timeout) override {
    if (auto answer = script_(keys)) return *answer;
    if (mode == WaitFor::any) return {base_->wait_any(keys, timeout)};
    return base_->get_all(keys, timeout);
  }
  std::optional<std::string> do_compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                                                const std::string& desired) override {
    return base_->compare_and_set(key, expected, desired);
  }
  bool do_delete(const std::string& key) override { return base_->delete_key(key); }
  void do_set_when_lost(const std::string& key, const std::optional<std::string>& value) override {
    if (value) base_->set_when_lost(key, *value);
  }
  void do_interrupt(std::chrono::steady_clock::time_point at) noexcept override {
    base_->interrupt(std::chrono::ceil<Milliseconds>(at - std::chrono::steady_clock::now()));
  }

  std::shared_ptr<Store> base_;
  Script script_;
};

struct TwoMonitors {
  explicit TwoMonitors(const std::function<std::shared_ptr<Store>()>& client,
                       const HeartbeatMonitor::Options& options = {})
      : a(HeartbeatMonitor(client(), 0, 2, options)), b(HeartbeatMonitor(client(), 1, 2, options)) {
    const std::vector<std::string> identities{ProcessProbe::identity(), ProcessProbe::identity()};
    a->observe(identities);
    b->observe(identities);
  }
  std::optional<HeartbeatMonitor> a, b;
};

TEST(HeartbeatMonitorTest, AWorldAndItsGroupsHaveOneThreadAndOneClientARank) {
  TcpStoreServer server;
  std::vector<std::shared_ptr<Store>> clients;
  for (int rank = 0; rank < 2; ++rank) clients.push_back(std::make_shared<TcpStore>(server.address()));
  ASSERT_EQ(connections_to(server.address()), 2);
  int next = 0;
  TwoMonitors two([&] { return clients[static_cast<std::size_t>(next++)]; });
  exchange_states(*two.a, *two.b, "world");
  EXPECT_EQ(monitor_threads(), 2);
  // Two a rank: for requests, and for the store to notice its end.
  EXPECT_EQ(connections_to(server.address()), 2 + 4);
  std::vector<HeartbeatMonitor> groups;
  for (std::uint64_t serial = 0; serial < 4; ++serial) {
    groups.push_back(two.a->split(serial, {0, 1}, 0));
    groups.push_back(two.b->split(serial, {0, 1}, 1));
    exchange_states(groups[2 * serial], groups[2 * serial + 1], fmt::format("group {}", serial));
  }
  EXPECT_EQ(monitor_threads(), 2);
  EXPECT_EQ(connections_to(server.address()), 2 + 4);
  two.a.reset();
  two.b.reset();
  EXPECT_EQ(monitor_threads(), 2) << "the groups still need them";
  groups.clear();
  EXPECT_TRUE(comes_true([] { return monitor_threads() == 0; }));
  EXPECT_EQ(connections_to(server.address()), 2);
}

TEST(HeartbeatMonitorTest, CommunicatorsOfAJobShareOneThreadAndOneClient) {
  TcpStoreServer server;
  EXPECT_EQ(
      run_forked_ranks(
          3,
          [&](int rank) {
            const auto world = make_gloo_communicator(std::make_shared<TcpStore>(server.address()), rank, 3);
            world->barrier();
            const int connections = connections_to(server.address());
            std::vector<std::shared_ptr<Communicator>> groups;
            for (int k = 0; k < 3; ++k) groups.push_back(world->split(k == 1 ? rank % 2 : 0, rank));
            for (const auto& group : groups) group->barrier();
            if (!comes_true([] { return monitor_threads() == 1; }) || connections_to(server.address()) != connections)
              throw CommError(fmt::format("{} threads, {} connections, {} before the groups", monitor_threads(),
                                          connections_to(server.address()), connections));
          }),
      "");
}

TEST(HeartbeatMonitorTest, AWorldOfOneHasNoThread) {
  HeartbeatMonitor alone(std::make_shared<HashStore>(), 0, 1, {.connect_timeout = 1s});
  EXPECT_THAT(alone.join(ProcessProbe::identity()), ElementsAre(ProcessProbe::identity()));
  alone.check_wait("itself");
  EXPECT_THAT(alone.behind(0), IsEmpty());
  EXPECT_TRUE(comes_true([] { return monitor_threads() == 0; }));
}

TEST(HeartbeatMonitorTest, TheFirstReasonToGiveAGroupUpStaysAndIsTheGroupsOwn) {
  const auto store = std::make_shared<HashStore>();
  TwoMonitors two([&] { return store; });
  HeartbeatMonitor group_a = two.a->split(0, {0, 1}, 0), group_b = two.b->split(0, {0, 1}, 1);
  group_a.announce_abort("first\nof two lines");
  ASSERT_TRUE(comes_true([&] { return !group_b.announced_abort().empty(); }));
  group_b.announce_abort("second");
  two.b->announce_abort("of the world");
  ASSERT_TRUE(comes_true([&] { return !two.a->announced_failure().empty(); }));
  for (const HeartbeatMonitor& group : {group_a, group_b}) {
    EXPECT_EQ(group.announced_abort(), "rank 0 gave up: first\nof two lines");
    EXPECT_EQ(group.failure_reason(), group.announced_abort());
  }
  EXPECT_EQ(two.a->failure_reason(), "rank 1 gave up: of the world");
}

TEST(HeartbeatMonitorTest, WhoIsBehindIsAskedByTheGroupsRanks) {
  const auto store = std::make_shared<HashStore>();
  TwoMonitors two([&] { return store; });
  // Rank 0 of the group is rank 1 of the world.
  HeartbeatMonitor group_a = two.a->split(3, {1, 0}, 1), group_b = two.b->split(3, {1, 0}, 0);
  for (int k = 0; k < 2; ++k) group_a.begin_collective();
  EXPECT_THAT(group_a.behind(0), ElementsAre(0));
  group_b.begin_collective();
  EXPECT_THAT(group_a.behind(0), IsEmpty());
  EXPECT_THAT(group_a.behind(1), ElementsAre(0));
  EXPECT_THAT(two.a->behind(0), ElementsAre(1)) << "the world has its own count";
}

// The store is asked for news most of the time. Neither that nor many notices may keep the heartbeats back.
TEST(HeartbeatMonitorTest, NoticesDoNotKeepHeartbeatsBack) {
  TcpStoreServer server;
  TwoMonitors two([&] { return std::make_shared<TcpStore>(server.address()); }, {.heartbeat = 2000ms});
  TcpStore reader(server.address());
  const auto beats = [&] { return std::stoi(reader.get("pulse/1")); };
  const int before = beats();
  int notices = 0;
  EXPECT_TRUE(comes_true([&] {
    two.a->announce_abort("again");
    ++notices;
    return beats() >= before + 3;
  }));
  EXPECT_GT(notices, 3);
}

TEST(HeartbeatMonitorTest, ARankThatLeavesHasNotDied) {
  TcpStoreServer server;
  TwoMonitors two([&] { return std::make_shared<TcpStore>(server.address()); });
  two.b.reset();
  ASSERT_TRUE(comes_true([&] { return !two.a->who_left().empty(); }));
  EXPECT_EQ(two.a->who_left(), "rank 1 has ended, or closed the communicator");
  EXPECT_FALSE(two.a->has_lost_rank());
  EXPECT_EQ(two.a->failure_reason(), "");
}

// Between "there is news of rank 0" and the news the store ends.
TEST(HeartbeatMonitorTest, AStoreHostThatLeavesHasNotDied) {
  std::atomic<bool> has_ended{false};
  const auto store = std::make_shared<ScriptedStore>([&](const std::vector<std::string>& keys) {
    has_ended = has_ended || keys == std::vector<std::string>{"lost/0"};
    if (has_ended) throw CommError("the connection broke");
    return std::nullopt;
  });
  TwoMonitors two([&] { return store; }, {.store_rank = 0});
  two.a.reset();
  ASSERT_TRUE(comes_true([&] { return !two.b->who_left().empty(); })) << two.b->failure_reason();
  EXPECT_EQ(two.b->who_left(), "rank 0 has ended, or closed the communicator");
  ASSERT_TRUE(comes_true([&] { return !two.b->disconnect_reason().empty(); }));
  EXPECT_EQ(two.b->failure_reason(), "");
}

TEST(HeartbeatMonitorTest, ARequestThatNoStoreCanServeDoesNotLoseTheStore) {
  const auto store = std::make_shared<HashStore>();
  TwoMonitors two([&] { return store; });
  two.a->wait_in(std::string(Store::kMaxValueBytes, 'x'));  // with its heartbeat, too long for a value
  // Rank 0 hears of one notice at a time, with a heartbeat before each. So at the second it has tried to write one.
  for (std::uint64_t serial = 0; serial < 2; ++serial) {
    const HeartbeatMonitor hears = two.a->split(serial, {0, 1}, 0);
    two.b->split(serial, {0, 1}, 1).announce_abort("enough");
    ASSERT_TRUE(comes_true([&] { return !hears.announced_abort().empty(); })) << two.a->disconnect_reason();
  }
  two.a->end_wait();
  exchange_states(*two.a, *two.b, "world");
  EXPECT_EQ(two.a->disconnect_reason(), "");
}

// A tick is 100 ms.
TEST(HeartbeatMonitorTest, ARefusedRequestIsNotRepeatedWithoutAPause) {
  std::atomic<int> requests{0};
  const auto store = std::make_shared<ScriptedStore>(
      [&](const std::vector<std::string>& keys) -> std::optional<std::vector<std::string>> {
        if (!keys.front().starts_with("event/")) return std::nullopt;
        ++requests;
        throw StoreRequestError("too many keys");
      });
  const auto begin = std::chrono::steady_clock::now();
  const HeartbeatMonitor monitor(store, 0, 2, {});
  ASSERT_TRUE(comes_true([&] { return requests >= 4; }));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 200ms);
}

TEST(HeartbeatMonitorTest, ALargeWorldAsksLessOftenForRanksThatAreMissing) {
  std::atomic<int> requests{0};
  const auto store = std::make_shared<ScriptedStore>(
      [&](const std::vector<std::string>& keys) -> std::optional<std::vector<std::string>> {
        requests += keys.front() == "world/rank/0";
        return std::nullopt;
      });
  HeartbeatMonitor monitor(store, 0, 200, {.backend = "gloo", .connect_timeout = 1200ms});
  EXPECT_THAT(error_text([&] { monitor.join("mine"); }), HasSubstr("have not come within 1.2 s"));
  EXPECT_LE(requests, 4);  // 600 ms each
}

// In a world of 1,000 ranks, one look at the heartbeats takes longer than a rank may be silent. Only two ticks of that
// count against the others.
TEST(HeartbeatMonitorTest, ALongLookInALargeWorldCountsLittleAgainstTheOthers) {
  constexpr std::size_t kSize = 1'000;
  std::atomic<int> looks{0};
  const auto store = std::make_shared<ScriptedStore>([&](const std::vector<std::string>& keys) {
    std::optional<std::vector<std::string>> beats;
    if (keys.front() != "pulse/0") return beats;
    const int look = ++looks;
    if (look == 3) std::this_thread::sleep_for(700ms);
    beats.emplace(kSize, fmt::format("{}\n", look == 3 ? 2 : look));  // the third look finds the beats of the second
    return beats;
  });
  HeartbeatMonitor a(store, 0, kSize, {.heartbeat = 1000ms, .store_rank = 2});  // not rank 1, which the test asks for
  a.observe(std::vector<std::string>(kSize));
  a.wait_in("others");
  ASSERT_TRUE(comes_true([&] {
    EXPECT_EQ(a.silence_reason(1), "");
    return looks >= 5;
  }));
}

// The connection breaks while no request is in progress: after it has been silent for longer than any answer takes, and
// while each attempt to connect again is taken and closed.
TEST(HeartbeatMonitorTest, AStoreThatIsLostAfterASilenceIsLost) {
  TcpStoreServer server;
  TcpProxy link(server.address());
  HeartbeatMonitor a(std::make_shared<TcpStore>(link.address()), 0, 2, {});
  link.stall();
  ASSERT_TRUE(comes_true([&] { return a.is_store_silent(); }));
  EXPECT_THAT(a.disconnect_reason(), HasSubstr(" has not answered this rank for "));
  // An answer takes 5.1 s at the most. The monitor says how long it has had none.
  const auto seconds_of_silence = [&] {
    const std::string reason = a.disconnect_reason(), before = "has not answered this rank for ";
    const std::size_t at = reason.find(before);
    return at == std::string::npos ? 0 : std::stod(reason.substr(at + before.size()));
  };
  ASSERT_TRUE(comes_true([&] { return seconds_of_silence() > 6; })) << a.disconnect_reason();
  link.cut();
  link.resume();
  ASSERT_TRUE(comes_true([&] { return a.disconnect_reason().find("has lost its connection") != std::string::npos; }));
}

TEST(HeartbeatMonitorTest, RanksThatDoNotComeAreNamed) {
  HeartbeatMonitor a(std::make_shared<HashStore>(), 0, 3, {.backend = "gloo", .connect_timeout = 50ms});
  EXPECT_EQ(error_text<CommError>([&] { a.join(ProcessProbe::identity()); }),
            "gloo: in-process store: of the 3 ranks of group 'world' these have not come within 0.05 s: 1, 2");
}

}  // namespace
}  // namespace phalanx
