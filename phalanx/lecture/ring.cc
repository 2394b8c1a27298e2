#include "phalanx/lecture/ring.h"

#include <ATen/ops/empty_like.h>
#include <fmt/format.h>

namespace phalanx::lecture {

std::int64_t ring_all_reduce(Communicator& comm, const at::Tensor& x,
                             const std::function<void(const std::string&)>& after_step) {
  const int n = comm.size(), rank = comm.rank();
  const int next = (rank + 1) % n, previous = (rank + n - 1) % n;
  const std::int64_t length = x.size(0) / n;
  const auto chunk = [&](int c) { return x.narrow(0, (c + 2 * n) % n * length, length); };
  std::int64_t sent = 0;
  const auto exchange = [&](const at::Tensor& out, const at::Tensor& in) {
    comm.batch_isend_irecv(
        {{.is_send = true, .tensor = out, .peer = next}, {.is_send = false, .tensor = in, .peer = previous}});
    sent += out.numel();
  };
  for (int step = 0; step < n - 1; ++step) {  // reduce-scatter: the sum of a chunk grows from rank to rank
    const at::Tensor arrived = at::empty_like(chunk(0));
    exchange(chunk(rank - step), arrived);
    chunk(rank - step - 1).add_(arrived);
    after_step(fmt::format("reduce-scatter, step {}", step + 1));
  }
  for (int step = 0; step < n - 1; ++step) {  // all-gather: finished chunks travel on
    exchange(chunk(rank + 1 - step), chunk(rank - step));
    after_step(fmt::format("all-gather, step {}", step + 1));
  }
  return sent;
}

}  // namespace phalanx::lecture
