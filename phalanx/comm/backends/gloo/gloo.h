// The gloo backend: ranks of one or many machines over TCP, through the ProcessGroupGloo that libtorch brings.
//
// - Every collective moves bytes by gloo and reduces by our own kernels in rank order, so results have the same bits as
//   on the local and shm backends. Before data moves an all-gather of 32-byte signatures (gloo's too) makes a mismatch
//   an error on every rank. Data passes through buffers of the backend's own: an operation that is given up never
//   touches memory that the caller has back.
// - A rank that dies is named by the others within a second: the store tells of it (Store::set_when_lost). One that is
//   stopped, or whose machine or network is down, within CommunicatorOptions::heartbeat (heartbeat_monitor.h). A time-out
//   names the ranks that have not come as far; they are asked over the store.
// - SIGPIPE is ignored from then on, unless the program handles it: gloo's sockets would end the process when a peer
//   dies.
// - The store must outlive the communicator and all that are split from it; so must the process that hosts it.
//
//   auto world = make_gloo_communicator(store, rank, world_size, {.host = "127.0.0.1"});
#pragma once

#include <memory>
#include <string>

#include "phalanx/comm/communicator.h"
#include "phalanx/store/store.h"

namespace phalanx {

struct GlooOptions {
  std::string host = "127.0.0.1";  // the address of this machine that the other ranks can reach
  int store_rank = -1;   // the rank whose process hosts the store, if one does: when the store dies, so has that rank
  std::string identity;  // of this process; empty: found out. Tests make ranks of one machine strangers with it
  CommunicatorOptions communicator;
};

/// Collective over the ranks 0..world_size-1, each with a client of the same store. Ranks that do not come within
/// communicator.first_timeout are named in a CommError.
std::shared_ptr<Communicator> make_gloo_communicator(std::shared_ptr<Store> store, int rank, int world_size,
                                                     GlooOptions options = {});

}  // namespace phalanx
