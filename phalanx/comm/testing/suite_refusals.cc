// Calls that a rank itself detects as wrong.
#include <ATen/ops/full.h>

#include "phalanx/base/testing/error_text.h"
#include "phalanx/comm/testing/suite_parts.h"

namespace phalanx::suite {

// Every verb refuses a non-contiguous input or output tensor: no hidden copy is made.
void suite_non_contiguous(Communicator& comm) {
  const int n = comm.size();
  const int me = comm.rank();
  const at::Tensor part = at::full({4, 6}, 1.0F);
  const at::Tensor whole = at::full({4, 6 * n}, 1.0F);
  const at::Tensor torn_part = at::full({6, 4}, 1.0F).t();
  const at::Tensor torn_whole = at::full({6 * n, 4}, 1.0F).t();
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(n), 24);
  const auto refused = [&](const char* verb, auto body) {
    require_mentions(require_error<Error>(body, std::string(verb) + " of a non-contiguous tensor"),
                     {verb, "not contiguous", "copy it first"});
  };
  refused("broadcast", [&] { comm.broadcast(torn_part); });
  refused("all_reduce", [&] { comm.all_reduce(torn_part); });
  refused("reduce", [&] { comm.reduce(torn_part); });
  refused("send", [&] { comm.send(torn_part, (me + 1) % n); });
  refused("recv", [&] { comm.recv(torn_part, (me + 1) % n); });
  for (const bool is_send : {true, false})
    refused("batch", [&] { comm.batch_isend_irecv({{is_send, torn_part, (me + 1) % n, 0}}); });
  for (const bool is_output : {true, false}) {
    const at::Tensor& out_part = is_output ? torn_part : part;
    const at::Tensor& in_part = is_output ? part : torn_part;
    const at::Tensor& out_whole = is_output ? torn_whole : whole;
    const at::Tensor& in_whole = is_output ? whole : torn_whole;
    refused("all_gather", [&] { comm.all_gather(out_whole, in_part); });
    refused("all_gather_uneven", [&] { comm.all_gather_uneven(out_whole, in_part, counts); });
    refused("reduce_scatter", [&] { comm.reduce_scatter(out_part, in_whole); });
    refused("reduce_scatter_uneven", [&] { comm.reduce_scatter_uneven(out_part, in_whole, counts); });
    refused("gather", [&] { comm.gather(out_whole, in_part, {.root = me}); });
    refused("scatter", [&] { comm.scatter(out_part, in_whole, {.root = me}); });
    refused("all_to_all", [&] { comm.all_to_all(out_whole, in_whole); });
    refused("all_to_all_uneven", [&] { comm.all_to_all_uneven(out_whole, in_whole, counts, counts); });
  }
  at::Tensor x = part.clone();
  comm.all_reduce(x);
  require(x.const_data_ptr<float>()[0] == static_cast<float>(n), "works after refusals");
}

// Wrong calls that this rank itself detects: nothing is sent, and the communicator still works.
void suite_refusals(Communicator& comm) {
  at::Tensor x = at::full({4, 6}, 1.0F);
  require_mentions(require_error<Error>([&] { comm.all_reduce(x.t()); }, "non-contiguous"), {"not contiguous", "6x4"});
  require_mentions(require_error<Error>([&] { comm.all_reduce(x.to(ScalarType::Int), {.op = ReduceOp::avg}); }, "avg"),
                   {"avg", "int32"});
  require_mentions(require_error<Error>([&] { comm.all_reduce(x.to(ScalarType::Short)); }, "dtype"), {"Short"});
  require_mentions(require_error<Error>([&] { comm.broadcast(x, {.root = comm.size()}); }, "root"), {"root"});
  require_mentions(require_error<Error>([&] { comm.send(x, -1); }, "peer"), {"rank -1"});
  require_mentions(require_error<Error>([&] { comm.all_gather(x, x.clone().view({24}).narrow(0, 0, 7)); }, "count"),
                   {"24", std::to_string(7 * comm.size()).c_str()});
  require_mentions(require_error<Error>([&] { comm.all_reduce(at::Tensor()); }, "undefined"), {"undefined"});
  comm.all_reduce(x);
  require(x.const_data_ptr<float>()[0] == static_cast<float>(comm.size()), "works after refusals");
}
}  // namespace phalanx::suite
