#include "phalanx/checkpoint/files/file_tensor_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

using Form = FileTensorView::Form;

template <class T>
std::vector<T> taken(const Form& form, const std::vector<std::int64_t>& shape, const std::vector<T>& file,
                     const Box& box) {
  std::vector<T> target(static_cast<std::size_t>(box.numel()));
  const std::uint64_t bytes = copy_from_view(form, shape, std::as_bytes(std::span(file)), box,
                                             std::as_writable_bytes(std::span(target)), sizeof(T));
  EXPECT_EQ(bytes, target.size() * sizeof(T));
  return target;
}

TEST(PlaceCopy, APartOfATurnedMatrixIsTakenElementByElement) {
  // [2, 6] in the file: row i, column j is 10 i + j. Three parts of two columns; each is a [2, 2] tensor, turned.
  const std::vector<float> file = {0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15};
  const Form middle{.transposed = true, .part = 1, .parts = 3};
  EXPECT_THAT(shape_in_file(middle, {2, 2}), ElementsAre(2, 6));
  EXPECT_THAT(taken(middle, {2, 2}, file, {{0, 0}, {2, 2}}), ElementsAre(2, 12, 3, 13));
  EXPECT_THAT(taken(middle, {2, 2}, file, {{1, 0}, {1, 2}}), ElementsAre(3, 13));
  EXPECT_THAT(taken(middle, {2, 2}, file, {{0, 1}, {2, 1}}), ElementsAre(12, 13));
  EXPECT_THAT(taken(Form{.transposed = true}, {6, 2}, file, {{4, 0}, {2, 2}}), ElementsAre(4, 14, 5, 15));
}

TEST(PlaceCopy, APartThatIsNotTurnedLiesBehindTheOthers) {
  const std::vector<std::uint16_t> file = {0, 1, 2, 3, 4, 5};
  EXPECT_THAT(shape_in_file({.part = 2, .parts = 3}, {2}), ElementsAre(6));
  EXPECT_THAT(taken<std::uint16_t>({.part = 2, .parts = 3}, {2}, file, {{0}, {2}}), ElementsAre(4, 5));
  EXPECT_THAT(taken<std::uint16_t>({.part = 1, .parts = 3}, {2}, file, {{1}, {1}}), ElementsAre(3));
}

// Larger than a tile, and put together in pieces: what is taken out again is what was put in.
TEST(PlaceCopy, PiecesOfTheFileArePutTogether) {
  const std::vector<std::int64_t> shape = {70, 45};
  for (const bool transposed : {false, true}) {
    std::vector<std::vector<float>> parts(2, std::vector<float>(70 * 45));
    std::iota(parts[0].begin(), parts[0].end(), 0.0F);
    std::iota(parts[1].begin(), parts[1].end(), 10000.0F);
    const auto in_file = shape_in_file({.transposed = transposed, .parts = 2}, shape);
    EXPECT_THAT(in_file, transposed ? ElementsAre(45, 140) : ElementsAre(140, 45));
    std::vector<float> file(2 * 70 * 45, -1.0F);
    for (std::int64_t row = 0; row < in_file[0]; row += 20) {
      const Box piece{{row, 0}, {std::min<std::int64_t>(20, in_file[0] - row), in_file[1]}};
      std::vector<float> bytes(static_cast<std::size_t>(piece.numel()));
      for (std::int64_t p = 0; p < 2; ++p) {
        const Form form{.transposed = transposed, .part = p, .parts = 2};
        const Box box = box_from_file(form, shape, piece);
        if (box.empty()) continue;
        std::vector<float> own(static_cast<std::size_t>(box.numel()));
        for (std::int64_t r = 0; r < box.shape[0]; ++r) {
          for (std::int64_t c = 0; c < box.shape[1]; ++c) {
            own[static_cast<std::size_t>(r * box.shape[1] + c)] =
                parts[static_cast<std::size_t>(p)]
                     [static_cast<std::size_t>((box.offsets[0] + r) * 45 + box.offsets[1] + c)];
          }
        }
        copy_to_view(form, shape, box, std::as_bytes(std::span(own)), piece, std::as_writable_bytes(std::span(bytes)),
                     4);
      }
      std::memcpy(file.data() + row * in_file[1], bytes.data(), bytes.size() * 4);
    }
    for (std::int64_t p = 0; p < 2; ++p) {
      const Form form{.transposed = transposed, .part = p, .parts = 2};
      EXPECT_EQ(taken(form, shape, file, {{0, 0}, shape}), parts[static_cast<std::size_t>(p)]) << transposed;
    }
    EXPECT_EQ(file.front(), 0.0F);
    EXPECT_EQ(file[1], transposed ? 45.0F : 1.0F);
  }
}

TEST(PlaceCopy, WhatHasNoSuchFormIsRefused) {
  EXPECT_THROW(shape_in_file({.transposed = true}, {4}), Error);
  EXPECT_THROW(shape_in_file({.parts = 3}, {}), Error);
}

}  // namespace
}  // namespace phalanx
