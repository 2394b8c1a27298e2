// Strings of any length between the ranks of a group, by way of collectives on numbers and bytes: first how long they
// are, then what is in them. Each call is collective and synchronous; roots and numbers of values are checked before.
//
//   ByteObjects bytes(rank, size, run);              // run: an operation to its end
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
  /// By rank.
  std::vector<std::string> all_gather(const std::string& value);
  /// By rank, on root; elsewhere an empty list.
  std::vector<std::string> gather(const std::string& value, int root);
  /// `values`: one for each rank, looked at on root alone.
  std::string scatter(const std::vector<std::string>& values, int root);

 private:
  /// all_to_all of bytes, what came from each rank.
  std::vector<std::string> exchange(const std::string& input, std::vector<std::int64_t> input_counts,
                                    std::vector<std::int64_t> output_counts);

  int rank_;
  std::size_t size_;
  Run run_;
};

}  // namespace phalanx
