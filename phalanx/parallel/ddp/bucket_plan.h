// Which parameter's gradient lies in which bucket. Torch-free: sizes in, indices out.
//
// Buckets are filled in a given order, ideally the order in which gradients become ready, so that the first bucket can
// travel while the rest of the backward pass still computes. A bucket is closed as soon as it has reached its size: the
// first one early (so that communication starts early), the others large (so that each transfer is efficient).
// Parameters of different dtypes never share a bucket.
//
// A plan is also part of a checkpoint: encoded as a list of integers whose length depends on the number of parameters
// alone, so that it can be loaded in place.
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

/// `order` holds every parameter index once. Buckets are listed by the place of their last parameter.
BucketPlan plan_buckets(const std::vector<BucketParameter>& parameters, const std::vector<std::size_t>& order,
                        BucketSizes sizes);

/// 2 + 2 * parameter_count integers: a fingerprint of the model, a flag, the indices in order, their bucket numbers.
std::vector<std::int64_t> encode_bucket_plan(const BucketPlan& plan, std::int64_t model_fingerprint);
/// Throws CheckpointError if the code is of another model or no plan at all.
BucketPlan decode_bucket_plan(const std::vector<std::int64_t>& code, std::int64_t model_fingerprint);

}  // namespace phalanx
