// torchrun's agent hosts a c10d TCPStore; we use it for one thing: to pass on the address of our own store.
#pragma once

#include <chrono>
#include <string>

#include "phalanx/comm/tcp_store_socket.h"

namespace phalanx {

/// With `value`, sets the key; without, waits for it. Throws CommError.
std::string exchange_through_agent_store(const HostPort& agent, const std::string& key, const std::string* value,
                                         std::chrono::milliseconds timeout);

}  // namespace phalanx
