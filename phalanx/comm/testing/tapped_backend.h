// A communicator that shows what it delivers, before anybody reads it, to somebody who may change it: for tests that
// record what is sent, or spoil it to see that somebody notices.
//
//   const auto tapped_world = tapped(world, [&](const Delivery& d) { if (d.verb == Verb::all_reduce) d.output[0] += 1;
//   });
//
// What moves is right, and no rank waits for another one in vain: only what this rank reads of a result is changed,
// once the operation is done. Only float32 values of 17 and more elements are shown, so that what ranks agree upon
// (losses, names, norms) stays right.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"

namespace phalanx {

struct Delivery {
  Verb verb = Verb::all_reduce;     // recv: of each message of a recv or batch_p2p that comes in
  const std::string& group;         // the communicator's name
  const std::vector<int>& members;  // its ranks, as ranks of the world that was tapped
  int rank = 0;                     // this one's place among them
  const float* input = nullptr;     // as it was handed in; may be overwritten by now, or gone
  std::int64_t input_count = 0;
  float* output = nullptr;
  std::int64_t output_count = 0;
  const std::vector<float>& before;  // what the output held when the operation began
};

/// Called by whichever thread drives the operation, one at a time for each communicator.
using Tap = std::function<void(const Delivery&)>;

/// A communicator over the same ranks and, until it is gone, in place of `world`; what it is split into is tapped, too.
/// Host memory only. Not collective, but all ranks make one.
std::shared_ptr<Communicator> tapped(const std::shared_ptr<Communicator>& world, Tap tap);

}  // namespace phalanx
