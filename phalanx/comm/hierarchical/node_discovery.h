// Which ranks share a node. It is proved: they can share memory.
//
// A boot id and the numbers of namespaces are only a hint. Two virtual nodes of a Slurm on one computer have equal ones
// and share everything. The clones of a virtual computer have equal ones and share nothing. Containers differ in any of
// them. So ranks with equal hints prove it in two exchanges:
//   1. Each rank keeps a random token in a small piece of anonymous shared memory.
//      It announces where the memory is, but not the token.
//   2. Each rank opens the memory of the first rank that it can, and announces the token that it reads there, and its
//      own token. A rank that announces another rank's token shares that rank's node.
// The environment is not asked. A container that hides its processes is a node of its own. Every rank has a piece of
// memory, so if one rank cannot be reached, the others still find each other.
//
//   const std::vector<int> node_of = discover_nodes(rank, size, exchange);   // {0, 0, 1, 1}
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace phalanx {

/// The hint: equal for processes of one kernel, network namespace and process namespace. Processes with different hints
/// never count as sharing memory.
std::string local_host_id();

/// Collective over the ranks behind `exchange`, which all-gathers byte strings. It is called twice. Returns the number
/// of each rank's node, the same on every rank. Nodes are numbered from 0, in the order of their first ranks.
/// hint: lets tests place the processes of one node on several, or the reverse.
std::vector<int> discover_nodes(int rank, int size,
                                const std::function<std::vector<std::string>(const std::string&)>& exchange,
                                const std::string& hint = local_host_id());

}  // namespace phalanx
