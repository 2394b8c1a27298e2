#include "phalanx/comm/backends/local_shm/local_backend.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "phalanx/comm/backends/local_shm/p2p_channels.h"
#include "phalanx/comm/backends/local_shm/round_operation.h"
#include "phalanx/comm/wait.h"

namespace phalanx {
namespace {

// What all groups of one world share.
struct LocalWorld {
  explicit LocalWorld(int size) : gone(static_cast<std::size_t>(size)) {}
  std::vector<std::atomic<bool>> gone;  // ranks that have returned
  bool is_oversubscribed = false;
};

// The memory of one group of rank threads.
struct LocalGroup {
  LocalGroup(std::shared_ptr<LocalWorld> its_world, std::vector<int> world_ranks)
      : world(std::move(its_world)),
        members(std::move(world_ranks)),
        ranks(members.size()),
        channels(members.size() * members.size()) {}
  bool has_gone(int rank) const { return world->gone[world_rank(rank)].load(std::memory_order_acquire); }
  std::size_t world_rank(int rank) const { return static_cast<std::size_t>(members[static_cast<std::size_t>(rank)]); }

  std::shared_ptr<LocalWorld> world;
  std::vector<int> members;
  ControlBlockHeader head{};
  std::vector<RankControlBlock> ranks;
  std::vector<Channel> channels;
};

class LocalBackend final : public Backend {
 public:
  LocalBackend(std::shared_ptr<LocalGroup> group, int rank)
      : group_(std::move(group)),
        control_block_({&group_->head, group_->ranks.data(), group_, false}, rank,
                       static_cast<int>(group_->ranks.size()),
                       [this](int peer) {
                         return group_->has_gone(peer) ? std::string("has returned and will not come") : std::string();
                       }),
        channels_(control_block_, {group_->channels.data(), nullptr, 0}) {}

  int rank() const noexcept override { return control_block_.rank(); }
  int size() const noexcept override { return control_block_.size(); }
  BackendTraits traits() const noexcept override {
    return {.name = "local",
            .rank_order_reduction = true,
            .host_only = true,
            .oversubscribed = group_->world->is_oversubscribed};
  }
  std::unique_ptr<Operation> start(const OperationDescription& description) override {
    if (!description.transfers.empty()) return std::make_unique<P2POperation>(channels_, description);
    return std::make_unique<RoundOperation>(control_block_, description);
  }
  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    // The first member makes the group and sends its address to all; the second exchange confirms that all hold it.
    std::shared_ptr<LocalGroup> group;
    std::string address(sizeof(void*), '\0');
    if (request.rank == 0) {
      std::vector<int> members;
      for (int member : request.members) members.push_back(group_->members[static_cast<std::size_t>(member)]);
      group = std::make_shared<LocalGroup>(group_->world, std::move(members));
      const auto* holder = &group;
      std::memcpy(address.data(), &holder, address.size());
    }
    const std::vector<std::string> addresses = request.exchange(address);
    if (request.rank > 0) {
      const std::shared_ptr<LocalGroup>* holder = nullptr;
      std::memcpy(&holder, addresses[static_cast<std::size_t>(request.members[0])].data(), address.size());
      group = *holder;
    }
    request.exchange("");
    if (request.members.empty()) return nullptr;
    return std::make_shared<LocalBackend>(std::move(group), request.rank);
  }
  void abort(const std::string& reason) noexcept override { control_block_.abort(reason); }
  void check_ranks() override { control_block_.check_ranks(); }
  void mark_gone() noexcept {
    group_->world->gone[group_->world_rank(control_block_.rank())].store(true, std::memory_order_release);
  }

 private:
  std::shared_ptr<LocalGroup> group_;
  ControlBlock control_block_;
  P2PChannels channels_;
};

}  // namespace

std::vector<std::shared_ptr<Backend>> make_local_backends(int size) {
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  auto world = std::make_shared<LocalWorld>(size);
  world->is_oversubscribed = size > available_cores();
  auto group = std::make_shared<LocalGroup>(std::move(world), std::move(members));
  std::vector<std::shared_ptr<Backend>> backends;
  for (int rank = 0; rank < size; ++rank) backends.push_back(std::make_shared<LocalBackend>(group, rank));
  return backends;
}

void mark_local_rank_gone(Backend& backend) noexcept { static_cast<LocalBackend&>(backend).mark_gone(); }

}  // namespace phalanx
