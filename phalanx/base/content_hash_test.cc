#include "phalanx/base/content_hash.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace phalanx {
namespace {

TEST(ContentHashTest, DependsOnContentAndItsFrames) {
  const auto of = [](auto... parts) {
    ContentHash hash;
    (hash.add(parts), ...);
    return hash.hex();
  };
  EXPECT_EQ(of("ab", "c").size(), 32u);
  EXPECT_EQ(of("ab", "c"), of("ab", "c"));
  const std::set<std::string> all = {
      of(),          of(""),        of("ab", "c"), of("a", "bc"),       of("abc"),
      of("abc", ""), of("", "abc"), of("d"),       of(std::int64_t{1}), of(std::int64_t{256})};
  EXPECT_EQ(all.size(), 10u);
  // A stored hash must mean the same in every version.
  EXPECT_EQ(of("Phalanx"), "c1b8e40b071ce719c557fbe42530c5be");
}

}  // namespace
}  // namespace phalanx
