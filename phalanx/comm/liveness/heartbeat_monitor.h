// HeartbeatMonitor: a rank's view of the other ranks of its group, outside the data path: who is dead, stopped, silent
// or gone, who gave up first and why, how far each has come. It tells the others the same of this rank. It serves the
// backends that span nodes (gloo, mpi) and works through the Store. Torch-free.
//
// Threads and connections
//   The monitors of a world and of all groups split from it, and all their copies, share one thread, "phalanx-monitor",
//   and one client of the store. The client holds a connection for requests, and one that only tells the store that the
//   rank is there. announce_abort() and behind() run on the caller's thread and may open one more. A world of one rank
//   has no thread. All methods but join() and observe() are thread-safe.
//
//   The thread repeats three steps:
//     1. It reads the heartbeats of all ranks, if this rank waits for others (wait_in).
//     2. It writes its own heartbeat, if one is due or this rank waits for something else than before.
//     3. It sleeps in the store until a rank is lost or posts a notice, but not longer than a tick.
//   So a rank that computes for hours has a heartbeat, answers questions, and hears of deaths at once.
//
// What happens to a rank, and how the others see it
//   It dies, or is killed    Its connections break, and the store sets its key: announced_failure(), in milliseconds.
//                            If its node vanishes, the store takes some 10 s for that; silence is seen before.
//   It is stopped            On its own node the others see that in /proc. On other nodes it becomes silent.
//   It loses its network     It becomes silent. It sees itself that the store does not answer: disconnect_reason().
//   It becomes silent        Its count in the store stands still. failure_reason() says so after heartbeat_timeout().
//   It gives a group up      It posts a notice: announced_abort(), in milliseconds. The first notice of a group stays.
//   It ends in order         who_left(). This is no failure. If it hosts the store, the store must live on until the
//                            others have read that, which takes a tick; init_from_environment() sees to it.
//   It computes, or starves  Nothing. Only a thread without CPU time on another node may be taken for a stopped one.
//   It hosts the store, and dies    announced_failure() names the rank if Options::store_rank does. The thread ends,
//                            and this rank learns no more.
//   It hosts the store, and stops   failure_reason() names the rank if Options::store_rank does, else the silent store.
//
// Clocks
//   limit   Options::heartbeat, 5 s by default: an error comes within it. 0: ranks may be silent for ever.
//   beat    a tenth of the limit, between 20 ms and 1 s
//   tick    100 ms, or 3 ms for each rank of the world if that is more; at most a beat
//   Silence longer than heartbeat_timeout(limit, tick) is an error.
//   Every rank measures with its own steady clock. Time in which it did not run itself, or did not look, does not count
//   against the others.
//
// Load of the store
//   In each tick every rank waits for a key of each other rank, and while it waits for others it reads their
//   heartbeats. With the default limit, ticks are 3 ms a rank up to 166 ranks and half a second above. Such a pair of
//   requests takes some 0.3 us of the store's thread for each rank. So the thread is busy for a few percent of the time
//   at 166 ranks. Above, that grows with the square: more than half of the time at 1,000 ranks, all of it at some
//   1,300. A longer limit helps up to 10 s, where beats take a second.
//   While ranks are missing in rendezvous(), every rank that is there asks for all of them, every 100 ms, or every 3 ms
//   a rank if that is more. So this takes as much of the thread at any number of ranks.
//
// Keys in the store, by world rank
//   pulse/<rank>    "<count>\n", and "<group>\t<what for>\n" for each group in which the rank waits.
//                   It alone writes it.
//   lost/<rank>     "died" or "left"
//   event/<number>  notices, from 0: "abort\n<group>\n<reason>", "roll\n<group>\n<key for the answers>"
//   rolls           how many roll calls there were; each rank answers number n in roll/<n>/<rank>
//   <group>/<name>/<rank of the group>    values of rendezvous()
//
//   HeartbeatMonitor monitor(store, rank, size, {.backend = "gloo", .connect_timeout = 300s});
//   monitor.join(ProcessProbe::identity());           // throws if a rank dies, stops, or is missing
//   monitor.check_wait("collective 12");              // every 100 ms while waiting; "rank 2 has died"
//   monitor.end_wait();
//   HeartbeatMonitor pair = monitor.split(serial, {1, 3}, 0);
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/liveness/process_probe.h"
#include "phalanx/store/store.h"

