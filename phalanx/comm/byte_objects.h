// Collectives on strings of any length, built on collectives of numbers and bytes: first the lengths, then the
// contents. Each call is collective and synchronous. The caller has checked roots and numbers of values.
//
//   ByteObjects bytes(rank, size, run);              // run(description) completes one operation
//   std::vector<std::string> all = bytes.all_gather(mine);
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/comm/backend.h"

namespace phalanx {

class ByteObjects {
 public:
  using Run = std::function<void(OperationDescription)>;
  ByteObjects(int rank, int size, Run run) : rank_(rank), size_(static_cast<std::size_t>(size)), run_(std::move(run)) {}

  std::string broadcast(std::string value, int root);
  /// Returns the values in rank order.
  std::vector<std::string> all_gather(const std::string& value);
  /// On root: the values in rank order. Elsewhere: an empty list.
  std::vector<std::string> gather(const std::string& value, int root);
  /// `values`: one per rank; used on root only.
  std::string scatter(const std::vector<std::string>& values, int root);

 private:
  /// all_to_all of bytes; returns what each rank sent.
  std::vector<std::string> exchange(const std::string& input, std::vector<std::int64_t> input_counts,
                                    const std::vector<std::int64_t>& output_counts);

  int rank_;
  std::size_t size_;
  Run run_;
};

}  // namespace phalanx
