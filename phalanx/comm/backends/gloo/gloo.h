// The gloo backend: ranks of one or many nodes over TCP. Collectives go through libtorch's ProcessGroupGloo, messages
// between two ranks over authenticated sockets of their own (message_transport.h).
//
// - Every collective moves bytes by gloo and reduces with our own kernels in rank order. So results have the same bits
//   as on the local and shm backends.
// - Before data moves, an all-gather of 32-byte signatures (also by gloo) makes a mismatch an error on every rank.
// - The data of collectives pass through buffers that the backend owns. An operation that is given up never touches
//   memory that the caller has back.
// - After abort() the peers' operations fail within milliseconds.
// - The others name a dead rank within a second: the store reports its death (Store::set_when_lost). They find a rank
//   that is stopped, or whose node or network is down, within CommunicatorOptions::heartbeat (heartbeat_monitor.h). A
//   time-out names the ranks that are behind; they are asked over the store.
// - SIGPIPE is ignored from then on, unless the program handles it. Otherwise gloo's sockets would end the process when
//   a peer dies.
//
//   auto world = make_gloo_communicator(store, rank, world_size, {.host = "127.0.0.1"});
#pragma once

#include <memory>
#include <string>

#include "phalanx/comm/communicator.h"
#include "phalanx/store/store.h"

namespace phalanx {

struct GlooOptions {
  std::string host = "127.0.0.1";  // the address of this node that the other ranks can reach
  int store_rank = -1;             // the rank that hosts the store, if one does: if the store dies, that rank has died
  std::string identity;  // of this process; empty: determined. Tests use it to make ranks of one node look separate
  CommunicatorOptions communicator;
};

/// Throws CommError that names the ranks which do not arrive within communicator.first_timeout.
/// REQUIRES: all ranks 0..world_size-1 call it, each with a client of the same store. The store, and the process that
/// hosts it, outlive the communicator and all that are split from it.
std::shared_ptr<Communicator> make_gloo_communicator(std::shared_ptr<Store> store, int rank, int world_size,
                                                     GlooOptions options = {});

}  // namespace phalanx
