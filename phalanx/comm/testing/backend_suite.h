// The test suite that every backend must pass (tests only). Every rank of a fresh world runs a case. A case throws on
// an error, so it can run in threads and in processes without a test framework.
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
  bool needs_time_out = false;    // the case waits for a timeout
};

/// The cases that must succeed, with closed-form results, for any world size.
std::span<const SuiteCase> backend_suite();
/// Runs the cases that `is_wanted` selects; without it, all cases. An error is thrown with the name of its case.
void run_backend_suite(Communicator& comm, const std::function<bool(const SuiteCase&)>& is_wanted = {});

/// Cases of misuse and failure: in each, every rank checks its error. For worlds of two and more ranks. The
/// communicator is made with failure_options(), and cannot be used afterwards.
std::span<const SuiteCase> backend_failure_suite();
/// A long timeout for the rendezvous. If the case waits for a timeout, a short one applies from
/// Communicator::mark_started() on.
CommunicatorOptions failure_options(const SuiteCase& test);

/// Returns the failures that run() reports. If they are only about lateness ("late: " in every line), it tries again,
/// up to three times in all. A virtual node may be paused at the wrong moment, and LoadedTime cannot detect this.
/// But this does not happen three times in a row.
std::string again_if_late(const std::function<std::string()>& run);

/// 10,000 small asynchronous operations over two communicators, in opposite order on even and odd ranks.
void suite_async_soak(Communicator& comm);

}  // namespace phalanx
