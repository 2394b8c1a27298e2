// The suite that every backend must pass (tests only). A case is run by every rank of a fresh world and throws what is
// wrong, so that it can be run in threads and in processes without a test framework.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"

namespace phalanx {

struct SuiteCase {
  const char* name;
  void (*run)(Communicator& comm);
  bool needs_rank_order = false;  // only for backends that reduce in rank order
  bool needs_time_out = false;    // waits for one
};

/// Everything that must work, with closed forms; for any world size.
std::span<const SuiteCase> backend_suite();

/// Misuse and failure: each ends with every rank having checked its error. Worlds of two and more. The communicator
/// must have been made with a short time-out where the case is about that, and is of no use afterwards.
std::span<const SuiteCase> backend_failure_suite();

/// 10,000 small asynchronous operations over two communicators, in opposite order on even and odd ranks.
void suite_async_soak(Communicator& comm);

/// Runs body(rank) in `world` forked processes and waits for them. Returns one line per rank that failed: its exit
/// status or signal, and the text of its exception. killed_rank is expected to die by SIGKILL (-1: nobody).
std::string run_forked_ranks(int world, const std::function<void(int rank)>& body, int killed_rank = -1);

}  // namespace phalanx
