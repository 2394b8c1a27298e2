// One case of the benchmark as a thing to call: buffers, the call on one backend, and whether its result is right.
//
//   BenchCall call(the_case, rank, ranks, device);
//   call.use(comm);            // or a peer, or use_copy(): what run() does
//   call.run();                // once; on a GPU the host waits for it
//   wrong = call.check();      // one more call on known values; elements on this rank that are not what they must be
//
// The known values of rank r at element i of its contribution are small integers of (r, i), so that every sum and
// product is exact in every type, and what lands at the wrong place is seen. Otherwise buffers hold zeros.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "phalanx/comm/communicator.h"
#include "phalanx/measure/comm_bench_options.h"

namespace c10d {
class Backend;
}

namespace phalanx::measure {

struct BenchBuffers {
  at::Tensor whole;     // S: the only buffer of the verbs in place; all parts of the split ones
  at::Tensor part;      // S / ranks, or that slice of whole (in place)
  at::Tensor received;  // S: of all_to_all and sendrecv (and the copy); else undefined
};

/// Another library, to be measured beside the backends: makes what one call of a case does. Throws what it cannot do.
struct BenchBaseline {
  std::string name;
  std::function<std::function<void()>(const CommBenchCase& what, int rank, int ranks, const BenchBuffers& buffers)>
      make;
};

/// torch's own gloo, called directly.
BenchBaseline c10d_baseline(c10::intrusive_ptr<c10d::Backend> group);

class BenchCall {
 public:
  /// symmetric: buffers lie in that communicator's symmetric memory; then the constructor is collective.
  BenchCall(const CommBenchCase& what, int rank, int ranks, c10::Device device, Communicator* symmetric = nullptr);
  BenchCall(const BenchCall&) = delete;  // run() refers to its buffers
  BenchCall& operator=(const BenchCall&) = delete;

  void use(Communicator& comm);
  void use(const BenchBaseline& peer);
  /// run() copies the case's bytes from one private buffer to another.
  void use_copy();
  void run() const;
  std::int64_t check();

 private:
  CommBenchCase what_;
  int rank_, ranks_;
  BenchBuffers buffers_;
  bool is_baseline_ = false;
  std::function<void()> call_;
};

}  // namespace phalanx::measure
