// Access to the c10d TCPStore that torchrun's agent hosts. Phalanx uses it only to pass on the address of its own
// store.
#pragma once

#include <chrono>
#include <string>

#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

/// If `value` is not null, sets the key to it and returns it. Otherwise waits until rank 0 has set the key and returns
/// its value. Throws CommError; after `timeout` the error names rank 0.
std::string exchange_through_agent_store(const HostPort& agent, const std::string& key, const std::string* value,
                                         std::chrono::milliseconds timeout);

}  // namespace phalanx
