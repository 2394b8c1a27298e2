// The coordinator over a store that the test observes and breaks. The test writes the members' keys.
#include "phalanx/launch/supervisor/coordinator_service.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/comes_true.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/testing/launcher_process.h"
#include "phalanx/store/hash_store.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

// Counts the reads of member 0's heartbeat, and fails every call after it is broken.
class WatchedStore final : public Store {
 public:
  explicit WatchedStore(std::shared_ptr<Store> store) : Store(30s), store_(std::move(store)) {}
  std::string describe() const override { return "store of the test"; }
  std::shared_ptr<Store> clone() const override { return std::make_shared<WatchedStore>(store_); }

  std::atomic<int> looks{0};
  std::atomic<bool> broken{false};

 private:
  Store& base() {
    if (broken) throw CommError("the test broke it");
    return *store_;
  }
  void do_set(const std::string& key, const std::string& value) override { base().set(key, value); }
  std::optional<std::string> do_try_get(const std::string& key) override {
    if (key == rendezvous_keys::beat(0)) ++looks;
    return base().try_get(key);
  }
  std::int64_t do_add(const std::string& key, std::int64_t amount) override { return base().add(key, amount); }
  std::vector<std::string> do_wait(const std::vector<std::string>& keys, WaitFor mode, Milliseconds timeout) override {
    if (mode == WaitFor::any) return {base().wait_any(keys, timeout)};
    return base().get_all(keys, timeout);
  }
  std::optional<std::string> do_compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                                                const std::string& desired) override {
    return base().compare_and_set(key, expected, desired);
  }
  bool do_delete(const std::string& key) override { return base().delete_key(key); }
  void do_set_when_lost(const std::string& key, const std::optional<std::string>&) override {
    base().set_when_lost(key, "");
  }
  void do_interrupt(std::chrono::steady_clock::time_point) noexcept override {}

  std::shared_ptr<Store> store_;
};

class CoordinatorServiceTest : public testing::Test {
 protected:
  // Starts the service with an interval for heartbeat checks: so short that the test waits for checks, or so long that
  // there is none.
  void start(std::chrono::milliseconds interval) {
    service_ = std::make_unique<CoordinatorService>(
        watched_, CoordinatorOptions{.min_nodes = 2, .max_nodes = 2, .address = "n:1"},
        CoordinatorService::KeepAlive{.interval = interval, .missed = 3},
        [this](const std::string& reason) { broken_.set_value(reason); });
  }
  void join(int member) {
    NodeMessage message;
    message.join.host = fmt::format("host{}", member);
    message.join.run_id = "none";
    message.join.min_nodes = message.join.max_nodes = 2;
    message.join.is_host = member == 0;
    store_->set(rendezvous_keys::beat(member), "0");
    store_->set(rendezvous_keys::message(member, 0), to_json(message));
  }
  Order order(int index) { return parse_order(store_->get(rendezvous_keys::order(index), 30s)); }

  std::promise<std::string> broken_;  // outlives the service, which uses it
  std::shared_ptr<Store> store_ = std::make_shared<HashStore>();
  std::shared_ptr<WatchedStore> watched_ = std::make_shared<WatchedStore>(store_);
  std::unique_ptr<CoordinatorService> service_;
};

TEST_F(CoordinatorServiceTest, AMemberIsLostAtTheThirdSignOfLifeThatItMisses) {
  start(50ms);
  join(0);
  const Order lost = order(0);
  EXPECT_EQ(lost.kind, Order::Kind::refuse);
  EXPECT_THAT(lost.text, HasSubstr("the host of n:1 took this node for lost: no sign of life for "));
  // One check saw the first heartbeat; no check comes after the loss.
  EXPECT_EQ(watched_->looks, 4);
}

TEST_F(CoordinatorServiceTest, AMessageThatIsNotUnderstoodEndsTheJobWithTheReason) {
  start(1h);
  join(0);
  join(1);
  EXPECT_EQ(order(0).kind, Order::Kind::prepare);
  store_->set(rendezvous_keys::message(1, 1), "{}");
  const Order end = order(1);
  EXPECT_EQ(end.kind, Order::Kind::end);
  EXPECT_EQ(end.exit_status, 1);
  ASSERT_EQ(end.failures.size(), 1U);
  EXPECT_THAT(end.failures[0].message,
              AllOf(HasSubstr("the rendezvous at n:1 has broken down: "), HasSubstr("does not understand")));
  // The service runs until all members have left.
  for (const std::string& key : {rendezvous_keys::message(0, 1), rendezvous_keys::message(1, 2)}) {
    store_->set(key, to_json(NodeMessage{.kind = NodeMessage::Kind::bye}));
    EXPECT_TRUE(comes_true([&] { return !store_->try_get(key); })) << key;
  }
  service_->wait_for_departures(1h);
}

TEST_F(CoordinatorServiceTest, ANodeThatSpeaksAnotherLanguageIsRefusedAlone) {
  start(1h);
  join(0);
  store_->set(rendezvous_keys::message(1, 0), R"({"kind": 0})");
  const Order refusal = order(0);
  EXPECT_EQ(refusal.kind, Order::Kind::refuse);
  EXPECT_EQ(refusal.member, 1);
  EXPECT_THAT(refusal.text, AllOf(HasSubstr("the host of n:1 does not understand this node: "),
                                  HasSubstr("run the same Phalanx on every node")));
  join(2);
  EXPECT_EQ(order(1).kind, Order::Kind::prepare);
}

TEST_F(CoordinatorServiceTest, WhereNoOrderCanBeWrittenTheHostsOwnMembershipHearsOfIt) {
  start(20ms);
  watched_->broken = true;
  std::future<std::string> reason = broken_.get_future();
  ASSERT_EQ(reason.wait_for(30s), std::future_status::ready);
  EXPECT_EQ(reason.get(), "the rendezvous at n:1 has broken down: the test broke it");
}

}  // namespace
}  // namespace phalanx
