#include "phalanx/base/owner_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace phalanx {
namespace {

// Runs the body in a forked child and returns its result.
template <class Body>
bool in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 1 : 0);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status) == 1;
}

TEST(OwnerProcess, IsTheProcessThatMadeItAndNoForkedOne) {
  const OwnerProcess mine;
  EXPECT_TRUE(mine.is_this_process());
  EXPECT_FALSE(in_child([&] { return mine.is_this_process(); }));
  EXPECT_TRUE(mine.is_this_process());
}

TEST(OwnerProcess, AChildOwnsWhatItMakesAndItsChildrenDoNot) {
  EXPECT_TRUE(in_child([] {
    const OwnerProcess childs;
    return childs.is_this_process() && !in_child([&] { return childs.is_this_process(); });
  }));
}

}  // namespace
}  // namespace phalanx
