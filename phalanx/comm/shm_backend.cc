#include "phalanx/comm/shm_backend.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/comm/shm_collectives.h"
#include "phalanx/comm/shm_segment.h"
#include "phalanx/comm/wait.h"

namespace phalanx {
namespace {

// Measured (docs/communication.md): large enough that a wait is small beside the copying, small enough that what was
// copied in is still in the second-level cache when it is copied out.
constexpr std::size_t kSlotBytes = 512U << 10;
constexpr std::size_t kChannelChunk = 128U << 10;

class ShmBackend final : public Backend {
 public:
  ShmBackend(std::shared_ptr<ShmSegment> segment, std::shared_ptr<PeerProcesses> processes, std::vector<int> members,
             int rank, bool is_crowded)
      : segment_(std::move(segment)),
        processes_(std::move(processes)),
        members_(std::move(members)),
        is_crowded_(is_crowded),
        board_(ShmSegment::board(segment_), rank, segment_->layout().size,
               [this](int peer) { return processes_->why_dead(members_[static_cast<std::size_t>(peer)]); }),
        mail_(board_, segment_->channels()) {}

  int rank() const noexcept override { return board_.rank(); }
  int size() const noexcept override { return board_.size(); }
  BackendTraits traits() const noexcept override {
    return {.name = "shm", .rank_order_reduction = true, .host_only = true, .crowded = is_crowded_};
  }
  std::unique_ptr<Operation> start(const OperationDescription& description) override {
    if (!description.transfers.empty()) return std::make_unique<PeerOperation>(mail_, description);
    return make_shm_collective(board_, *segment_, description);
  }
  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    const ShmLayout layout{static_cast<int>(request.members.size()), kSlotBytes, kChannelChunk};
    auto segment = ShmSegment::make(layout, request.members, request.rank, request.exchange);
    if (!segment) return nullptr;
    std::vector<int> members;
    for (int member : request.members) members.push_back(members_[static_cast<std::size_t>(member)]);
    return std::make_shared<ShmBackend>(std::move(segment), processes_, std::move(members), request.rank, is_crowded_);
  }
  void abort(const std::string& reason) noexcept override { board_.abort(reason); }
  void check_ranks() override { board_.check_ranks(); }

 private:
  std::shared_ptr<ShmSegment> segment_;
  std::shared_ptr<PeerProcesses> processes_;
  std::vector<int> members_;  // places in processes_
  bool is_crowded_;
  Board board_;
  PeerMail mail_;
};

}  // namespace

std::shared_ptr<Backend> make_shm_backend(Store& store, int rank, int size, const std::string& name,
                                          std::chrono::milliseconds timeout) {
  if (rank < 0 || rank >= size) throw Error(fmt::format("shm: rank {} of a world of {}", rank, size));
  // A store may see several groups of one name, one after the other: each rank counts its own calls.
  const std::string prefix = fmt::format("shm/{}", name);
  const std::int64_t call = store.add(fmt::format("{}/calls/{}", prefix, rank), 1);
  int exchanges = 0;
  const auto exchange = [&](const std::string& value) {
    const int number = exchanges++;
    std::vector<std::string> keys;
    for (int r = 0; r < size; ++r) keys.push_back(fmt::format("{}/{}/{}/{}", prefix, call, number, r));
    store.set(keys[static_cast<std::size_t>(rank)], value);
    return store.get_all(keys, timeout);
  };
  auto processes = std::make_shared<PeerProcesses>(exchange(PeerProcesses::identity()));
  std::vector<int> members;
  for (int r = 0; r < size; ++r) members.push_back(r);
  auto segment = ShmSegment::make({size, kSlotBytes, kChannelChunk}, members, rank, exchange);
  return std::make_shared<ShmBackend>(std::move(segment), std::move(processes), std::move(members), rank,
                                      size > available_cores());
}

}  // namespace phalanx
