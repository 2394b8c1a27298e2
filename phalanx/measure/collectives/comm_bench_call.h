// BenchCall: one case of the benchmark: its buffers, the call on one backend, and the check of the result.
//
//   BenchCall call(the_case, rank, ranks, device);
//   call.use(comm);                          // what run() does; or a baseline, or use_copy()
//   call.run();                              // one call; on a GPU the host waits for it
//   const std::int64_t wrong = call.check();  // one more call on known values; the wrong elements on this rank
//
// The known value of rank r at element i is a small integer that depends on (r, i). So every sum and product is exact
// in every type, and data at the wrong place is detected. In run() the buffers hold zeros.
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
  at::Tensor whole;     // S: the only buffer of in-place verbs; the data of all ranks for verbs that divide it
  at::Tensor part;      // S / ranks; in-place: that slice of `whole`
  at::Tensor received;  // S: for all_to_all, sendrecv and the copy; otherwise undefined
};

/// Another library that is measured beside the backends. `make` returns a function that performs one call of a case; it
/// throws if the library does not support the case.
struct BenchBaseline {
  std::string name;
  std::function<std::function<void()>(const CommBenchCase& what, int rank, int ranks, const BenchBuffers& buffers)>
      make;
};

/// torch's own gloo, called directly.
BenchBaseline c10d_baseline(c10::intrusive_ptr<c10d::Backend> group);

class BenchCall {
 public:
  /// If `symmetric` is not null, the buffers are in that communicator's symmetric memory, and the constructor is
  /// collective.
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
