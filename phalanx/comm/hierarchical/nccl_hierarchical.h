// NCCL inside every node, and gloo or mpi between nodes: for CUDA tensors where NCCL has no way from one node
// to the other (no common network that it can use), or may not take it. Its backend is called "nccl+gloo" or
// "nccl+mpi".
//
// - Every node must have the same number of ranks, in a row: ranks 0 to 3, 4 to 7, ... Who shares a node is
//   proved (node_discovery.h). A group that is split from it gets "nccl" if it is on one node, this if it is of the
//   same form, and else the host's backend by way of pinned memory.
// - Each byte crosses the wire between two nodes once. Reductions: NCCL adds up inside a node, every GPU gets a
//   slice, goes through pinned memory, and the slices are added up between nodes, each by the ranks of one place.
//   So sums are in NCCL's order, and what a node has added up is rounded to the tensor's type before it is sent; all
//   ranks get the same bits. How the other verbs go: nccl_hierarchical_collectives.cc.
// - Before anything is moved the ranks compare their calls on the host: the call itself throws, or its Work.
//   Work::wait() returns when the host's part is done, as on staged_backend.h.
// - CPU tensors, byte objects and barriers go over the flat communicator, on one level. Messages inside a node match
//   in the order of issue, as on nccl.
//
//   auto flat = make_gloo_communicator(store, rank, world_size, {.host = address});
//   auto world = make_nccl_hierarchical_communicator(std::move(flat), cuda_device);
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/backends/nccl/nccl_table.h"
#include "phalanx/comm/communicator.h"

namespace phalanx {

struct NcclHierarchicalOptions {
  CommunicatorOptions communicator;
  // For tests, which make several "nodes" on one; the same on every rank.
  std::vector<int> nodes;  // of each rank, from 0; nothing is proved then
};

/// Collective over all ranks of `flat`, a communicator over gloo or mpi that nobody uses from then on. With all ranks
/// on one node: "nccl"; with none beside another: the flat backend by way of pinned memory. Throws ConfigError where
/// the nodes are not as said above, NcclUnavailable or another CommError if NCCL or shared memory cannot be had.
std::shared_ptr<Communicator> make_nccl_hierarchical_communicator(std::shared_ptr<Communicator> flat, int cuda_device,
                                                                  NcclHierarchicalOptions options = {});

/// The same over any table and streams; cuda_device -1: tensors are in host memory (tests).
std::shared_ptr<Communicator> make_nccl_hierarchical_communicator(std::shared_ptr<Communicator> flat, int cuda_device,
                                                                  std::shared_ptr<const NcclTable> table,
                                                                  std::shared_ptr<DeviceStreams> streams,
                                                                  NcclHierarchicalOptions options);

}  // namespace phalanx
