#include "phalanx/checkpoint/files/file_tensor_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
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

// As the experts' gate and up of GPT-OSS: [3 experts, 45, 2 * 70], the columns of the two in turn.
TEST(PlaceCopy, RowsThatAlternateInSlicesArePutTogetherFromPieces) {
  const std::vector<std::int64_t> shape = {70, 45};
  for (const bool transposed : {false, true}) {
    const auto form_of = [&](std::int64_t slice, std::int64_t part) {
      return Form{.transposed = transposed, .part = part, .parts = 2, .alternate = true, .slice = slice, .slices = 3};
    };
    const auto value = [](std::int64_t slice, std::int64_t part, std::int64_t r, std::int64_t c) {
      return static_cast<float>(((slice * 2 + part) * 100 + r) * 100 + c);
    };
    const auto in_file = shape_in_file(form_of(0, 0), shape);
    EXPECT_THAT(in_file, transposed ? ElementsAre(3, 45, 140) : ElementsAre(3, 140, 45));
    std::vector<float> file(3 * 2 * 70 * 45, -1.0F);
    // Pieces within a slice, as a writer with a small buffer makes them, or two slices at once.
    std::vector<Box> pieces;
    for (std::int64_t row = 0; row < in_file[1]; row += 19) {
      pieces.push_back({{0, row, 0}, {1, std::min<std::int64_t>(19, in_file[1] - row), in_file[2]}});
    }
    pieces.push_back({{1, 0, 0}, {2, in_file[1], in_file[2]}});
    std::size_t written = 0;
    for (const Box& piece : pieces) {
      std::vector<float> bytes(static_cast<std::size_t>(piece.numel()), -1.0F);
      for (std::int64_t slice = 0; slice < 3; ++slice) {
        for (std::int64_t part = 0; part < 2; ++part) {
          const Box box = box_from_file(form_of(slice, part), shape, piece);
          if (box.empty()) continue;
          std::vector<float> own;
          for (std::int64_t r = 0; r < box.shape[0]; ++r) {
            for (std::int64_t c = 0; c < box.shape[1]; ++c) {
              own.push_back(value(slice, part, box.offsets[0] + r, box.offsets[1] + c));
            }
          }
          copy_to_view(form_of(slice, part), shape, box, std::as_bytes(std::span(own)), piece,
                       std::as_writable_bytes(std::span(bytes)), 4);
        }
      }
      std::memcpy(file.data() + written, bytes.data(), bytes.size() * 4);
      written += bytes.size();
    }
    EXPECT_EQ(written, file.size());
    // Row 3, column 2 of the second part of slice 1: row 7 of the file's matrix.
    const std::size_t at = 140 * 45 + (transposed ? 2 * 140 + 7 : 7 * 45 + 2);
    EXPECT_EQ(file[at], value(1, 1, 3, 2));
    for (std::int64_t slice = 0; slice < 3; ++slice) {
      for (std::int64_t part = 0; part < 2; ++part) {
        const Box box{{33, 5}, {36, 40}};
        const auto found = taken(form_of(slice, part), shape, file, box);
        for (std::int64_t r = 0; r < 36; ++r) {
          for (std::int64_t c = 0; c < 40; ++c) {
            ASSERT_EQ(found[static_cast<std::size_t>(r * 40 + c)], value(slice, part, 33 + r, 5 + c));
          }
        }
      }
    }
  }
  // A bias.
  const std::vector<float> biases = {0, 1, 2, 3, 10, 11, 12, 13};
  const Form up{.part = 1, .parts = 2, .alternate = true, .slice = 1, .slices = 2};
  EXPECT_THAT(shape_in_file(up, {2}), ElementsAre(2, 4));
  EXPECT_THAT(taken(up, {2}, biases, {{0}, {2}}), ElementsAre(11, 13));
  EXPECT_THAT(taken(Form{.slice = 1, .slices = 2}, {4}, biases, {{1}, {2}}), ElementsAre(11, 12));
}

TEST(PlaceCopy, WhatHasNoSuchFormIsRefused) {
  EXPECT_THROW(shape_in_file({.transposed = true}, {4}), Error);
  EXPECT_THROW(shape_in_file({.parts = 3}, {}), Error);
  EXPECT_THROW(shape_in_file({.parts = 3, .alternate = true}, {2, 2, 2}), Error);
}

}  // namespace
}  // namespace phalanx
