// MpiBackend: collectives and messages as sequences of MPI's non-blocking calls. mpi.h describes its guarantees.
// Torch-free.
//
// Collectives begin with MPI_Iallgather of the signatures, then of the counts of an uneven all_to_all. The data is
// moved by one MPI call if its int counts suffice, else in pieces.
//
// A message is a header under the user's tag; a short message has its data in the header. The receiver compares the
// header with what it expects and answers. Only then does more data follow. So a send is done when its message has been
// received, a mismatch is an error on both sides, and a send that is never received can be given up.
//
// Tags: the low two bits are the kind (MpiTag); the other bits hold the user's tag or the number of the message.
#pragma once

#include <mpi.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/abort_state.h"
#include "phalanx/comm/backend.h"
#include "phalanx/comm/backends/mpi/mpi_process.h"
#include "phalanx/comm/backends/mpi/mpi_requests.h"
#include "phalanx/comm/liveness/heartbeat_monitor.h"

namespace phalanx {

enum class MpiTag : std::uint8_t { header, answer, data, other };
inline constexpr int kMpiPieces = 0;  // a value of MpiTag::other: a piece of a collective
inline constexpr int kMpiNotice = 1;  // a value of MpiTag::other: the sender reports that it waits for a message

class MpiBackend final : public Backend {
 public:
  struct Setup {
    HeartbeatMonitor peers;
    std::string identity;  // of this process (ProcessProbe)
    bool deterministic = false;
    std::int64_t largest_call = 0;
  };
  explicit MpiBackend(Setup setup);
  ~MpiBackend() override;

  int rank() const noexcept override { return peers_.rank(); }
  int size() const noexcept override { return peers_.size(); }
  BackendTraits traits() const noexcept override {
    return {.name = "mpi", .rank_order_reduction = setup_.deterministic, .oversubscribed = is_oversubscribed_};
  }
  std::unique_ptr<Operation> start(const OperationDescription& description) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  void abort(const std::string& reason) noexcept override;
  void check_ranks() override;

  // For the operations.
  MpiProcess& process() const { return process_; }
  MPI_Comm comm() const { return comm_; }
  const Setup& setup() const { return setup_; }
  int tag(MpiTag kind, int value) const { return value * 4 + static_cast<int>(kind); }
  int largest_tag_value() const { return process_.largest_tag() / 4 - 1; }

  void throw_if_aborted() const { abort_.throw_if_set(); }
  std::string abort_reason() const { return abort_.reason(); }
  HeartbeatMonitor& peers() { return peers_; }
  std::vector<int> behind(std::uint64_t collective) const { return peers_.behind(collective); }
  std::uint64_t begin_collective() { return peers_.begin_collective(); }

  /// Memory for collectives, reused from one to the next.
  std::shared_ptr<std::byte[]> scratch(std::size_t bytes);

  // Number of messages so far, by peer.
  std::uint32_t next_message(int destination) { return sent_[static_cast<std::size_t>(destination)]++; }
  void count_received(int source) { ++received_[static_cast<std::size_t>(source)]; }
  std::uint32_t received(int source) const { return received_[static_cast<std::size_t>(source)]; }
  /// Discards what the peer reported about messages that it waits for: useless once it gets one.
  /// REQUIRES: called inside MpiProcess::enter().
  void drop_notices(int peer);
  /// Called while a collective waits for signatures: says how a peer instead waits for a message to or from this rank;
  /// empty: none does.
  /// REQUIRES: called inside MpiProcess::enter().
  std::string stall_reason();

 private:
  void make_comm();

  Setup setup_;
  HeartbeatMonitor peers_;
  MpiProcess& process_;
  MPI_Comm comm_ = mpi().comm_null;
  bool is_oversubscribed_ = false;
  std::vector<std::uint32_t> sent_, received_;
  std::shared_ptr<std::byte[]> scratch_;
  std::size_t scratch_bytes_ = 0;
  AbortState abort_;
};

/// What collectives and messages share: how they end after a failure.
class MpiOperation : public Operation {
 public:
  explicit MpiOperation(MpiBackend& backend) : backend_(backend) {}
  ~MpiOperation() override {
    if (has_waited_) backend_.peers().end_wait();
  }
  void check_peers() override;
  bool retire() noexcept final;

 protected:
  virtual bool are_requests_done() = 0;               // throws CommError
  virtual bool is_callers_memory_in_use() const = 0;  // by requests that are not done
  virtual void leave_requests() noexcept = 0;

  MpiBackend& backend_;

 private:
  bool has_waited_ = false;
  bool peer_has_died_ = false;
  bool peer_is_unresponsive_ = false;  // dead, stopped or silent: it does nothing more for this operation
  std::optional<std::chrono::steady_clock::time_point> retiring_since_;
};

std::unique_ptr<Operation> make_mpi_collective(MpiBackend& backend, const OperationDescription& description);
std::unique_ptr<Operation> make_mpi_messages(MpiBackend& backend, const OperationDescription& description);

}  // namespace phalanx
