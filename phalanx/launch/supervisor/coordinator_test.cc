// The coordinator's decisions, without sockets, processes and real time; and the messages and reports that it passes
// on.
#include "phalanx/launch/supervisor/coordinator.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <csignal>
#include <tuple>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/supervisor/worker_failure.h"

namespace phalanx {
namespace {

using Kind = NodeMessage::Kind;
using namespace std::chrono_literals;

WorkerFailure failure_of(int rank, double time_s, const std::string& kind = "ConfigError") {
  WorkerFailure failure;
  failure.rank = rank;
  failure.local_rank = rank;
  failure.host = fmt::format("host{}", rank);
  failure.pid = 100 + rank;
  failure.exit_status = 1;
  failure.kind = kind;
  failure.message = fmt::format("error of rank {}", rank);
  failure.time_s = time_s;
  return failure;
}

// A coordinator with a clock that the test controls.
class Scene {
 public:
  explicit Scene(CoordinatorOptions options) : options_(std::move(options)), coordinator_(options_, now) {}

  void join(int member, int ranks = 2, int node_rank = -1, bool is_host = false) {
    NodeMessage message;
    message.join.host = fmt::format("host{}", member);
    message.join.pid = 1000 + member;
    message.join.local_world_size = ranks;
    message.join.node_rank = node_rank;
    message.join.is_host = is_host || member == 0;
    message.join.run_id = options_.run_id;
    message.join.min_nodes = options_.min_nodes;
    message.join.max_nodes = options_.max_nodes;
    message.join.max_restarts = options_.max_restarts;
    if (change_join) change_join(message.join);
    coordinator_.handle(member, message, now);
  }
  void say(int member, Kind kind, std::vector<WorkerFailure> failures = {}) {
    NodeMessage message{.kind = kind, .round = round};
    message.failures = std::move(failures);
    message.signal = SIGTERM;
    coordinator_.handle(member, message, now);
  }
  void lose(int member) { coordinator_.lost(member, "no sign of life for 15 s", 15s, now); }
  void wait(std::chrono::milliseconds time) {
    now += time;
    coordinator_.tick(now);
  }
  /// Returns the next orders. A prepare order is answered, and its round becomes the round of say().
  std::vector<Order> orders() {
    std::vector<Order> result;
    for (auto batch = coordinator_.take_orders(); !batch.empty(); batch = coordinator_.take_orders())
      for (Order& order : batch) {
        if (order.kind == Order::Kind::prepare) {
          round = order.round;
          NodeMessage rendezvous{.kind = Kind::rendezvous, .round = round};
          rendezvous.store = "10.0.0.1:4000";
          coordinator_.handle(order.member, rendezvous, now);
        } else {
          result.push_back(std::move(order));
        }
      }
    return result;
  }
  /// Expects exactly one order of this kind and returns it.
  Order one(Order::Kind kind) {
    auto all = orders();
    EXPECT_EQ(all.size(), 1U);
    if (all.size() != 1U) return {};
    EXPECT_EQ(static_cast<int>(all.front().kind), static_cast<int>(kind)) << all.front().text;
    return all.front();
  }
  Coordinator& coordinator() { return coordinator_; }

  Coordinator::Clock::time_point now{};
  int round = 0;
  std::function<void(NodeJoin&)> change_join;

