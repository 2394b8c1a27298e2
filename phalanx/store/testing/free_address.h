// An address on loopback where nothing listens, for programs that are told where to listen. Tests only.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "phalanx/base/error.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/tcp_store_socket.h"

namespace phalanx {

/// The port was free a moment ago. Linux gives none below 32768 to who asks for any port, as tests beside this one do,
/// if its settings are the usual ones. Two calls of a process give two ports.
inline HostPort free_address() {
  constexpr int kFirst = 20000, kPorts = 8000, kStride = 3057;
  static std::atomic<int> calls = 0;
  for (int tries = 0; tries < kPorts; ++tries) {
    const int offset = ::getpid() % kPorts * kStride + calls++;
    try {
      return TcpStoreServer({.port = static_cast<std::uint16_t>(kFirst + offset % kPorts)}).address();
    } catch (const Error&) {
    }
  }
  throw Error("no port from 20000 to 27999 is free on loopback");
}

}  // namespace phalanx
