// For tests: EXPECT_THAT, and the matchers of GoogleMock by their own names, in namespace phalanx and those within.
//
//   EXPECT_THAT(message, AllOf(HasSubstr("rank 1"), Not(HasSubstr("rank 2"))));
#pragma once

#include <gmock/gmock.h>

namespace phalanx {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::DoubleNear;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::SizeIs;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;
using ::testing::UnorderedElementsAre;

}  // namespace phalanx
