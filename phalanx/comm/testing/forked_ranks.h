// Runs ranks as forked processes, for tests that need processes.
//
//   TcpStoreServer server;
//   EXPECT_EQ(run_forked_ranks(4, [&](int rank) {
//     TcpStore store(server.address());
//     use(*make_shm_communicator(store, rank, 4));            // throws on an error
//   }), "");
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "phalanx/comm/communicator.h"

namespace phalanx {

/// Runs body(rank) in `world` forked processes and waits for them. Returns one line per rank that failed: its exit
/// status or signal, and the text of its exception. killed_rank is expected to die by SIGKILL (-1: nobody).
std::string run_forked_ranks(int world, const std::function<void(int rank)>& body, int killed_rank = -1);

/// The same for a body that threads of one process can run as well. Under ThreadSanitizer the ranks are threads, unless
/// one is to be killed: it sees nothing in a process that was forked by one with threads.
std::string run_forked_ranks_or_threads(int world, const std::function<void(int rank)>& body, int killed_rank = -1);

/// The first call in the child of a test that forks.
void begin_forked_child();

/// A forked child calls a verb, which must be refused, destroys its copy and ends. Throws std::runtime_error if it does
/// not get so far within 20 s.
/// REQUIRES: comm is the only owner.
void destroy_in_child(std::shared_ptr<Communicator>& comm);

}  // namespace phalanx
