// Assigns gradients to buckets. Torch-free: it takes sizes and returns indices.
//
// Buckets are filled in a given order, ideally the order in which gradients become ready. Then the first bucket is
// all-reduced while the rest of the backward pass still computes. A bucket is closed as soon as it has reached its
// size. The first bucket is small, so that communication starts early. The others are large, so that each transfer is
// efficient. Parameters of different dtypes never share a bucket.
//
// A plan is also part of a checkpoint. It is encoded as a list of integers whose length depends only on the number of
// parameters, so that it can be loaded in place.
//
//   const BucketPlan plan = plan_buckets(parameters, order, {.first_bytes = 1 << 20, .bytes = 25 << 20});
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace phalanx {

struct BucketParameter {
  std::size_t bytes = 0;
  int kind = 0;  // parameters of one kind (dtype) may share a bucket
};

struct BucketSizes {
  std::size_t first_bytes = 1 << 20;
  std::size_t bytes = 25 << 20;
};

struct BucketPlan {
  std::vector<std::vector<std::size_t>> buckets;  // parameter indices; buckets in the order in which they are sent
  bool in_ready_order = false;                    // made from an observed backward pass
  bool operator==(const BucketPlan&) const = default;
};

/// Buckets are listed by the position of their last parameter.
/// REQUIRES: `order` holds every parameter index once.
BucketPlan plan_buckets(const std::vector<BucketParameter>& parameters, const std::vector<std::size_t>& order,
                        BucketSizes sizes);

/// Returns 2 + 2 * parameter_count integers: a fingerprint of the model, a flag, the indices in order, their bucket
/// numbers.
std::vector<std::int64_t> encode_bucket_plan(const BucketPlan& plan, std::int64_t model_fingerprint);
/// Throws CheckpointError if the code belongs to another model or is not a plan.
BucketPlan decode_bucket_plan(const std::vector<std::int64_t>& code, std::int64_t model_fingerprint);

}  // namespace phalanx
