// HierarchicalBackend: a backend for the ranks of one node (`intra_node`: shm or nccl) and one for all ranks (`flat`:
// gloo or mpi), put together. hierarchical.h says what it promises.
//
// A collective is a list of steps (collective_schedule.h). First all ranks compare what they call: a barrier inside the
// node and, at the same time, the comparison of the flat backend (compare_only), which moves no data. The barrier finds
// ranks of this node that are in a message instead; the comparison finds every other mismatch. Then the data move.
// Where it is as good, the flat backend does the whole operation instead. A message goes through `intra_node` or
// `flat`, by where its peer is.
//
// If `intra_node` moves device memory, messages between nodes go through pinned host memory (`staged_flat`). Operations
// on host memory then go to the flat backend.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/device/device_streams.h"
#include "phalanx/comm/device/pinned_pool.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/hierarchical/node_layout.h"

namespace phalanx {

/// The tag of the messages that collectives consist of. Users may have all other tags. It is within the range of tags
/// that every known MPI has.
inline constexpr int kHierarchicalTag = 2'000'000;

/// The device whose memory `intra_node` moves. streams is null if it moves host memory. cuda_device -1: tensors in
/// host memory stand for the device's (tests).
struct HierarchicalDevice {
  std::shared_ptr<DeviceStreams> streams;
  int cuda_device = -1;
};

class HierarchicalBackend final : public Backend {
 public:
  struct Tuning {
    std::int64_t smallest_bytes = 0;
    bool by_estimate = true;
    std::int64_t piece_bytes = 0;
    std::size_t steps_at_once = 256;  // of a schedule
  };
  /// intra_node: over the members of this rank's node, in their order. nullptr if the rank is alone on its node.
  HierarchicalBackend(std::shared_ptr<Backend> flat, std::shared_ptr<Backend> intra_node, NodeLayout layout,
                      Tuning tuning, HierarchicalDevice device = {});

  int rank() const noexcept override { return flat_->rank(); }
  int size() const noexcept override { return flat_->size(); }
  BackendTraits traits() const noexcept override;
  std::unique_ptr<Operation> start(const OperationDescription& description) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  std::shared_ptr<Backend> split_host(const SplitRequest& request) override;
  void abort(const std::string& reason) noexcept override;
  void check_ranks() override;

  // For the operations.
  Backend& flat() { return *flat_; }
  Backend& staged_flat() { return *staged_flat_; }  // REQUIRES: has_device()
  Backend* intra_node() { return intra_node_.get(); }
  const NodeLayout& layout() const { return layout_; }
  const Tuning& tuning() const { return tuning_; }
  int node() const { return layout_.node_of(rank()); }
  const std::vector<int>& local_members() const { return layout_.members(node()); }  // this rank included
  bool is_local(int peer) const { return intra_node_ != nullptr && layout_.node_of(peer) == node(); }
  std::uint64_t next_intra_node_sequence() { return intra_node_sequence_++; }
  CommVolume bytes() const { return {intra_node_bytes_.load(), inter_node_bytes_.load()}; }
  void count(bool intra_node, std::size_t bytes) {
    (intra_node ? intra_node_bytes_ : inter_node_bytes_).fetch_add(bytes);
  }

  bool has_device() const { return device_.streams != nullptr; }
  const std::shared_ptr<DeviceStreams>& shared_streams() const { return device_.streams; }
  DeviceStreams& streams() { return *device_.streams; }
  DeviceStream stream() const { return stream_; }
  int cuda_device() const { return device_.cuda_device; }

  /// Host memory that is kept from one operation to the next; pinned if there is a device.
  std::shared_ptr<std::byte> acquire_buffer(std::size_t bytes);
  void release_buffer(std::shared_ptr<std::byte> memory, std::size_t bytes);

 private:
  std::shared_ptr<Backend> staged(std::shared_ptr<Backend> host) const;

  std::shared_ptr<Backend> flat_, intra_node_;
  NodeLayout layout_;
  Tuning tuning_;
  HierarchicalDevice device_;
  std::shared_ptr<Backend> staged_flat_;
  DeviceStream stream_ = nullptr;
  std::shared_ptr<PinnedPool> pinned_;  // nullptr without a device
  std::string name_;
  std::uint64_t intra_node_sequence_ = 0;
  std::atomic<std::uint64_t> intra_node_bytes_{0}, inter_node_bytes_{0};
  std::multimap<std::size_t, std::shared_ptr<std::byte>> memory_;
  std::size_t cached_bytes_ = 0;
};

/// A collective or messages.
std::unique_ptr<Operation> make_hierarchical_operation(HierarchicalBackend& backend,
                                                       const OperationDescription& description);

}  // namespace phalanx
