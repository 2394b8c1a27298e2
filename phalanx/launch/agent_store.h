// torchrun's agent hosts a c10d TCPStore; we use it for one thing: to pass on where our own store is.
#pragma once

#include <chrono>
#include <string>

#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

/// With `value`, sets the key; without, waits for it: it is rank 0's to set, and that rank is named if it does not.
/// Throws CommError.
std::string exchange_through_agent_store(const HostPort& agent, const std::string& key, const std::string* value,
                                         std::chrono::milliseconds timeout);

}  // namespace phalanx