namespace phalanx {

class HeartbeatMonitor {
 public:
  struct Options {
    std::string backend;          // for error texts: "gloo"
    std::string group = "world";  // id of the group of all ranks; unique in the store
    std::chrono::milliseconds heartbeat = kDefaultHeartbeat;
    int store_rank = -1;                          // the rank that hosts the store; -1: none, or unknown
    std::chrono::milliseconds connect_timeout{};  // of rendezvous()
  };

  /// Monitors the group of all ranks. From now on the store reports the end of this rank. Throws CommError.
  HeartbeatMonitor(const std::shared_ptr<Store>& store, int rank, int size, const Options& options);
  /// The monitor of a group of some of these ranks. `members` are ranks of this group.
  HeartbeatMonitor split(std::uint64_t serial, const std::vector<int>& members, int rank) const;
  // When the last monitor of a world is destroyed, it tells the others that this rank leaves in order. If the store is
  // silent this takes 0.3 s. The others then learn it when the store answers again, unless the store declares this rank
  // dead first.

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(members_.size()); }
  const std::string& id() const noexcept { return id_; }
  const std::vector<int>& members() const noexcept { return members_; }  // world ranks
  const std::shared_ptr<Store>& store() const noexcept { return store_; }
  std::chrono::milliseconds connect_timeout() const;

  // All ranks below are ranks of the group.

  /// Collective. Returns every member's value, in rank order. Throws CommError if a rank fails or is missing.
  std::vector<std::string> rendezvous(const std::string& name, const std::string& value);
  /// rendezvous("rank", identity), then observe().
  std::vector<std::string> join(const std::string& identity);
  /// From now on stopped and silent ranks are found, too. identities[r]: ProcessProbe::identity() of rank r of the
  /// world. Only the first call counts.
  void observe(const std::vector<std::string>& identities);
  /// Call it every 100 ms while the group is being made. Throws CommError.
  void throw_if_peer_failed();

  /// Why the group cannot continue; empty: it can. announced_failure() knows what was announced: a rank died (at least
  /// `age` ago), or gave up. failure_reason() also reports what this rank observes: a rank is stopped or silent.
  std::string announced_failure(std::chrono::milliseconds age = {}) const;
  std::string failure_reason(std::chrono::milliseconds age = {}) const;
  /// The first reason that a rank gave for giving up, or empty.
  std::string announced_abort() const;
  /// True if the store has lost a rank that did not leave in order.
  bool has_lost_rank() const;
  /// Why the rank does nothing more although it has not died: it has been stopped, or silent, for nearly as long as the
  /// limit. Empty while it is well. Call it about every 100 ms while waiting.
  std::string silence_reason(int rank) const;
  /// True if the rank can do nothing any more: it is dead, stopped or silent.
  bool is_unresponsive(int rank) const;
  /// For a group whose connections broke although no member is known to have died: which ranks ended in order.
  std::string who_left() const;
  /// For a group about whose members nothing is known: says that this rank itself lost the store, or gets no answer
  /// from it, if so.
  std::string disconnect_reason() const;
  /// The store has not answered for 0.5 s: better not to send it anything.
  bool is_store_silent() const;

  /// Publishes that this rank waits, and for what, within a tick. Until end_wait() it watches the heartbeats.
  void wait_in(const std::string& for_what);
  /// wait_in(), for the waiting thread to call about every 100 ms. Throws CommError if the wait is in vain.
  void check_wait(const std::string& for_what, std::chrono::milliseconds age = {});
  void end_wait();
  /// What each rank last published that it waits for; empty: nothing.
  std::vector<std::string> states() const;
  /// The ranks that have not started the collective of that number. Asks them, for at most one second.
  std::vector<int> behind(std::uint64_t collective) const;
  std::uint64_t begin_collective() { return collectives_->fetch_add(1); }
  std::uint64_t collectives_begun() const { return collectives_->load(); }

  /// Tells the others that this rank gives the group up, unless the store is silent: that would delay the error.
  void announce_abort(const std::string& reason) noexcept;

 private:
  class World;
  HeartbeatMonitor(std::shared_ptr<World> world, std::shared_ptr<Store> store, std::string id, std::vector<int> members,
                   int rank);

  std::shared_ptr<World> world_;
  std::shared_ptr<Store> store_;
  std::string id_;
  std::vector<int> members_;  // world ranks
  int rank_ = 0;
  std::shared_ptr<std::atomic<std::uint64_t>> collectives_;  // begun in this group
};

}  // namespace phalanx
