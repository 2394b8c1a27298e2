// Runs every verb whose data peers may read directly, with tensors in a given kind of memory, and compares the results
// with those of ordinary memory (tests only).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "phalanx/comm/communicator.h"

namespace phalanx {

/// Throws std::runtime_error(what) unless the condition holds.
void must_be(bool condition, const std::string& what);

/// Runs each verb twice with `count` elements per rank: in memory that is not shared, and on tensors that
/// place(elements) makes. Throws if the results differ; `what` names the kind of memory in the error.
void compare_verbs(Communicator& comm, std::int64_t count, c10::ScalarType type, const std::string& what,
                   const std::function<at::Tensor(std::int64_t elements)>& place);

/// The victim's side of a fault. It starts an all_reduce of x. In the middle of it, while this process and its peers
/// write each other's tensors, this process sends itself the signal.
/// REQUIRES: x holds ones and is in memory that the peers can access.
void strike_at_work(Communicator& comm, at::Tensor x, int signal);

/// For ranks that only a timeout ends. The victim stops itself within an all_reduce of `x`. Once it is continued, it
/// learns that the others have given up, and gets false. For the others the all_reduce times out; they get true.
bool outlasts_a_stopped_rank(Communicator& comm, const at::Tensor& x, bool is_victim);

/// The resident size in KiB, for this process, of the mapping of the memfd `name` that contains the address.
std::int64_t resident_kib(std::uintptr_t address, const std::string& name = "memfd:phalanx ");

/// The start of the only mapping of the memfd `name`. With one shm communicator and no window, it is its segment.
std::uintptr_t only_mapping(const std::string& name = "memfd:phalanx ");

}  // namespace phalanx
