// Every verb whose data peers may read where they lie, as a function of where that is: for tests that hold one place
// against another.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "phalanx/comm/communicator.h"

namespace phalanx {

/// Throws std::runtime_error(what) unless the condition holds.
void must_be(bool condition, const std::string& what);

/// Each verb twice, on `count` elements a rank: where nothing is shared, and on tensors that place(elements) makes. The
/// results must be equal, else this throws what differs; `what` says which place it is.
void compare_verbs(Communicator& comm, std::int64_t count, c10::ScalarType type, const std::string& what,
                   const std::function<at::Tensor(std::int64_t elements)>& place);

/// The victim's side of a fault: an all_reduce of x, which holds ones and which the peers reach, in the middle of which
/// this process sends itself the signal, while it and its peers write each other's tensors.
void strike_at_work(Communicator& comm, at::Tensor x, int signal);

/// Kibibytes that this process has in its page tables of its mapping of the memfd `name` that holds the address.
std::int64_t resident_kib(std::uintptr_t address, const std::string& name = "memfd:phalanx ");

/// Where the only mapping of the memfd `name` begins. With one communicator of shm and no window that is its segment.
std::uintptr_t only_mapping(const std::string& name = "memfd:phalanx ");

}  // namespace phalanx
