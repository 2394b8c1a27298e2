// Hierarchical communicators: ranks of one node exchange data through shared memory; only what must cross nodes goes
// over gloo or mpi. The backend is called "shm+gloo" or "shm+mpi".
//
// - Which ranks share a node is proved, not told (node_discovery.h). A group that is wholly on one node gets the
//   plain shm backend, one without two ranks on any node the plain flat one; so do the groups split from it.
// - Every collective begins with the flat backend's comparison of signatures, so mismatches, dead and stopped ranks are
//   found, worded and timed as there; between ranks of one node also as on shm.
// - Reductions are in rank order: the bits of local, shm and gloo. (Over mpi small ones, and all where the ranks are
//   not in the order of their nodes, are in MPI's order unless it is made deterministic; traits() says so.)
// - Each byte crosses the wire between two nodes once, and none between ranks of one node. How, and when the flat
//   backend does the whole operation instead: node_layout.h, hierarchical_collectives.cc, hierarchical_reduce.cc.
// - CUDA tensors are staged over it as over any backend for host memory (staged_backend.h). NCCL finds the nodes by
//   itself; NCCL inside a node with another backend between nodes: nccl_hierarchical.h.
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

struct HierarchicalOptions {
  CommunicatorOptions communicator;
  // For tests, which make several "nodes" on one; the same on every rank.
  std::vector<int> nodes;  // of each rank, from 0; nothing is proved then
  std::optional<std::string> hint;
  // Collectives that move fewer bytes are the flat backend's: there, waiting costs more than the bytes. Measured
  // (docs/communication_internals.md).
  std::int64_t smallest_bytes = 256 * 1024;
  bool by_estimate = true;                // false: reductions go through the nodes also where that moves more bytes
  std::int64_t piece_bytes = 512 * 1024;  // of what is under way between two nodes at a time
};

/// Bytes of the caller's data that this rank has given each transport to carry to others; signatures are not counted.
struct CommVolume {
  std::uint64_t intra_node = 0;  // shared memory; of nccl_hierarchical.h: NCCL
  std::uint64_t inter_node = 0;  // the flat backend
};

/// Collective over all ranks of `flat`, a communicator over gloo or mpi that nobody uses from then on. Returns one over
/// the backend said above; if shared memory cannot be had for it, over the flat one (with a warning, if there are
/// several nodes).
std::shared_ptr<Communicator> make_hierarchical_communicator(std::shared_ptr<Communicator> flat,
                                                             HierarchicalOptions options = {});

/// nullopt unless the backend is a hierarchical one.
std::optional<CommVolume> comm_volume(const Backend& backend);

}  // namespace phalanx
