// Every call of a communicator, for tests of what happens to it when a rank dies or stops (tests only). The victim does
// its part of the call, so ranks may be in the middle of it.
//
//   for (const FaultCall& call : fault_calls(1)) {
//     const FaultCall::Pending wait = call.begin(*comm, 300'000);   // the call is under way
//     try {
//       wait();                                                     // throws the error of the call
//     } catch (const CommError& error) {
//       require_told(call, error.what(), 300'000, /*victim=*/1);    // the error names the call
//     }
//   }
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"

namespace phalanx {

struct FaultCall {
  using Pending = std::function<void()>;
  std::string name;
  /// An error names the call by one of these texts. {n} is the number of elements, {v} the victim.
  std::vector<std::string> words;
  std::function<Pending(Communicator&, std::int64_t count)> begin;
  std::function<void(Communicator&, std::int64_t count)> prepare = {};  // runs before the fault; may be empty
  bool moves_tensors = true;                                            // false: moves host memory, or nothing
  /// True if it is one operation of its group. Then its number is the number of calls before it, in a group with no
  /// other operations.
  bool is_one_operation() const { return words.size() == 1 && !prepare; }
};

/// All verbs with even and uneven counts, messages, byte objects and split. For worlds of three and more ranks.
/// REQUIRES: `victim` is not 0.
std::vector<FaultCall> fault_calls(int victim);

/// Throws std::runtime_error unless the text names the call.
void require_told(const FaultCall& call, const std::string& text, std::int64_t count, int victim);

}  // namespace phalanx
