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
/// Runs those of them that `is_wanted` says, without it all; what is wrong is thrown with the name of its case.
void run_backend_suite(Communicator& comm, const std::function<bool(const SuiteCase&)>& is_wanted = {});

/// Misuse and failure: each ends with every rank having checked its error. Worlds of two and more. The communicator is
/// made with failure_options(), and is of no use afterwards.
std::span<const SuiteCase> backend_failure_suite();
/// Time enough to meet, and a short time-out from Communicator::mark_started() on where the case is about that.
CommunicatorOptions failure_options(const SuiteCase& test);

/// What run() says is wrong; if that is lateness alone ("late: " in every line), it runs again, up to three times. A
/// virtual machine may stand still at the wrong moment without a trace that LoadedTime could find, but what is late
/// only for that reason is not so time after time.
std::string again_if_late(const std::function<std::string()>& run);

/// 10,000 small asynchronous operations over two communicators, in opposite order on even and odd ranks.
void suite_async_soak(Communicator& comm);

}  // namespace phalanx
