// HierarchicalBackend: a backend for the ranks of one node (`intra_node`, shm) and one for all ranks (`flat`, gloo or
// mpi),
// put together; see hierarchical.h for what it promises. Torch-free.
//
// A collective is a list of steps (collective_schedule.h). It begins with a barrier inside the node and, at the same
// time, the flat backend's comparison of the real description, which moves no data (compare_only): the first finds
// ranks of this node that are in a message instead, the second every other mismatch. Or, where that is as good, the
// flat backend does it all. Messages of a rank go through inner or flat by where the peer is.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/hierarchical/node_layout.h"

namespace phalanx {

/// Of the messages that collectives are made of; users may have the other tags. Small enough for every MPI that has
/// been met.
inline constexpr int kHierarchicalTag = 2'000'000;

class HierarchicalBackend final : public Backend {
 public:
  struct Tuning {
    std::int64_t smallest_bytes = 0;
    bool by_estimate = true;
    std::int64_t piece_bytes = 0;
  };
  /// inner: over the members of this rank's node, in their order; null if it is alone there.
  HierarchicalBackend(std::shared_ptr<Backend> flat, std::shared_ptr<Backend> intra_node, NodeLayout layout,
                      Tuning tuning);

  int rank() const noexcept override { return flat_->rank(); }
  int size() const noexcept override { return flat_->size(); }
  BackendTraits traits() const noexcept override;
  std::unique_ptr<Operation> start(const OperationDescription& description) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  void abort(const std::string& reason) noexcept override;
  void check_ranks() override;

  // For the operations.
  Backend& flat() { return *flat_; }
  Backend* intra_node() { return intra_node_.get(); }
  const NodeLayout& layout() const { return layout_; }
  const Tuning& tuning() const { return tuning_; }
  int node() const { return layout_.node_of(rank()); }
  const std::vector<int>& local_members() const { return layout_.members(node()); }  // of this node, itself too
  bool is_local(int peer) const { return layout_.node_of(peer) == node(); }
  std::uint64_t next_intra_node_sequence() { return intra_node_sequence_++; }
  CommVolume bytes() const { return {intra_node_bytes_.load(), inter_node_bytes_.load()}; }
  void count(bool intra_node, std::size_t bytes) {
    (intra_node ? intra_node_bytes_ : inter_node_bytes_).fetch_add(bytes);
  }

  /// Memory that is kept from one operation to the next.
  std::unique_ptr<std::byte[]> acquire_buffer(std::size_t bytes);
  void release_buffer(std::unique_ptr<std::byte[]> memory, std::size_t bytes);

 private:
  std::shared_ptr<Backend> flat_, intra_node_;
  NodeLayout layout_;
  Tuning tuning_;
  std::string name_;
  std::uint64_t intra_node_sequence_ = 0;
  std::atomic<std::uint64_t> intra_node_bytes_{0}, inter_node_bytes_{0};
  std::multimap<std::size_t, std::unique_ptr<std::byte[]>> memory_;
  std::size_t cached_bytes_ = 0;
};

}  // namespace phalanx
