// Which ranks share a node, proved: they can share memory.
//
// A boot id and the numbers of namespaces are only a hint: the two nodes of a Slurm that runs on one node have equal
// ones and share everything, the clones of a virtual node have equal ones and share nothing, and containers differ
// in any of them. So ranks whose hints are equal prove it: each keeps a random token in a small piece of anonymous
// shared memory, and tells where that is but not the token; the others open the memory of the first rank that they can,
// and read the token there. Who then announces the token that its owner announces shares that node. Nothing is asked
// of the environment, and a container that hides its processes is a node of its own.
//
// Why every rank has a piece of memory, and not only the first of those with equal hints: where that first one cannot
// be reached, the others still find each other, in the same two exchanges.
//
//   const std::vector<int> node_of = discover_nodes(rank, size, exchange);   // {0, 0, 1, 1}
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace phalanx {

/// The hint: equal for processes of one kernel, network and process namespace. Two processes with other hints do not
/// share memory as far as Phalanx is concerned.
std::string local_host_id();

/// Collective over the ranks behind `exchange`, which all-gathers byte strings, and is called twice. Returns the number
/// of each rank's node, the same on every rank: nodes are numbered from 0 in the order of their first ranks.
/// hint: tests make processes of one node seem to be on several, or the reverse.
std::vector<int> discover_nodes(int rank, int size,
                                const std::function<std::vector<std::string>(const std::string&)>& exchange,
                                const std::string& hint = local_host_id());

}  // namespace phalanx
