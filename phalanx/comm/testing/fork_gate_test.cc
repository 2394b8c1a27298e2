#include "phalanx/comm/testing/fork_gate.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

namespace phalanx {
namespace {

TEST(ForkGate, NoChildRunsBeforeItIsOpen) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ForkGate gate;
  std::vector<pid_t> children;
  for (int k = 0; k < 2; ++k) {
    children.push_back(gate.fork());
    if (children.back() == 0) _exit(write(ends[1], "x", 1) == 1 ? 0 : 1);
  }
  pollfd written{ends[0], POLLIN, 0};
  EXPECT_EQ(poll(&written, 1, 50), 0);
  gate.open();
  for (const pid_t child : children) {
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  char text[2];
  EXPECT_EQ(read(ends[0], text, sizeof text), 2);
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace phalanx
