#include "phalanx/parallel/ddp/bucket_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {

BucketPlan plan_buckets(const std::vector<BucketParameter>& parameters, const std::vector<std::size_t>& order,
                        BucketSizes sizes) {
  struct Open {
    std::vector<std::size_t> members;
    std::size_t bytes = 0;
    std::size_t last_place = 0;
  };
  BucketPlan plan;
  std::map<int, Open> open;  // by kind
  for (std::size_t place = 0; place < order.size(); ++place) {
    const auto& parameter = parameters.at(order[place]);
    Open& bucket = open[parameter.kind];
    bucket.members.push_back(order[place]);
    bucket.bytes += parameter.bytes;
    bucket.last_place = place;
    if (bucket.bytes >= (plan.buckets.empty() ? sizes.first_bytes : sizes.bytes)) {
      plan.buckets.push_back(std::move(bucket.members));
      open.erase(parameter.kind);
    }
  }
  std::vector<Open> rest;
  for (auto& [kind, bucket] : open) rest.push_back(std::move(bucket));
  std::sort(rest.begin(), rest.end(), [](const Open& a, const Open& b) { return a.last_place < b.last_place; });
  for (auto& bucket : rest) plan.buckets.push_back(std::move(bucket.members));
  return plan;
}

std::vector<std::int64_t> encode_bucket_plan(const BucketPlan& plan, std::int64_t model_fingerprint) {
  std::vector<std::int64_t> code = {model_fingerprint, plan.in_ready_order ? 1 : 0};
  for (const auto& bucket : plan.buckets) {
    for (const std::size_t index : bucket) code.push_back(static_cast<std::int64_t>(index));
  }
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    code.insert(code.end(), plan.buckets[b].size(), static_cast<std::int64_t>(b));
  }
  return code;
}

BucketPlan decode_bucket_plan(const std::vector<std::int64_t>& code, std::int64_t model_fingerprint) {
  const auto refuse = [](const std::string& why) {
    throw CheckpointError(
        fmt::format("ddp.bucket_order: {}; load a checkpoint of this model, or leave ddp.bucket_order out", why));
  };
  if (code.size() < 4 || code.size() % 2 != 0) refuse("the list has a wrong length");
  if (code[0] != model_fingerprint) refuse("it was saved from a model with other parameters (names, shapes or dtypes)");
  if (code[1] != 0 && code[1] != 1) refuse(fmt::format("its flag is {}, expected 0 or 1", code[1]));
  const std::size_t count = (code.size() - 2) / 2;
  BucketPlan plan{.in_ready_order = code[1] == 1};
  std::vector<bool> seen(count, false);
  for (std::size_t place = 0; place < count; ++place) {
    const std::int64_t index = code[2 + place], bucket = code[2 + count + place];
    if (index < 0 || index >= static_cast<std::int64_t>(count) || seen[static_cast<std::size_t>(index)]) {
      refuse(fmt::format("entry {} is {}, expected each of 0..{} once", place, index, count - 1));
    }
    seen[static_cast<std::size_t>(index)] = true;
    const auto known = static_cast<std::int64_t>(plan.buckets.size());
    if (bucket == known) {
      plan.buckets.emplace_back();
    } else if (known == 0 || bucket != known - 1) {
      refuse(fmt::format("bucket number {} follows {} buckets", bucket, known));
    }
    plan.buckets.back().push_back(static_cast<std::size_t>(index));
  }
  return plan;
}

}  // namespace phalanx