 private:
  CoordinatorOptions options_;
  Coordinator coordinator_;
};

std::vector<std::string> assignments_of(const Order& order) {
  std::vector<std::string> result;
  for (const NodeAssignment& assignment : order.assignments)
    result.push_back(fmt::format("{}: node {} ranks {}+{}", assignment.host, assignment.node_rank,
                                 assignment.first_rank, assignment.local_world_size));
  return result;
}

// Runs the first round of a job with two nodes up to its start.
void assign_two(Scene& scene) {
  scene.join(0);
  scene.join(1);
  ASSERT_EQ(scene.one(Order::Kind::start).assignments.size(), 2U);
}

TEST(CoordinatorTest, RanksAreNumberedByTheNodesBeforeThem) {
  Scene scene({.min_nodes = 3, .max_nodes = 3, .fixed_node_ranks = true});
  scene.join(0, 2, /*node_rank=*/2);
  scene.join(1, 3, 0);
  EXPECT_THAT(scene.orders(), IsEmpty());
  scene.join(2, 1, 1);
  const Order start = scene.one(Order::Kind::start);
  EXPECT_THAT(assignments_of(start),
              ElementsAre("host1: node 0 ranks 0+3", "host2: node 1 ranks 3+1", "host0: node 2 ranks 4+2"));
  EXPECT_EQ(start.store, "10.0.0.1:4000");
}

TEST(CoordinatorTest, ADynamicRoundWaitsForTheLastCall) {
  Scene scene({.min_nodes = 2, .max_nodes = 4, .last_call = 30s});
  scene.join(1);
  scene.join(0);
  scene.wait(29s);
  EXPECT_THAT(scene.orders(), IsEmpty());
  scene.join(2);
  scene.wait(1s);
  EXPECT_THAT(assignments_of(scene.one(Order::Kind::start)),
              ElementsAre("host0: node 0 ranks 0+2", "host1: node 1 ranks 2+2", "host2: node 2 ranks 4+2"));
}

TEST(CoordinatorTest, WhoDoesNotComeIsNamed) {
  Scene fixed(
      {.min_nodes = 4, .max_nodes = 4, .fixed_node_ranks = true, .join_timeout = 60s, .address = "10.0.0.1:29500"});
  fixed.join(0, 1, 0);
  fixed.join(1, 1, 2);
  fixed.wait(60s);
  Order end = fixed.one(Order::Kind::end);
  EXPECT_EQ(end.exit_status, 1);
  EXPECT_EQ(
      end.failures.front().message,
      "rendezvous at 10.0.0.1:29500: within 60 s of 4 nodes these have not come: node ranks 1, 3 (those that came: 0 "
      "on host0, 2 on host1)");
  Scene dynamic({.min_nodes = 3, .max_nodes = 4, .join_timeout = 1500ms, .address = "n:1"});
  dynamic.join(0);
  dynamic.wait(1500ms);
  EXPECT_EQ(dynamic.one(Order::Kind::end).failures.front().message,
            "rendezvous at n:1: within 1.5 s 1 of at least 3 nodes have come: host0");
}

TEST(CoordinatorTest, NodesThatDoNotFitAreToldWhy) {
  Scene scene({.min_nodes = 2, .max_nodes = 2, .fixed_node_ranks = true, .run_id = "a", .address = "n:1"});
  scene.join(0, 1, 0);
  const auto refusal = [&](int node_rank, std::function<void(NodeJoin&)> change) {
    scene.change_join = std::move(change);
    scene.join(1, 1, node_rank);
    scene.change_join = nullptr;
    const Order order = scene.one(Order::Kind::refuse);
    EXPECT_EQ(order.member, 1);
    return order.text;
  };
  EXPECT_EQ(refusal(0, nullptr),
            "--node-rank 0 was given twice: host0 (process 1000) has it already (rendezvous at n:1)");
  EXPECT_THAT(refusal(1, [](NodeJoin& join) { join.min_nodes = join.max_nodes = 3; }),
              HasSubstr("--nnodes 3 and the host of n:1 with 2"));
  EXPECT_THAT(refusal(1, [](NodeJoin& join) { join.run_id = "b"; }),
              HasSubstr("--rdzv-id b and the host of n:1 with a"));
  EXPECT_THAT(refusal(1, [](NodeJoin& join) { join.max_restarts = 9; }), HasSubstr("--max-restarts 9"));
  EXPECT_THAT(refusal(-1, nullptr), HasSubstr("backend c10d and the host of n:1 with static"));
  scene.join(2, 1, 1);
  EXPECT_EQ(scene.one(Order::Kind::start).assignments.size(), 2U);
}

TEST(CoordinatorTest, AFailureRestartsAllWhileRestartsAreLeft) {
  Scene scene({.min_nodes = 2, .max_nodes = 2, .max_restarts = 1});
  scene.join(0);
  scene.join(1);
  EXPECT_EQ(scene.one(Order::Kind::start).restarts, 0);
  scene.say(1, Kind::failed, {failure_of(3, 10)});
  EXPECT_THAT(scene.one(Order::Kind::stop).text, HasSubstr("error of rank 3\nall ranks restart (restart 1 of 1)"));
  scene.say(1, Kind::stopped, {failure_of(3, 10)});
  EXPECT_THAT(scene.orders(), IsEmpty());
  scene.say(0, Kind::stopped);
  EXPECT_EQ(scene.one(Order::Kind::start).restarts, 1);
  EXPECT_EQ(scene.round, 2);
  // The second failure ends the job. The cause is the earliest failure of all nodes that is not a CommError.
  scene.say(0, Kind::failed, {failure_of(0, 10, "CommError")});
  EXPECT_EQ(scene.one(Order::Kind::stop).text, "");
  scene.say(0, Kind::stopped, {failure_of(0, 10, "CommError"), failure_of(1, 12)});
  scene.say(1, Kind::stopped, {failure_of(3, 11)});
  const Order end = scene.one(Order::Kind::end);
  ASSERT_EQ(end.failures.size(), 3U);
  EXPECT_EQ(end.failures[0].rank, 3);
  EXPECT_EQ(end.failures[1].rank, 1);
  EXPECT_EQ(end.failures[2].rank, 0);
}

TEST(CoordinatorTest, AllIsWellWhenAllNodesSaySo) {
  Scene scene({.min_nodes = 2, .max_nodes = 2});
  scene.join(0);
  scene.join(1);
  scene.one(Order::Kind::start);
  scene.say(1, Kind::succeeded);
  EXPECT_THAT(scene.orders(), IsEmpty());
  scene.say(0, Kind::succeeded);
  const Order end = scene.one(Order::Kind::end);
  EXPECT_EQ(end.exit_status, 0);
  EXPECT_THAT(end.failures, IsEmpty());
}

TEST(CoordinatorTest, ANodeThatSucceededRunsAgainIfAnotherFails) {
  Scene scene({.min_nodes = 2, .max_nodes = 2, .max_restarts = 1});
  scene.join(0);
  scene.join(1);
  scene.one(Order::Kind::start);
  scene.say(0, Kind::succeeded);
  scene.say(1, Kind::failed, {failure_of(2, 1)});
  scene.one(Order::Kind::stop);
  scene.say(1, Kind::stopped, {failure_of(2, 1)});
  EXPECT_EQ(scene.one(Order::Kind::start).assignments.size(), 2U);
}

TEST(CoordinatorTest, ALateNodeCostsNoRestart) {
  Scene scene({.min_nodes = 1, .max_nodes = 2, .max_restarts = 0, .last_call = 1s});
  scene.join(0);
  scene.wait(1s);
  EXPECT_EQ(scene.one(Order::Kind::start).assignments.size(), 1U);
  scene.join(1);
  EXPECT_EQ(scene.one(Order::Kind::stop).text, "the node host1 has come: all ranks restart");
  scene.say(0, Kind::stopped);
  const Order start = scene.one(Order::Kind::start);
  EXPECT_EQ(start.assignments.size(), 2U);
  EXPECT_EQ(start.restarts, 0);
  // A third node waits. It joins when another is lost; that counts as a restart.
  scene.join(2);
  EXPECT_THAT(scene.orders(), IsEmpty());
}

TEST(CoordinatorTest, ALostNodeIsAFailureAndAWaitingOneStepsIn) {
  Scene scene({.min_nodes = 2, .max_nodes = 2, .max_restarts = 1});
  scene.join(0);
  scene.join(1);
  scene.one(Order::Kind::start);
  scene.join(2);
  scene.lose(1);
  const auto orders = scene.orders();
  ASSERT_EQ(orders.size(), 2U);
  EXPECT_EQ(orders[0].kind, Order::Kind::refuse);
  EXPECT_EQ(orders[0].member, 1);
  EXPECT_THAT(orders[1].text,
              AllOf(StartsWith("the node host1 (process 1001) with ranks 2 to 3 was lost: no sign of life"),
                    HasSubstr("restart 1 of 1")));
  scene.say(0, Kind::stopped);
  const Order start = scene.one(Order::Kind::start);
  EXPECT_THAT(assignments_of(start), ElementsAre("host0: node 0 ranks 0+2", "host2: node 1 ranks 2+2"));
  EXPECT_EQ(start.restarts, 1);
  scene.lose(2);
  scene.say(0, Kind::stopped, {failure_of(0, 5, "CommError")});
  EXPECT_THAT(scene.orders().back().failures.front().message,
              HasSubstr("host2 (process 1002) with ranks 2 to 3 was lost"));
}

TEST(CoordinatorTest, ASignalGoesToAllNodesOfAJobThatNeedsThem) {
  Scene scene({.min_nodes = 2, .max_nodes = 2, .max_restarts = 3});
  scene.join(0);
  scene.join(1);
  scene.one(Order::Kind::start);
  scene.say(1, Kind::leaving);
  EXPECT_EQ(scene.one(Order::Kind::signal).signal, SIGTERM);
  scene.say(0, Kind::leaving);  // as under srun, where every node gets the signal
  EXPECT_THAT(scene.orders(), IsEmpty());
  scene.say(1, Kind::stopped);
  scene.say(0, Kind::stopped, {failure_of(0, 5, "CommError")});
  const Order end = scene.one(Order::Kind::end);
  EXPECT_EQ(end.exit_status, 128 + SIGTERM);
  EXPECT_EQ(end.text, "host1 (process 1001) was stopped by signal 15 (SIGTERM)");
  EXPECT_THAT(end.failures, IsEmpty());
}

TEST(CoordinatorTest, RanksThatStopBySignalInPeaceAreASuccess) {
  Scene scene({.min_nodes = 2, .max_nodes = 2});
  scene.join(0);
  scene.join(1);
  scene.one(Order::Kind::start);
  scene.say(0, Kind::leaving);
  scene.one(Order::Kind::signal);
  scene.say(0, Kind::succeeded);
  scene.say(1, Kind::succeeded);
  EXPECT_EQ(scene.one(Order::Kind::end).exit_status, 0);
}

// As after the user's second signal to this node.
TEST(CoordinatorTest, ANodeThatGoesInTheMiddleOfAStopHasNotEndedWell) {
  Scene scene({.min_nodes = 2, .max_nodes = 2});
  assign_two(scene);
  scene.say(1, Kind::leaving);
  scene.one(Order::Kind::signal);
  scene.say(1, Kind::bye);
  EXPECT_THAT(scene.orders(), IsEmpty());
  scene.say(0, Kind::succeeded);
  EXPECT_EQ(scene.one(Order::Kind::end).exit_status, 128 + SIGTERM);
}

TEST(CoordinatorTest, ANodeMayLeaveWhileEnoughRemain) {
  Scene scene({.min_nodes = 1, .max_nodes = 2, .max_restarts = 0, .last_call = 0s});
  scene.join(0);
  scene.one(Order::Kind::start);
  scene.join(1);
  scene.one(Order::Kind::stop);
  scene.say(0, Kind::stopped);
  scene.one(Order::Kind::start);
  scene.say(1, Kind::leaving);
  EXPECT_THAT(scene.orders(), IsEmpty());
  // Its peers notice before its launcher reports more. That is not their failure.
  scene.say(0, Kind::failed, {failure_of(0, 5, "CommError")});
  EXPECT_THAT(scene.one(Order::Kind::stop).text, StartsWith("the node host1 leaves, and rank 0 (host host0"));
  scene.say(1, Kind::stopped);
  EXPECT_EQ(scene.one(Order::Kind::refuse).member, 1);
  scene.say(0, Kind::stopped, {failure_of(0, 5, "CommError")});
  const Order start = scene.one(Order::Kind::start);
  EXPECT_EQ(start.assignments.size(), 1U);
  EXPECT_EQ(start.restarts, 0);
}

CoordinatorOptions one_or_two() { return {.min_nodes = 1, .max_nodes = 2, .last_call = std::chrono::seconds(0)}; }

void expect_a_smaller_world(Scene& scene) {
  const Order start = scene.one(Order::Kind::start);
  EXPECT_THAT(assignments_of(start), ElementsAre("host0: node 0 ranks 0+2"));
  EXPECT_EQ(start.restarts, 0);
}

// The second of two nodes is leaving; one would do.
struct LeavingScene : Scene {
  LeavingScene() : Scene(one_or_two()) {
    assign_two(*this);
    say(1, Kind::leaving);
  }
};

TEST(CoordinatorTest, ANodeThatHasLeftIsNamed) {
  LeavingScene scene;
  scene.say(1, Kind::stopped);
  const auto orders = scene.orders();
  ASSERT_EQ(orders.size(), 2U);
  EXPECT_EQ(orders[0].member, 1);
  EXPECT_EQ(orders[1].text, "the node host1 has left: all ranks restart");
  scene.say(0, Kind::stopped);
  expect_a_smaller_world(scene);
}

TEST(CoordinatorTest, RanksThatEndWellWithTheirNodeLeaveASmallerWorldWhenTheOthersNotice) {
  LeavingScene scene;
  scene.say(1, Kind::succeeded);
  EXPECT_EQ(scene.one(Order::Kind::refuse).member, 1);
  scene.say(0, Kind::failed, {failure_of(0, 5, "CommError")});
  EXPECT_EQ(scene.one(Order::Kind::stop).text,
            "the node host1 leaves, and rank 0 (host host0, exit status 1): error of rank 0: all ranks restart");
  scene.say(0, Kind::stopped, {failure_of(0, 5, "CommError")});
  expect_a_smaller_world(scene);
  // The leave belonged to the round before. A failure in this round counts.
  scene.say(0, Kind::failed, {failure_of(0, 6)});
  scene.one(Order::Kind::stop);
  scene.say(0, Kind::stopped, {failure_of(0, 6)});
  EXPECT_EQ(scene.one(Order::Kind::end).exit_status, 1);
}

TEST(CoordinatorTest, RanksThatDoNotNoticeThatANodeHasLeftRestartAfterTheFarewell) {
  LeavingScene scene;
  scene.say(1, Kind::succeeded);
  scene.one(Order::Kind::refuse);
  EXPECT_EQ(scene.coordinator().next_deadline(), scene.now + 30s);
  scene.wait(29s);
  EXPECT_THAT(scene.orders(), IsEmpty());
  scene.wait(1s);
  EXPECT_EQ(scene.one(Order::Kind::stop).text, "the node host1 has left: all ranks restart");
  scene.say(0, Kind::stopped);
  expect_a_smaller_world(scene);
}

// Ranks behave so if they agree to stop when one of them is asked to.
TEST(CoordinatorTest, IfAllRanksEndWellWithANodeThatLeavesTheJobHasEnded) {
  LeavingScene scene;
  scene.say(1, Kind::succeeded);
  scene.one(Order::Kind::refuse);
  scene.wait(29s);
  scene.say(0, Kind::succeeded);
  EXPECT_EQ(scene.one(Order::Kind::end).exit_status, 0);
}

TEST(CoordinatorTest, ALeavingNodeThatIsLostCostsNoRestart) {
  LeavingScene scene;
  scene.lose(1);
  const auto orders = scene.orders();
  ASSERT_EQ(orders.size(), 2U);
  EXPECT_EQ(orders[1].text, "the node host1 has left: all ranks restart");
  scene.say(0, Kind::stopped, {failure_of(0, 5, "CommError")});
  expect_a_smaller_world(scene);
}

TEST(CoordinatorTest, ANodeThatIsDoneMayLeaveOrBeLostAndDisturbsNobody) {
  for (const bool lost : {false, true}) {
    Scene scene(one_or_two());
    assign_two(scene);
    scene.say(1, Kind::succeeded);
    if (lost)
      scene.lose(1);
    else
      scene.say(1, Kind::leaving);
    EXPECT_EQ(scene.one(Order::Kind::refuse).member, 1);
    EXPECT_EQ(scene.coordinator().next_deadline(), Coordinator::Clock::time_point::max());
    scene.say(0, Kind::succeeded);
    EXPECT_EQ(scene.one(Order::Kind::end).exit_status, 0);
  }
}

TEST(CoordinatorTest, ANodeThatWaitsForAPlaceMayGoAtAnyTime) {
  Scene scene({.min_nodes = 2, .max_nodes = 2, .max_restarts = 1});
  const auto comes_and_goes = [&](int member) {
    scene.join(member);
    scene.say(member, Kind::leaving);
  };
  scene.join(0);
  scene.join(1);
  comes_and_goes(2);  // while the rendezvous is prepared
  const auto orders = scene.orders();
  ASSERT_EQ(orders.size(), 2U);
  EXPECT_EQ(orders[0].kind, Order::Kind::refuse);
  EXPECT_EQ(orders[0].member, 2);
  EXPECT_EQ(orders[1].assignments.size(), 2U);
  comes_and_goes(3);
  EXPECT_EQ(scene.one(Order::Kind::refuse).member, 3);
  scene.say(1, Kind::failed, {failure_of(2, 1)});
  scene.one(Order::Kind::stop);
  comes_and_goes(4);
  EXPECT_EQ(scene.one(Order::Kind::refuse).member, 4);
  scene.say(1, Kind::stopped, {failure_of(2, 1)});
  scene.say(0, Kind::stopped);
  EXPECT_EQ(scene.one(Order::Kind::start).restarts, 1);
  scene.say(0, Kind::succeeded);
  scene.say(1, Kind::succeeded);
  EXPECT_EQ(scene.one(Order::Kind::end).exit_status, 0);
}

TEST(CoordinatorTest, TheHostCannotLeaveAlone) {
  Scene scene({.min_nodes = 1, .max_nodes = 2, .last_call = 0s});
  scene.join(0);
  scene.one(Order::Kind::start);
  scene.say(0, Kind::leaving);
  EXPECT_EQ(scene.one(Order::Kind::signal).signal, SIGTERM);
}

TEST(CoordinatorTest, AHostThatCannotMakeTheRendezvousEndsTheJob) {
  Coordinator coordinator({.address = "n:1"}, {});
  NodeMessage join;
  join.join.run_id = "none";
  coordinator.handle(0, join, {});
  NodeMessage failed{.kind = Kind::failed, .round = 1};
  failed.failures = {failure_of(-1, 1)};
  coordinator.handle(0, failed, {});
  EXPECT_EQ(coordinator.take_orders().back().kind, Order::Kind::end);
}

TEST(CoordinatorTest, MessagesSurviveTheStore) {
  NodeMessage message{.kind = Kind::stopped, .round = 3, .signal = SIGINT, .sent_at_s = 1.5};
  message.join.host = "h";
  message.failures = {failure_of(2, 4)};
  message.failures[0].message = "not UTF-8: \xff";
  const NodeMessage read = parse_node_message(to_json(message));
  EXPECT_EQ(read.round, 3);
  EXPECT_EQ(read.join.host, "h");
  EXPECT_THAT(read.failures.at(0).message, StartsWith("not UTF-8: "));
  Order order{.kind = Order::Kind::start, .round = 2, .member = 3, .restarts = 4, .signal = 5, .exit_status = 6};
  order.assignments = {{.member = 4, .node_rank = 1, .first_rank = 8, .local_world_size = 8, .host = "h"}};
  order.failures = message.failures;
  order.text = "why";
  order.store = "h:29400";
  order.master_address = "m";
  order.master_port = 29401;
  EXPECT_THAT(to_json(order), HasSubstr(R"("seats":[{)")) << "the key that other versions of the program read";
  const Order parsed = parse_order(to_json(order));
  EXPECT_EQ(parsed.assignments.at(0).first_rank, 8);
  EXPECT_EQ(to_json(parsed), to_json(order));
  EXPECT_EQ(std::tuple(parsed.kind, parsed.round, parsed.member, parsed.restarts, parsed.signal, parsed.exit_status),
            std::tuple(order.kind, 2, 3, 4, 5, 6));
  EXPECT_EQ(parsed.failures.size(), 1U);
  EXPECT_EQ(std::tuple(parsed.text, parsed.store, parsed.master_address, parsed.master_port),
            std::tuple("why", "h:29400", "m", 29401));
  for (const char* text : {"", "{}", "[]", R"({"kind": 99})", R"({"kind": "start"})"}) {
    EXPECT_THROW(parse_order(text), CommError) << text;
    EXPECT_THROW(parse_node_message(text), CommError) << text;
  }
}

TEST(WorkerFailureTest, TheReportBeginsWithTheRootCauseAndListsTheOthers) {
  WorkerFailure killed = failure_of(1, 10.5, "");
  killed.signal = SIGSEGV;
  killed.message = "";
  const WorkerFailure lost = failure_of(0, 10.25, "CommError");
  WorkerFailure late = failure_of(2, 11);
  late.message = std::string(300, 'x') + "\nsecond line";
  EXPECT_EQ(failure_report({killed}), "rank 1 (host host1) was killed by signal 11 (SIGSEGV)");
  WorkerFailure cut = killed;
  cut.signal = SIGBUS;
  EXPECT_THAT(failure_report({cut}),
              HasSubstr("(SIGBUS); a file that it reads in place, such as token data or weights, "
                        "was cut short while it ran"));
  const std::string report = failure_report({lost, late, killed});
  EXPECT_EQ(report,
            "rank 1 (host host1) was killed by signal 11 (SIGSEGV)\n"
            "other failures:\n"
            "  rank  host   local rank  pid  after     ended with     error\n"
            "  2     host2  2           102  +0.500 s  exit status 1  " +
                std::string(97, 'x') +
                "...\n"
                "  0     host0  0           100  -0.250 s  exit status 1  error of rank 0");
  EXPECT_EQ(launcher_exit_status(killed), 128 + SIGSEGV);
  std::vector<WorkerFailure> many;
  for (int rank = 0; rank < 100; ++rank) many.push_back(failure_of(rank, rank));
  EXPECT_THAT(failure_report(many), HasSubstr("\n  and 83 more"));
}

TEST(WorkerFailureTest, AProgramThatCouldNotBeLoadedIsSaid) {
  WorkerFailure failure;
  failure.rank = 1;
  failure.host = "a";
  failure.exit_status = 127;
  EXPECT_THAT(describe(failure), StartsWith("rank 1 (host a) ended with exit status 127; the program, or a "
                                            "library that it needs, could not be loaded"));
}

TEST(WorkerFailureTest, RanksWithTheSameErrorAreOnlyNamed) {
  std::vector<WorkerFailure> shared;
  for (const int rank : {3, 0, 1, 2, 5, 6, 8}) {
    shared.push_back(failure_of(rank, rank == 3 ? 1 : 2));
    shared.back().message = "no such file";
  }
  const std::string once =
      "rank 3 (host host3, exit status 1): no such file\n"
      "the same on ranks 0 to 2, 5, 6, 8";
  EXPECT_EQ(failure_report(shared), once);
  shared.push_back(failure_of(4, 2, "CommError"));
  EXPECT_THAT(failure_report(shared), AllOf(StartsWith(once + "\nother failures:\n"), HasSubstr("error of rank 4")));
  EXPECT_EQ(failure_report({shared[0], shared[1]}),
            "rank 3 (host host3, exit status 1): no such file\n"
            "the same on rank 0");
  // Without messages from the ranks there is nothing in common.
  for (WorkerFailure& failure : shared) failure.message = "";
  EXPECT_THAT(failure_report(shared), AllOf(HasSubstr("other failures"), Not(HasSubstr("the same"))));
}

}  // namespace
}  // namespace phalanx
