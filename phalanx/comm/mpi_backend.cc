#include "phalanx/comm/mpi_backend.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>

#include "phalanx/base/error.h"
#include "phalanx/comm/wait.h"

namespace phalanx {
namespace {

using MpiClock = std::chrono::steady_clock;

// When a rank has died, the lowest that lives says so and ends the job; if it is busy, the others do after this.
constexpr std::chrono::milliseconds kLeaveToLowest{300};
// How long an operation that is given up may still come to its end by itself.
constexpr std::chrono::milliseconds kLastChance{1000};

// Ranks with equal ones compete for the same cores.
std::string machine_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

int creation_tag(const std::string& id, int largest) {
  std::uint32_t hash = 2166136261U;
  for (const char c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return static_cast<int>(hash % static_cast<std::uint32_t>(largest));
}

}  // namespace

MpiBackend::MpiBackend(Setup setup)
    : setup_(std::move(setup)),
      process_(MpiProcess::get()),
      sent_(setup_.members.size(), 0),
      received_(setup_.members.size(), 0) {
  watched_->id = setup_.id;
  watched_->members = setup_.members;
  PrefixStore store(setup_.store, setup_.id);
  const std::string machine = machine_id();
  store.set(fmt::format("rank/{}", rank()), machine);
  std::vector<std::string> keys;
  for (int r = 0; r < size(); ++r) keys.push_back(fmt::format("rank/{}", r));
  const auto machines = store.get_all(keys, setup_.connect_timeout);  // names the ranks that do not come
  is_crowded_ = std::ranges::count(machines, machine) > available_cores();

  // This call blocks until all members are in it, which they are about to be. Not inside enter(): other communicators
  // of this process must go on, or a peer that waits for one of them first would never come here.
  MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  int status = MPI_Group_incl(world, size(), setup_.members.data(), &group);
  if (status == MPI_SUCCESS)
    status = MPI_Comm_create_group(MPI_COMM_WORLD, group, creation_tag(setup_.id, process_.largest_tag()), &comm_);
  MPI_Group_free(&world);
  if (group != MPI_GROUP_NULL) MPI_Group_free(&group);
  check_mpi(status, "MPI_Comm_create_group");
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  setup_.watch->add(watched_);
}

MpiBackend::~MpiBackend() {
  // What a failed group left under way still needs its communicator. Else nothing is under way any more, and to free it
  // is a local act in Open MPI.
  int is_finalised = 0;
  if (aborted_.load() || MPI_Finalized(&is_finalised) != MPI_SUCCESS || is_finalised != 0) return;
  const auto inside = process_.enter();
  MPI_Comm_free(&comm_);
}

std::unique_ptr<Operation> MpiBackend::start(const OperationDescription& description) {
  return description.transfers.empty() ? make_mpi_collective(*this, description)
                                       : make_mpi_messages(*this, description);
}

std::shared_ptr<Backend> MpiBackend::split(const SplitRequest& request) {
  throw_if_aborted();
  if (request.members.empty()) return nullptr;
  Setup setup = setup_;
  setup.id = fmt::format("{}.{}.{}", setup_.id, request.serial, request.members.front());
  setup.rank = request.rank;
  setup.members.clear();
  for (const int member : request.members) setup.members.push_back(setup_.members[static_cast<std::size_t>(member)]);
  return std::make_shared<MpiBackend>(std::move(setup));
}

void MpiBackend::abort(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(abort_mutex_);
    if (aborted_.load()) return;
    abort_reason_ = reason;
    aborted_.store(true);
  }
  if (size() == 1) return;
  process_.note_failure();
  // Of a death everybody hears from the store; told a second time, it would look like this rank's own decision.
  if (!lost().empty()) return;
  setup_.watch->announce_abort(*watched_, fmt::format("rank {} gave up: {}", rank(), reason));
}

std::string MpiBackend::abort_reason() const {
  const std::lock_guard lock(abort_mutex_);
  return abort_reason_;
}

void MpiBackend::throw_if_aborted() const {
  if (aborted_.load()) throw CommError(fmt::format("the group was aborted: {}", abort_reason()));
}

std::vector<int> MpiBackend::behind(std::uint64_t collective) const {
  std::vector<int> result;
  for (const int world_rank : setup_.watch->behind(*watched_, collective))
    for (int r = 0; r < size(); ++r)
      if (setup_.members[static_cast<std::size_t>(r)] == world_rank) result.push_back(r);
  return result;
}

std::shared_ptr<std::byte[]> MpiBackend::scratch(std::size_t bytes) {
  // Whoever was given up keeps what it had.
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
    check_mpi(MPI_Iprobe(peer, notice, comm_, &flag, MPI_STATUS_IGNORE), "MPI_Iprobe");
    if (flag == 0) return;
    check_mpi(MPI_Recv(&had, sizeof had, MPI_BYTE, peer, notice, comm_, MPI_STATUS_IGNORE), "MPI_Recv");
  }
}

// A rank that has not brought its signature is still before this collective, and a message of its that nobody takes is
// what holds it: it does one thing after the other.
std::string MpiBackend::why_stuck() {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    for (;;) {
      int flag = 0;
      MPI_Status status;
      check_mpi(MPI_Iprobe(peer, MPI_ANY_TAG, comm_, &flag, &status), "MPI_Iprobe");
      if (flag == 0) break;
      if (status.MPI_TAG % 4 == static_cast<int>(MpiTag::header))
        return fmt::format("rank {} sends a message to rank {}", peer, rank());
      if (status.MPI_TAG != tag(MpiTag::other, kMpiNotice)) break;
      std::uint32_t had = 0;  // messages that the peer had received from here when it wrote
      check_mpi(MPI_Recv(&had, sizeof had, MPI_BYTE, peer, status.MPI_TAG, comm_, MPI_STATUS_IGNORE), "MPI_Recv");
      if (had == sent_[static_cast<std::size_t>(peer)])
        return fmt::format("rank {} waits to receive a message from rank {}", peer, rank());
    }
  }
  return {};
}

void MpiBackend::check_ranks() {
  throw_if_aborted();
  // A rank that failed and ended gave its reason first: that is the cause, its end only what follows.
  if (const std::string reason = announced(); !reason.empty()) throw CommError(reason);
  if (const std::vector<int> dead = lost(); !dead.empty())
    throw CommError(fmt::format("rank{} {} ha{} died", dead.size() == 1 ? "" : "s", fmt::join(dead, ", "),
                                dead.size() == 1 ? "s" : "ve"));
}

void MpiOperation::check_peers() {
  peer_has_died_ = backend_.announced().empty() && !backend_.lost().empty();
  backend_.check_ranks();
}

bool MpiOperation::retire() noexcept {
  const auto inside = backend_.process().try_enter();
  if (!inside) return false;
  if (!retiring_since_) retiring_since_ = MpiClock::now();
  const auto waited = MpiClock::now() - *retiring_since_;
  try {
    if (peer_has_died_) {
      const std::vector<int> lost = backend_.lost();
      int lowest = 0;
      while (std::ranges::find(lost, lowest) != lost.end()) ++lowest;
      if (backend_.rank() == lowest || waited > kLeaveToLowest) backend_.process().end_job(backend_.abort_reason());
      return false;
    }
    if (are_requests_done()) return true;
  } catch (const std::exception&) {
    // MPI says that a request has failed: it is as good as under way.
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
