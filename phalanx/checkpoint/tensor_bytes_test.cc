#include "phalanx/checkpoint/tensor_bytes.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/test_state.h"

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

TEST(TensorBytes, ABoxLandsInItsPlaceAndNowhereElse) {
  const auto box = counted({2, 3});
  const auto box_bytes = raw_bytes(box);
  for (const bool strided : {false, true}) {
    auto target = at::zeros({5, 4});
    if (strided) target = target.t().contiguous().t();
    target.set_requires_grad(true);  // as a live parameter
    write_tensor_box(target, {.name = "b", .shape = {2, 3}}, std::vector<std::int64_t>{3, 1},
                     std::as_bytes(std::span(box_bytes)));
    auto expected = at::zeros({5, 4});
    expected.narrow(0, 3, 2).narrow(1, 1, 3).copy_(box);
    EXPECT_TRUE(target.detach().equal(expected));
  }
}

TEST(TensorBytes, ConvertsDtypesAlsoFromUnalignedBytes) {
  const auto source = counted({4}, at::kBFloat16);
  std::string bytes("x");
  bytes += raw_bytes(source);
  const auto target = at::zeros({4});
  write_tensor_box(target, {.name = "b", .dtype = safetensors::Dtype::bf16, .shape = {4}}, std::vector<std::int64_t>{0},
                   std::as_bytes(std::span(bytes)).subspan(1));
  EXPECT_TRUE(target.equal(source.to(at::kFloat)));
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
  using checkpoint_testing::message_of;
  const auto message = [](const at::Tensor& tensor) {
    return message_of<CheckpointError>([&] { describe_tensor({"layers.0.w", tensor}); });
  };
  EXPECT_THAT(message({}), testing::HasSubstr("\"layers.0.w\" is undefined"));
  EXPECT_THAT(message(at::zeros({2}, at::TensorOptions().dtype(at::kComplexDouble))),
              testing::HasSubstr("ComplexDouble"));
  EXPECT_THAT(message(at::zeros({2}, at::TensorOptions().device(at::kMeta))), testing::HasSubstr("no storage"));
  EXPECT_THAT(message(at::zeros({2, 2}).to_sparse()), testing::HasSubstr("sparse"));
}

}  // namespace
}  // namespace phalanx
