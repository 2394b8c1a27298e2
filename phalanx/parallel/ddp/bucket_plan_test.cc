#include "phalanx/parallel/ddp/bucket_plan.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

TEST(BucketPlan, ClosesABucketWhenItHasReachedItsSize) {
  const std::vector<BucketParameter> parameters(6, {.bytes = 10});
  const auto plan = plan_buckets(parameters, {5, 4, 3, 2, 1, 0}, {.first_bytes = 10, .bytes = 25});
  EXPECT_THAT(plan.buckets, ElementsAre(ElementsAre(5), ElementsAre(4, 3, 2), ElementsAre(1, 0)));
  EXPECT_FALSE(plan.in_ready_order);
}

TEST(BucketPlan, AParameterLargerThanABucketFillsIt) {
  const auto plan =
      plan_buckets({{.bytes = 100}, {.bytes = 3}, {.bytes = 100}}, {0, 1, 2}, {.first_bytes = 1, .bytes = 10});
  EXPECT_THAT(plan.buckets, ElementsAre(ElementsAre(0), ElementsAre(1, 2)));
}

TEST(BucketPlan, KeepsKindsApartAndOrdersBucketsByTheirLastParameter) {
  const std::vector<BucketParameter> parameters = {{10, 0}, {10, 1}, {10, 0}, {10, 1}, {10, 0}};
  const auto plan = plan_buckets(parameters, {0, 1, 2, 3, 4}, {.first_bytes = 100, .bytes = 100});
  EXPECT_THAT(plan.buckets, ElementsAre(ElementsAre(1, 3), ElementsAre(0, 2, 4)));
}

TEST(BucketPlan, EncodesIntoALengthThatDependsOnTheParametersAlone) {
  const std::vector<BucketParameter> parameters(5, {.bytes = 10});
  for (const std::size_t bytes : {1, 15, 1000}) {
    auto plan = plan_buckets(parameters, {4, 2, 0, 1, 3}, {.first_bytes = bytes, .bytes = bytes});
    plan.in_ready_order = bytes == 15;
    const auto code = encode_bucket_plan(plan, 77);
    EXPECT_EQ(code.size(), 12U);
    EXPECT_EQ(decode_bucket_plan(code, 77), plan);
  }
}

TEST(BucketPlan, RefusesADamagedCode) {
  const auto plan = plan_buckets({{10}, {10}, {10}}, {2, 0, 1}, {.first_bytes = 10, .bytes = 20});
  const auto good = encode_bucket_plan(plan, 7);  // {7, 0,  2, 0, 1,  0, 1, 1}
  const auto expect_refusal = [&](const std::string& part,
                                  const std::function<void(std::vector<std::int64_t>&)>& harm) {
    auto code = good;
    harm(code);
    EXPECT_THAT(error_text<CheckpointError>([&] { decode_bucket_plan(code, 7); }), HasSubstr(part));
  };
  expect_refusal("wrong length", [](auto& code) { code.clear(); });
  expect_refusal("wrong length", [](auto& code) { code.push_back(0); });
  expect_refusal("other parameters", [](auto& code) { code[0] = 8; });
  expect_refusal("its flag is 2", [](auto& code) { code[1] = 2; });
  expect_refusal("entry 0 is 3, expected each of 0..2 once", [](auto& code) { code[2] = 3; });
  expect_refusal("entry 0 is -1", [](auto& code) { code[2] = -1; });
  expect_refusal("entry 1 is 2", [](auto& code) { code[3] = 2; });
  expect_refusal("bucket number -1 follows 0 buckets", [](auto& code) { code[5] = -1; });
  expect_refusal("bucket number 1 follows 0 buckets", [](auto& code) { code[5] = 1; });
  expect_refusal("bucket number 0 follows 2 buckets", [](auto& code) { code[7] = 0; });
}

}  // namespace
}  // namespace phalanx
