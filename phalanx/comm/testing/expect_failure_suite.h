// For a backend's test: every case of backend_failure_suite(), each in a world of its own.
#pragma once

#include <gtest/gtest.h>

#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/fault_world.h"

namespace phalanx {

/// run(body, options) makes a world, runs body(comm) in each of its ranks, and returns what failed.
template <class Run>
void expect_failure_suite(Run run) {
  for (const SuiteCase& test : backend_failure_suite()) {
    SCOPED_TRACE(test.name);
    EXPECT_EQ(again_if_late([&] { return run(test.run, failure_options(test)); }), "");
  }
}

}  // namespace phalanx
