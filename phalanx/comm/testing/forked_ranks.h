// Runs ranks as forked processes, for tests that need processes.
//
//   TcpStoreServer server;
//   EXPECT_EQ(run_forked_ranks(4, [&](int rank) {
//     TcpStore store(server.address());
//     use(*make_shm_communicator(store, rank, 4));            // throws on an error
//   }), "");
#pragma once

#include <functional>
#include <string>

namespace phalanx {

/// Runs body(rank) in `world` forked processes and waits for them. Returns one line per rank that failed: its exit
/// status or signal, and the text of its exception. killed_rank is expected to die by SIGKILL (-1: nobody).
std::string run_forked_ranks(int world, const std::function<void(int rank)>& body, int killed_rank = -1);

/// The same for a body that threads of one process can run as well. Under ThreadSanitizer the ranks are threads, unless
/// one is to be killed: it sees nothing in a process that was forked by one with threads.
std::string run_forked_ranks_or_threads(int world, const std::function<void(int rank)>& body, int killed_rank = -1);

/// The first call in the child of a test that forks.
void begin_forked_child();

}  // namespace phalanx
