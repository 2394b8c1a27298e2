#include "phalanx/base/nearest.h"

#include <gtest/gtest.h>

namespace phalanx {
namespace {

TEST(Nearest, DistanceCountsEditsAndSwaps) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("recieve", "receive"), 1u);
  EXPECT_EQ(edit_distance("Steps", "steps"), 0u);
}

TEST(Nearest, PicksTheClosestAndStaysSilentWhenNothingIsNear) {
  const std::vector<std::string> keys = {"steps", "seq_len", "local_batch_size", "global_batch_size", "lr"};
  EXPECT_EQ(nearest("step", keys), "steps");
  EXPECT_EQ(nearest("seqlen", keys), "seq_len");
  EXPECT_EQ(nearest("batch_size", keys), "local_batch_size");  // a part of it
  EXPECT_EQ(nearest("globalbatchsize", keys), "global_batch_size");
  EXPECT_EQ(nearest("wandb_project", keys), "");
  EXPECT_EQ(nearest("xy", keys), "");  // two letters, both wrong
  EXPECT_EQ(nearest("x", {}), "");
}

TEST(Nearest, Hint) {
  EXPECT_EQ(did_you_mean("trian", {"train", "tokenize"}), " (did you mean 'train'?)");
  EXPECT_EQ(did_you_mean("fly", {"train", "tokenize"}), "");
}

}  // namespace
}  // namespace phalanx
