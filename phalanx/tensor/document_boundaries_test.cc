#include "phalanx/tensor/document_boundaries.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <vector>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

using Lengths = std::vector<std::int32_t>;

TEST(DocumentBoundaries, PositionsCountFromEachDocumentsStart) {
  const DocumentBoundaries documents(8, {0, 3, 8, 14, 16});
  EXPECT_EQ(documents.rows(), 2);
  EXPECT_EQ(documents.count(), 4);
  EXPECT_EQ(documents.longest(), 6);
  EXPECT_EQ(documents.pairs(), 9 + 25 + 36 + 4);
  EXPECT_TRUE(at::equal(documents.positions().flatten(),
                        at::tensor(std::vector<std::int64_t>{0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 1})));
  EXPECT_TRUE(at::equal(documents.cumulative_lengths_on_device(), at::tensor(Lengths{0, 3, 8, 14, 16})));
}

TEST(DocumentBoundaries, AMicroBatchHasItsRowsDocuments) {
  const DocumentBoundaries documents(4, {0, 1, 4, 8, 10, 12});
  const auto last = documents.narrow(1, 2);
  EXPECT_EQ(last->cumulative_lengths(), (Lengths{0, 4, 6, 8}));
  const auto of_row = documents.of_row(2);
  EXPECT_EQ(Lengths(of_row.begin(), of_row.end()), (Lengths{8, 10, 12}));
}

TEST(DocumentBoundaries, RefusesWhatIsNoDivisionOfRows) {
  EXPECT_THROW(DocumentBoundaries(4, {}), Error);
  EXPECT_THROW(DocumentBoundaries(4, {0}), Error);
  EXPECT_THROW(DocumentBoundaries(4, {1, 4}), Error);
  EXPECT_THROW(DocumentBoundaries(4, {0, 3}), Error);        // half a row
  EXPECT_THROW(DocumentBoundaries(4, {0, 3, 3, 4}), Error);  // an empty document
  EXPECT_THROW(DocumentBoundaries(4, {0, 3, 6, 8}), Error);  // across two rows
}

}  // namespace
}  // namespace phalanx
