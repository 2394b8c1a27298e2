// The gloo backend: ranks of one or many nodes over TCP. It has the name of torch's backend for CPU tensors, whose
// place it takes; its collectives and messages go over authenticated sockets of its own (message_transport.h).
//
// - Reductions use our own kernels in rank order. So results have the same bits as on the local and shm backends.
// - Before data move, the ranks exchange signatures of 32 bytes, which makes a mismatch an error on every rank.
// - Data move between the tensors themselves. Once an operation has failed, no thread uses their memory.
// - After abort() the peers' operations fail within milliseconds.
// - The others name a dead rank within a second: the store reports its death (Store::set_when_lost). They find a rank
//   that is stopped, or whose node or network is down, within CommunicatorOptions::heartbeat (heartbeat_monitor.h). A
//   time-out names the ranks that are behind; they are asked over the store.
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
