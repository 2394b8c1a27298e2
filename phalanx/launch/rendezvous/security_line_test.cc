#include "phalanx/launch/rendezvous/security_line.h"

#include <gtest/gtest.h>

namespace phalanx {
namespace {

std::string guards_of(const std::string& backend, const std::string& host_backend) {
  const std::string text = security_line(
      {.store = {"10.0.0.1", 4000}, .secret_source = "a file", .backend = backend, .host_backend = host_backend});
  const std::string begin = "security: the store at 10.0.0.1:4000 lets in only who knows the job secret (from a file)",
                    end = "; nothing is encrypted";
  EXPECT_TRUE(text.starts_with(begin) && text.ends_with(end)) << text;
  return text.substr(begin.size(), text.size() - begin.size() - end.size());
}

TEST(SecurityLineTest, NamesEverythingThatRanksUse) {
  const std::string shared = "; shared memory is this user's only", take = " data sockets take whoever reaches them",
                    gloo = "; gloo's data sockets let in only the job's ranks";
  EXPECT_EQ(guards_of("shm", "shm"), shared);
  EXPECT_EQ(guards_of("gloo", "gloo"), gloo);
  EXPECT_EQ(guards_of("mpi", "mpi"), "; MPI's" + take);
  EXPECT_EQ(guards_of("shm+gloo", "shm+gloo"), shared + gloo);
  EXPECT_EQ(guards_of("shm+mpi", "shm+mpi"), shared + "; MPI's" + take);
  // Beside NCCL the host backend still works: it compares calls, carries CPU tensors and monitors the ranks.
  EXPECT_EQ(guards_of("nccl", "shm"), shared + "; NCCL's" + take);
  EXPECT_EQ(guards_of("nccl", "gloo"), gloo + "; NCCL's" + take);
  EXPECT_EQ(guards_of("nccl", "shm+gloo"), shared + gloo + "; NCCL's" + take);
  EXPECT_EQ(guards_of("nccl", "shm+mpi"), shared + "; NCCL's and MPI's" + take);
  EXPECT_EQ(guards_of("nccl+gloo", "gloo"), shared + gloo + "; NCCL's" + take);
  EXPECT_EQ(guards_of("nccl+mpi", "mpi"), shared + "; NCCL's and MPI's" + take);
}

TEST(SecurityLineTest, SaysThatThereIsNoSecret) {
  EXPECT_EQ(
      security_line({.store = {"10.0.0.1", 4000}, .backend = "shm", .host_backend = "shm"}),
      "security: the store at 10.0.0.1:4000 lets in whoever reaches it; shared memory is this user's only; nothing "
      "is encrypted");
}

}  // namespace
}  // namespace phalanx
