// Every call of a communicator, for tests of what becomes of it when a rank dies or stops (tests only). The victim does
// its part, so that ranks may be in the middle of it.
//
//   for (const FaultCall& call : fault_calls(1)) {
//     const FaultCall::Pending wait = call.begin(*comm, 300'000);   // the call is under way
//     wait();                                                       // throws what became of it
//     require_told(call, error.what(), 300'000);                    // the error names the call
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
  /// What an error calls it: one of these. With {n} for the number of elements and {v} for the victim.
  std::vector<std::string> words;
  std::function<Pending(Communicator&, std::int64_t count)> begin;
  std::function<void(Communicator&, std::int64_t count)> prepare = {};  // before anybody is struck; may be empty
  bool moves_tensors = true;                                            // else host memory, or nothing
  /// So it has the number of the calls before it, in a group that has nothing else.
  bool is_one_operation() const { return words.size() == 1 && !prepare; }
};

/// Of all verbs, even and uneven, messages, byte objects and split. For worlds of three and more; the victim is not 0.
std::vector<FaultCall> fault_calls(int victim);

/// Throws std::runtime_error unless the text names the call.
void require_told(const FaultCall& call, const std::string& text, std::int64_t count, int victim);

}  // namespace phalanx
