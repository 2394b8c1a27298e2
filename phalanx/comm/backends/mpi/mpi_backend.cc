#include "phalanx/comm/backends/mpi/mpi_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/comm/wait.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;

// When a rank has died or stopped, the lowest of the others reports it and ends the job. If that rank is busy, the
// others do so after this time.
constexpr std::chrono::milliseconds kLeaveToLowest{300};
// How long an operation that is given up may still complete by itself.
constexpr std::chrono::milliseconds kLastChance{1000};
constexpr std::chrono::milliseconds kLookWhileMpiMakes{100};
constexpr std::chrono::milliseconds kShortestJoining{30'000};

// The part of a process's identity before its process and namespace. Ranks with equal parts compete for the same cores.
std::string node_of(const std::string& identity) { return identity.substr(0, identity.find(':')); }

int creation_tag(const std::string& id, int largest) {
  std::uint32_t hash = 2166136261U;
  for (const char c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return static_cast<int>(hash % static_cast<std::uint32_t>(largest));
}

}  // namespace

MpiBackend::MpiBackend(Setup setup)
    : setup_(std::move(setup)),
      peers_(setup_.peers),
      process_(MpiProcess::get()),
      sent_(peers_.members().size(), 0),
      received_(peers_.members().size(), 0) {
  try {
    const std::vector<std::string> identities = peers_.join(setup_.identity);
    const std::string node = node_of(setup_.identity);
    is_oversubscribed_ = std::ranges::count_if(identities, [&](const std::string& identity) {
                           return node_of(identity) == node;
                         }) > available_cores();
    make_comm();
  } catch (const CommError& error) {
    process_.note_failure();
    peers_.announce_abort(error.what());
    throw;
  }
  peers_.end_wait();
}

// MPI makes a communicator in a blocking call that cannot be interrupted and waits for all members. So a separate
// thread makes it; the thread is abandoned when a rank is found to have failed. It does not hold enter(): other
// communicators of this process must continue, or a peer that waits for one of them first would never arrive here.
void MpiBackend::make_comm() {
  struct Making {
    std::mutex mutex;
    std::condition_variable ended;
    bool has_ended = false;
    MPI_Comm comm = mpi().comm_null;
    std::string error;
  };
  auto making = std::make_shared<Making>();
  start_thread("the making of a group of MPI", [making, members = peers_.members(),
                                                tag = creation_tag(peers_.id(), process_.largest_tag())] {
    MPI_Comm comm = mpi().comm_null;
    std::string error;
    try {
      MPI_Group world = mpi().group_null, group = mpi().group_null;
      check_mpi(mpi().comm_group(mpi().comm_world, &world), "MPI_Comm_group");
      int status = mpi().group_incl(world, static_cast<int>(members.size()), members.data(), &group);
      if (status == MPI_SUCCESS) status = mpi().comm_create_group(mpi().comm_world, group, tag, &comm);
      mpi().group_free(&world);
      if (group != mpi().group_null) mpi().group_free(&group);
      check_mpi(status, "MPI_Comm_create_group");
      check_mpi(mpi().comm_set_errhandler(comm, mpi().errors_return), "MPI_Comm_set_errhandler");
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    const std::lock_guard lock(making->mutex);
    making->comm = comm;
    making->error = std::move(error);
    making->has_ended = true;
    making->ended.notify_all();
  }).detach();
  // All ranks have arrived when they begin.
  const auto patience = std::max(peers_.connect_timeout(), kShortestJoining);
  const auto deadline = Clock::now() + patience;
  std::unique_lock lock(making->mutex);
  while (!making->ended.wait_for(lock, kLookWhileMpiMakes, [&] { return making->has_ended; })) {
    peers_.throw_if_peer_failed();
    if (Clock::now() > deadline)
      throw CommError(fmt::format("mpi: of the {} ranks of group '{}' not all have joined it within {} s", size(),
                                  peers_.id(), static_cast<double>(patience.count()) / 1000));
  }
  if (!making->error.empty())
    throw CommError(fmt::format("mpi: group '{}' could not be made: {}", peers_.id(), making->error));
  comm_ = making->comm;
}

MpiBackend::~MpiBackend() {
  // Operations that a failed group left in flight still need its communicator. Otherwise nothing is in flight any more,
  // and freeing the communicator is a local operation in Open MPI.
  int is_finalised = 0;
  if (abort_.is_set() || mpi().finalized(&is_finalised) != MPI_SUCCESS || is_finalised != 0) return;
  const auto inside = process_.enter();
  mpi().comm_free(&comm_);
}

std::unique_ptr<Operation> MpiBackend::start(const OperationDescription& description) {
  return description.transfers.empty() ? make_mpi_collective(*this, description)
                                       : make_mpi_messages(*this, description);
}

std::shared_ptr<Backend> MpiBackend::split(const SplitRequest& request) {
  throw_if_aborted();
  if (request.members.empty()) return nullptr;
  Setup setup = setup_;
  setup.peers = peers_.split(request.serial, request.members, request.rank);
  return std::make_shared<MpiBackend>(std::move(setup));
}

void MpiBackend::abort(const std::string& reason) noexcept {
  if (!abort_.set(reason)) return;
  if (size() == 1) return;
  process_.note_failure();
  // The store reports a death to every rank. Announcing it again would look like this rank's own decision.
  if (peers_.has_lost_rank()) return;
  peers_.announce_abort(reason);
}

std::shared_ptr<std::byte[]> MpiBackend::scratch(std::size_t bytes) {
  // An operation that was given up keeps its memory.
  if (scratch_bytes_ < bytes || scratch_.use_count() > 1) {
    scratch_.reset(new std::byte[bytes]);
    scratch_bytes_ = bytes;
  }
  return scratch_;
}

void MpiBackend::drop_notices(int peer) {
  for (;;) {
    int flag = 0;
    std::uint32_t had = 0;
    const int notice = tag(MpiTag::other, kMpiNotice);
    check_mpi(mpi().iprobe(peer, notice, comm_, &flag, MPI_STATUS_IGNORE), "MPI_Iprobe");
    if (flag == 0) return;
    check_mpi(mpi().recv(&had, sizeof had, mpi().byte, peer, notice, comm_, MPI_STATUS_IGNORE), "MPI_Recv");
  }
}

// A rank that has not sent its signature has not reached this collective. It runs its operations one after the other,
// so it is blocked by a message of its own that is not received.
std::string MpiBackend::stall_reason() {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    for (;;) {
      int flag = 0;
      MPI_Status status;
      check_mpi(mpi().iprobe(peer, MPI_ANY_TAG, comm_, &flag, &status), "MPI_Iprobe");
      if (flag == 0) break;
      if (status.MPI_TAG % 4 == static_cast<int>(MpiTag::header))
        return fmt::format("rank {} sends a message to rank {}", peer, rank());
      if (status.MPI_TAG != tag(MpiTag::other, kMpiNotice)) break;
      std::uint32_t had = 0;  // messages that the peer had received from here when it wrote
      check_mpi(mpi().recv(&had, sizeof had, mpi().byte, peer, status.MPI_TAG, comm_, MPI_STATUS_IGNORE), "MPI_Recv");
      if (had == sent_[static_cast<std::size_t>(peer)])
        return fmt::format("rank {} waits to receive a message from rank {}", peer, rank());
    }
  }
  return {};
}

void MpiBackend::check_ranks() {
  throw_if_aborted();
  // A rank that failed and ended gave its reason first: that is the cause, its end is only a consequence.
  if (const std::string reason = peers_.announced_abort(); !reason.empty()) throw CommError(reason);
  if (const std::string why = peers_.failure_reason(); !why.empty()) throw CommError(why);
}

void MpiOperation::check_peers() {
  HeartbeatMonitor& peers = backend_.peers();
  peer_has_died_ = peers.announced_abort().empty() && !peers.announced_failure().empty();
  for (int r = 0; r < backend_.size() && !peer_is_unresponsive_; ++r) peer_is_unresponsive_ = peers.is_unresponsive(r);
  backend_.check_ranks();
  has_waited_ = true;
  peers.check_wait("waits");
}

bool MpiOperation::retire() noexcept {
  const auto inside = backend_.process().try_enter();
  if (!inside) return false;
  if (!retiring_since_) retiring_since_ = Clock::now();
  const auto waited = Clock::now() - *retiring_since_;
  try {
    if (peer_has_died_ || (peer_is_unresponsive_ && is_callers_memory_in_use())) {
      int lowest = 0;
      while (lowest != backend_.rank() && backend_.peers().is_unresponsive(lowest)) ++lowest;
      if (backend_.rank() == lowest || waited > kLeaveToLowest) backend_.process().end_job(backend_.abort_reason());
      return false;
    }
    if (are_requests_done()) return true;
  } catch (const std::exception&) {
    // MPI reports that a request has failed: treat it as still in flight.
  }
  if (is_callers_memory_in_use()) {
    if (waited > kLastChance)
      backend_.process().end_job(backend_.abort_reason() +
                                 " (data were being moved, and MPI does not give back the tensors it has)");
    return false;
  }
  leave_requests();
  return true;
}

}  // namespace phalanx
