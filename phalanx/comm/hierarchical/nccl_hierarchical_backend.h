// NcclHierarchicalBackend: see nccl_hierarchical.h for what it promises. It moves nothing itself: an operation is a list
// of stages, one after the other, and a stage is operations of the backends below, side by side.
//   intra_node   nccl: the ranks of this node
//   lane         staged over gloo or mpi: the ranks with this local rank on all nodes; collectives
//   staged_flat  staged over gloo or mpi: all ranks; messages between nodes
//   flat    the same without staging: host memory, and the comparison of what the ranks call
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/device/device_streams.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/hierarchical/node_layout.h"

namespace phalanx {

class NcclHierarchicalBackend final : public Backend {
 public:
  struct Setup {
    std::shared_ptr<Backend> flat, lane;  // both for host memory
    std::shared_ptr<Backend> intra_node;
    NodeLayout layout;
    std::shared_ptr<DeviceStreams> streams;
    int cuda_device = -1;
  };
  explicit NcclHierarchicalBackend(Setup setup);
  /// Two or more nodes with equally many ranks, two or more, in a row.
  static bool can_serve(const NodeLayout& layout);

  int rank() const noexcept override { return setup_.flat->rank(); }
  int size() const noexcept override { return setup_.flat->size(); }
  BackendTraits traits() const noexcept override;
  std::unique_ptr<Operation> start(const OperationDescription& description) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  void abort(const std::string& reason) noexcept override;
  void check_ranks() override;

  // For the operations.
  Backend& flat() { return *setup_.flat; }
  Backend& lane() { return *lane_; }
  Backend& staged_flat() { return *staged_flat_; }
  Backend& intra_node() { return *setup_.intra_node; }
  const NodeLayout& layout() const { return setup_.layout; }
  const std::shared_ptr<DeviceStreams>& streams() const { return setup_.streams; }
  DeviceStream stream() const { return stream_; }
  int node() const { return setup_.layout.node_of(rank()); }
  int local_rank() const { return setup_.layout.local_rank_of(rank()); }
  std::uint64_t next_intra_node_sequence() { return intra_node_sequence_++; }
  std::uint64_t next_lane_sequence() { return lane_sequence_++; }
  /// Of the device, and the calling thread's current stream's.
  at::Tensor device_memory(std::int64_t bytes) const;
  CommVolume bytes() const { return {intra_node_bytes_.load(), inter_node_bytes_.load()}; }
  void count(bool intra_node, std::size_t bytes) {
    (intra_node ? intra_node_bytes_ : inter_node_bytes_).fetch_add(bytes);
  }

 private:
  Setup setup_;
  std::shared_ptr<Backend> lane_, staged_flat_;
  DeviceStream stream_ = nullptr;
  std::string name_;
  std::uint64_t intra_node_sequence_ = 0, lane_sequence_ = 0;
  std::atomic<std::uint64_t> intra_node_bytes_{0}, inter_node_bytes_{0};
};

/// What an operation does at a time. Descriptions may be on the device or not.
struct NcclStage {
  struct Part {
    Backend* transport = nullptr;
    OperationDescription description;
    std::unique_ptr<Operation> operation;
  };
  struct Copy {
    void* to = nullptr;
    const void* from = nullptr;
    std::size_t bytes = 0;
  };
  std::vector<Copy> copies;  // before the parts
  std::vector<Part> parts;
};

/// The stages of a collective after the comparison; memory that they use in between is added to `memory`.
std::vector<NcclStage> plan_nccl_stages(NcclHierarchicalBackend& backend, const OperationDescription& description,
                                        std::vector<at::Tensor>& memory);

}  // namespace phalanx
