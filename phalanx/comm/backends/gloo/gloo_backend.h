// GlooBackend: collectives as sequences of messages. gloo.h describes its guarantees.
//
// Every collective begins with an all-gather of signatures. Then, with reductions in rank order:
//   all_reduce, reduce      small: all-gather everything, reduce. Large: all-to-all of slices, reduce the own slice,
//                           all-gather the slices, or send them to the root
//   reduce_scatter          all-to-all, reduce
//   all_gather              small: every part straight to every rank. Large: the parts go round in a ring
//   broadcast               down a binomial tree, in pieces
//   gather, scatter, all_to_all    every message by itself
//   barrier                 the signatures
// All messages of a group, those of collectives too, have sockets and one thread of their own (message_transport.h).
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/abort_state.h"
#include "phalanx/comm/backend.h"
#include "phalanx/comm/backends/gloo/message_transport.h"
#include "phalanx/comm/liveness/heartbeat_monitor.h"
#include "phalanx/store/store.h"

namespace phalanx {

struct GlooBell {
  std::atomic<std::uint32_t> word{0};
  std::atomic<std::uint32_t> sleepers{0};
};

class GlooBackend final : public Backend {
 public:
  struct Setup {
    HeartbeatMonitor peers;
    std::string identity;  // of this process (ProcessProbe)
    std::string host;
  };
  explicit GlooBackend(Setup setup);

  int rank() const noexcept override { return peers_.rank(); }
  int size() const noexcept override { return peers_.size(); }
  // The transport's thread does the work: a waiter that spins or yields would keep the core from it.
  BackendTraits traits() const noexcept override {
    return {.name = "gloo", .rank_order_reduction = true, .oversubscribed = true, .sleeps = true};
  }
  std::unique_ptr<Operation> start(const OperationDescription& description) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  void abort(const std::string& reason) noexcept override;
  void check_ranks() override;

  // For the operations.
  /// REQUIRES: size() >= 2.
  MessageTransport& transport() { return *transport_; }
  void collective_done() { ++collectives_done_; }
  const std::shared_ptr<GlooBell>& bell() const { return bell_; }
  void throw_if_aborted() const { abort_.throw_if_set(); }
  std::string announced_failure() const { return peers_.announced_failure(); }
  std::string failure_reason() const { return peers_.failure_reason(); }
  std::string who_left() const { return peers_.who_left(); }
  std::string disconnect_reason() const { return peers_.disconnect_reason(); }
  std::vector<int> behind(std::uint64_t collective) const { return peers_.behind(collective); }
  /// The waiting thread calls it about every 100 ms. Publishes what this rank waits for; throws if the wait is in vain.
  void check_wait(std::chrono::milliseconds age) { peers_.check_wait(waits_text(), age); }
  void end_wait() { peers_.end_wait(); }
  /// For a waiting collective: names a rank that instead waits for a message to or from this one; empty: none. Both
  /// ranks publish how many messages have passed between them, and this rank's count does not change. So the result is
  /// certain, however old the other rank's published state is.
  std::string stall_reason() const;
  std::uint64_t begin_collective() { return peers_.begin_collective(); }

  /// Number of messages with one peer so far.
  struct MessageCounts {
    std::uint64_t sends = 0, sends_done = 0, receives = 0, receives_done = 0;
  };
  MessageCounts& messages_with(int peer) { return counts_[static_cast<std::size_t>(peer)]; }

  struct SelfMessage {  // a rank's message to itself
    int tag = 0;
    DataType dtype = DataType::u8;
    std::int64_t count = 0;
    std::string bytes;
  };
  std::deque<SelfMessage>& self_messages() { return self_messages_; }

 private:
  void join(const std::shared_ptr<Store>& store);
  [[noreturn]] void throw_disconnected(const std::string& what);
  std::string waits_text() const;

  Setup setup_;
  HeartbeatMonitor peers_;
  std::shared_ptr<GlooBell> bell_ = std::make_shared<GlooBell>();
  std::unique_ptr<MessageTransport> transport_;  // null for a group of one
  std::vector<MessageCounts> counts_;            // by peer
  std::deque<SelfMessage> self_messages_;
  std::atomic<std::int64_t> collectives_done_{0};
  AbortState abort_;
};

std::unique_ptr<Operation> make_gloo_collective(GlooBackend& backend, const OperationDescription& description);
std::unique_ptr<Operation> make_gloo_messages(GlooBackend& backend, const OperationDescription& description);

}  // namespace phalanx
