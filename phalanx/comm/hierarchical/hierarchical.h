// Hierarchical communicators: the ranks of one node exchange data by a fast way of their own. Only what must cross
// nodes goes over gloo or mpi.
//
//   backend                 inside a node      for
//   "shm+gloo", "shm+mpi"   shared memory      CPU tensors (CUDA tensors by way of staged_backend.h)
//   "nccl+gloo", "nccl+mpi" NCCL               CUDA tensors, where NCCL has no way from node to node (no network that
//                                              it can use), or may not take it. Otherwise use nccl, which finds the
//                                              nodes by itself.
//
// Both kinds:
// - Which ranks share a node is proved, not told (node_discovery.h). Nodes may have different numbers of ranks.
// - Every collective begins with the flat backend's comparison of signatures. So mismatches, dead and stopped ranks are
//   found, worded and timed as there; between ranks of one node also as inside the node.
// - Each byte crosses the wire between two nodes once. How, and when the flat backend does the whole operation instead:
//   collective_schedule.h and the files that it names.
// - A group that is split from it and is wholly on one node gets the plain backend of the node. A group without two
//   ranks on any node gets the flat backend (over NCCL, by way of pinned memory).
//
// Over shared memory:
// - Reductions are in rank order: the same bits as local, shm and gloo. (Over mpi, small reductions, and all of them if
//   the ranks are not in the order of their nodes, are in MPI's order unless it is made deterministic; traits() says
//   so.)
//
// Over NCCL:
// - NCCL adds up inside a node. As many GPUs of each node as the smallest node has get a slice of the sum each. It
//   goes through pinned memory, and the host adds up the slices of all nodes. So sums are in NCCL's order inside a
//   node, and what a node has added up is rounded to the tensor's type before it is sent. All ranks get the same bits.
// - Work::wait() returns when the host's part is done, as on staged_backend.h.
// - CPU tensors, byte objects and barriers go over the flat communicator alone. Messages inside a node match in the
//   order of issue, as on nccl.
//
//   auto flat = make_gloo_communicator(store, rank, world_size, {.host = address});
//   auto world = make_hierarchical_communicator(std::move(flat), {.communicator = options});
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"

namespace phalanx {

class Backend;
class DeviceStreams;
struct NcclTable;

struct HierarchicalOptions {
  CommunicatorOptions communicator;
  // For tests, which make several "nodes" on one; the same on every rank.
  std::vector<int> nodes;  // of each rank, from 0; nothing is proved then
  std::optional<std::string> hint;
  // Shared memory only. Collectives that move fewer bytes are the flat backend's: there, waiting costs more than the
  // bytes. Measured (docs/communication_internals.md).
  std::int64_t smallest_bytes = 256 * 1024;
  bool by_estimate = true;  // false: reductions go through the nodes also where that moves more bytes
  // What is on its way between two nodes at a time, for each rank that takes part.
  std::int64_t piece_bytes = 512 * 1024;
  std::size_t steps_at_once = 256;                    // of an operation (collective_schedule.h); less is for tests
  std::int64_t device_piece_bytes = 4 * 1024 * 1024;  // the same over NCCL, which gains more from few calls
};

/// Bytes of the caller's data that this rank has given each transport to carry to others. Signatures are not counted.
struct CommVolume {
  std::uint64_t intra_node = 0;  // shared memory, or NCCL
  std::uint64_t inter_node = 0;  // the flat backend
};

/// Collective over all ranks of `flat`, a communicator over gloo or mpi that nobody uses from then on. With all ranks
/// on one node: "shm". With no two ranks on one node, or if shared memory cannot be had: `flat` (in the second case
/// with a warning, if there are several nodes).
std::shared_ptr<Communicator> make_hierarchical_communicator(std::shared_ptr<Communicator> flat,
                                                             HierarchicalOptions options = {});

/// The same with NCCL inside the nodes. With all ranks on one node: "nccl". With no two ranks on one node: the flat
/// backend, for CUDA tensors by way of pinned memory.
/// Throws NcclUnavailable or another CommError if NCCL or shared memory cannot be had.
std::shared_ptr<Communicator> make_nccl_hierarchical_communicator(std::shared_ptr<Communicator> flat, int cuda_device,
                                                                  HierarchicalOptions options = {});

/// The same over any table and streams; cuda_device -1: tensors are in host memory (tests).
std::shared_ptr<Communicator> make_nccl_hierarchical_communicator(std::shared_ptr<Communicator> flat, int cuda_device,
                                                                  std::shared_ptr<const NcclTable> table,
                                                                  std::shared_ptr<DeviceStreams> streams,
                                                                  HierarchicalOptions options);

/// nullopt unless the backend is a hierarchical one.
std::optional<CommVolume> comm_volume(const Backend& backend);

}  // namespace phalanx
