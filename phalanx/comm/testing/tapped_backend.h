// A communicator that shows its results to a test before any rank reads them (tests only). The test may record them, or
// change them to check that the error is detected.
//
//   const auto tapped_world = tapped(world, [&](const Delivery& d) {
//     if (d.verb == Verb::all_reduce) d.output[0] += 1;
//   });
//
// The communication itself is correct, and no rank hangs. Only this rank's copy of a result changes, after the
// operation is complete. Only float32 results of at least 17 elements are shown. So small values on which the ranks
// agree (losses, names, norms) stay correct.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"

namespace phalanx {

struct Delivery {
  Verb verb = Verb::all_reduce;     // recv: for each message received by a recv or batch_isend_irecv
  const std::string& group;         // the communicator's name
  const std::vector<int>& members;  // its ranks, as ranks of the tapped world
  int rank = 0;                     // this rank's index in `members`
  const float* input = nullptr;     // the input pointer; the data may be overwritten or freed by now
  std::int64_t input_count = 0;
  float* output = nullptr;
  std::int64_t output_count = 0;
  const std::vector<float>& before;  // what the output held when the operation began
};

/// Called by the thread that drives the operation. There is one call at a time per communicator.
using Tap = std::function<void(const Delivery&)>;

/// Returns a communicator over the same ranks. It replaces `world` during its lifetime. Communicators that are split
/// from it are tapped too. Host memory only. The call is not collective, but all ranks must make one.
std::shared_ptr<Communicator> tapped(const std::shared_ptr<Communicator>& world, Tap tap);

}  // namespace phalanx
