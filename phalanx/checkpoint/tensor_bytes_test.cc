#include "phalanx/checkpoint/tensor_bytes.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/files/box_copy.h"
#include "phalanx/checkpoint/testing/sharded_state.h"
#include "phalanx/checkpoint/testing/test_state.h"

namespace phalanx {
namespace {

std::string rows_as_bytes(const at::Tensor& tensor, std::int64_t begin, std::int64_t end) {
  std::string bytes;
  read_tensor_rows(tensor, begin, end, [&](std::span<const std::byte> part) {
    bytes.append(reinterpret_cast<const char*>(part.data()), part.size());
  });
  return bytes;
}
std::string raw_bytes(const at::Tensor& tensor) {
  const auto contiguous = tensor.contiguous();
  return {static_cast<const char*>(contiguous.const_data_ptr()), contiguous.nbytes()};
}
at::Tensor counted(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return at::arange(at::zeros(shape).numel(), at::TensorOptions().dtype(at::kFloat)).to(dtype).reshape(shape);
}

TEST(TensorBytes, RowsAreReadInRowMajorOrderWhateverTheStrides) {
  const auto dense = counted({6, 4});
  const auto strided = dense.t().contiguous().t();
  ASSERT_FALSE(strided.is_contiguous());
  EXPECT_EQ(rows_as_bytes(dense, 2, 5), raw_bytes(dense.narrow(0, 2, 3)));
  EXPECT_EQ(rows_as_bytes(strided, 2, 5), raw_bytes(dense.narrow(0, 2, 3)));
  EXPECT_EQ(rows_as_bytes(dense, 3, 3), "");
  EXPECT_EQ(rows_as_bytes(at::full({}, 2.5), 0, 1), raw_bytes(at::full({}, 2.5)));
}

/// Gives the elements of a whole tensor's bytes, as a file does.
BoxSource source_of(const at::Tensor& whole, const std::string& bytes) {
  return [&whole, &bytes](const Box& box, std::span<std::byte> target) {
    return copy_overlap({std::vector<std::int64_t>(static_cast<std::size_t>(whole.dim()), 0), whole.sizes().vec()},
                        std::as_bytes(std::span(bytes)), box, target, whole.element_size());
  };
}

TEST(TensorBytes, AShardTakesItsBoxWhateverItsStridesAndDtype) {
  const auto whole = counted({5, 4, 3});
  const auto bytes = raw_bytes(whole);
  const MeshShape mesh({{"dp", 2}, {"tp", 2}});
  const Placement placement{.splits = {{"tp", 1, {1, 3}}, {"dp", 0, {}}}};
  for (const bool strided : {false, true}) {
    for (const auto type : {at::kFloat, at::kDouble}) {
      for (int rank = 0; rank < 4; ++rank) {
        auto part = checkpoint_testing::hold({"w", whole}, mesh, placement, rank);
        const auto expected = part.tensor.to(type);
        part.tensor = at::zeros_like(expected);
        if (strided) part.tensor = part.tensor.transpose(0, 2).contiguous().transpose(0, 2);
        part.tensor.set_requires_grad(true);  // as a live parameter
        EXPECT_EQ(fill_tensor(part, safetensors::Dtype::f32, source_of(whole, bytes)),
                  static_cast<std::uint64_t>(expected.numel()) * 4);
        EXPECT_TRUE(part.tensor.detach().equal(expected)) << rank;
      }
    }
  }
}

TEST(TensorBytes, ScalarsAndWholeTensorsAreFilled) {
  const auto scalar = at::full({}, 2.5), vector = counted({4}, at::kBFloat16);
  const auto scalar_bytes = raw_bytes(scalar), vector_bytes = raw_bytes(vector);
  const auto a = at::zeros({}, at::kDouble), b = at::zeros({4});
  fill_tensor({"a", a}, safetensors::Dtype::f32, source_of(scalar, scalar_bytes));
  fill_tensor({"b", b}, safetensors::Dtype::bf16, source_of(vector, vector_bytes));
  EXPECT_EQ(a.item<double>(), 2.5);
  EXPECT_TRUE(b.equal(vector.to(at::kFloat)));
}

TEST(TensorBytes, EveryDtypeGoesThereAndBack) {
  for (const auto type :
       {at::kBool, at::kByte, at::kChar, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kUInt16, at::kShort, at::kHalf,
        at::kBFloat16, at::kUInt32, at::kInt, at::kFloat, at::kUInt64, at::kLong, at::kDouble, at::kComplexFloat}) {
    const auto info = describe_tensor({"t", at::zeros({1}, at::TensorOptions().dtype(type))});
    EXPECT_EQ(scalar_type_of(info.dtype), type);
    EXPECT_EQ(safetensors::element_size(info.dtype), at::elementSize(type));
  }
}

TEST(TensorBytes, WhatCannotBeSavedIsNamed) {
  const auto message = [](const at::Tensor& tensor) {
    return error_text<CheckpointError>([&] { describe_tensor({"layers.0.w", tensor}); });
  };
  EXPECT_THAT(message({}), HasSubstr("\"layers.0.w\" is undefined"));
  EXPECT_THAT(message(at::zeros({2}, at::TensorOptions().dtype(at::kComplexDouble))), HasSubstr("ComplexDouble"));
  EXPECT_THAT(message(at::zeros({2}, at::TensorOptions().device(at::kMeta))), HasSubstr("no storage"));
  EXPECT_THAT(message(at::zeros({2, 2}).to_sparse()), HasSubstr("sparse"));
}

}  // namespace
}  // namespace phalanx
