// Misuse between ranks, timeouts and aborts: the failure cases of backend_suite.h.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <array>
#include <chrono>

#include "phalanx/base/testing/error_text.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/suite_parts.h"

namespace phalanx {
namespace suite {
namespace {

// One rank makes another call than the others.
template <class Other, class Others>
std::string at_odds(Communicator& comm, int rank, const char* what, Other other, Others others) {
  return prompt_error_of(
      comm,
      [&] {
        if (comm.rank() == rank)
          other();
        else
          others();
      },
      what);
}
void fail_verb(Communicator& comm) {
  at::Tensor x = at::full({64}, 1.0F);
  const std::string text = at_odds(
      comm, 1, "verb mismatch", [&] { comm.broadcast(x); }, [&] { comm.all_reduce(x); });
  require_mentions(text, {"all_reduce(float32[64], sum)", "broadcast(float32[64], root 0)", "rank 1:"});
  require_mentions(require_error<CommError>([&] { comm.barrier(); }, "after a failure"), {"aborted"});
}
void fail_type(Communicator& comm) {
  at::Tensor x = at::full({64}, 1.0F);
  if (comm.rank() == 0) x = at::full({32}, 1.0, at::TensorOptions().dtype(ScalarType::Double));  // as many bytes
  require_mentions(prompt_error_of(
                       comm, [&] { comm.all_reduce(x); }, "type mismatch"),
                   {"float64[32]", "float32[64]"});
}
void fail_size(Communicator& comm) {
  at::Tensor x = at::full({comm.rank() == comm.size() - 1 ? 100'001 : 100'000}, 1.0F);
  require_mentions(prompt_error_of(
                       comm, [&] { comm.all_reduce(x, {.async = true}).wait(); }, "size mismatch"),
                   {"float32[100000]", "float32[100001]"});
}
void fail_root(Communicator& comm) {
  at::Tensor x = at::full({8}, 1.0F);
  require_mentions(prompt_error_of(
                       comm, [&] { comm.broadcast(x, {.root = comm.rank() % 2}); }, "root mismatch"),
                   {"root 0", "root 1"});
}
// In call(root) every even rank passes rank 0 as the root, and every odd one rank 1. With a stream, a rank whose own
// part is complete gets the error from its next call.
template <class Call>
void fail_root_of(Communicator& comm, const char* verb, Call call) {
  const std::string text = prompt_error_of(
      comm,
      [&] {
        call(comm.rank() % 2);
        comm.barrier();
      },
      std::string("root of ") + verb);
  require_mentions(text, {verb, "root 0", "root 1", "do not call the same operation: rank"});
}
void fail_root_of_reduce(Communicator& comm) {
  at::Tensor x = at::full({8}, 1.0F);
  fail_root_of(comm, "reduce(float32[8]", [&](int root) { comm.reduce(x, {.root = root}); });
}
void fail_root_of_gather(Communicator& comm) {
  const at::Tensor x = at::full({8}, 1.0F), all = at::full({8 * comm.size()}, 1.0F);
  fail_root_of(comm, "gather(float32[8]",
               [&](int root) { comm.gather(root == comm.rank() ? all : at::Tensor(), x, {.root = root}); });
}
void fail_root_of_scatter(Communicator& comm) {
  const at::Tensor x = at::full({8}, 1.0F), all = at::full({8 * comm.size()}, 1.0F);
  fail_root_of(comm, "scatter(float32[8]",
               [&](int root) { comm.scatter(x, root == comm.rank() ? all : at::Tensor(), {.root = root}); });
}
void fail_barrier(Communicator& comm) {
  at::Tensor x = at::full({9}, 1.0F);
  require_mentions(at_odds(
                       comm, 1, "barrier", [&] { comm.barrier(); }, [&] { comm.all_reduce(x); }),
                   {"all_reduce(float32[9], sum)", "rank 1: barrier()"});
}
void fail_bytes(Communicator& comm) {
  at::Tensor x = at::full({9}, 1.0F);
  require_mentions(at_odds(
                       comm, 1, "bytes", [&] { comm.all_gather_bytes("some"); }, [&] { comm.all_reduce(x); }),
                   {"all_reduce(float32[9], sum)", "rank 1: all_gather(int64[1])"});
}
void fail_bytes_and_barrier(Communicator& comm) {
  require_mentions(at_odds(
                       comm, 1, "bytes and barrier", [&] { comm.broadcast_bytes("some", 1); }, [&] { comm.barrier(); }),
                   {"barrier()", "rank 1: broadcast(int64[1], root 1)"});
}
void fail_batch(Communicator& comm) {
  at::Tensor x = at::full({9}, 1.0F), in = at::full({9}, 0.0F);
  require_mentions(at_odds(
                       comm, 1, "batch",
                       [&] {
                         comm.batch_isend_irecv({{true, x, 0, 3}, {false, in, 0, 3}});
                       },
                       [&] { comm.all_reduce(x); }),
                   {"do not call the same operation", "rank 1 "});
}
void fail_op(Communicator& comm) {
  at::Tensor x = at::full({8}, 1.0F);
  require_mentions(
      prompt_error_of(
          comm, [&] { comm.all_reduce(x, {.op = comm.rank() == 0 ? ReduceOp::max : ReduceOp::min}); }, "op"),
      {"max", "min"});
}
void fail_counts(Communicator& comm) {
  const auto n = static_cast<std::size_t>(comm.size());
  std::vector<std::int64_t> sends(n, 2);
  std::vector<std::int64_t> receives(n, 2);
  if (comm.rank() == 1) receives[0] = 3;
  require_mentions(prompt_error_of(
                       comm,
                       [&] {
                         comm.all_to_all_uneven(at::empty({total_of(receives)}), at::empty({total_of(sends)}), receives,
                                                sends);
                       },
                       "counts of all_to_all"),
                   {"rank 0 sends 2 elements to rank 1, which expects 3"});
}
// Only the type differs; even the number of bytes is the same. So only a comparison of the calls can detect it.
void fail_type_elsewhere(Communicator& comm) {
  const auto type = comm.rank() == 1 ? ScalarType::Int : ScalarType::Float;
  const auto tensor = [&](std::int64_t count) { return at::full({count}, 1, at::TensorOptions().dtype(type)); };
  require_mentions(prompt_error_of(
                       comm, [&] { comm.all_gather(tensor(8 * comm.size()), tensor(8)); }, "types of all_gather"),
                   {"rank 1: all_gather(int32[8])", "all_gather(float32[8])"});
}
// The same calls in another order.
void fail_order(Communicator& comm) {
  at::Tensor x = at::full({8}, 1.0F);
  const std::string text = prompt_error_of(
      comm,
      [&] {
        Work first = comm.rank() == 1 ? comm.all_reduce(x, {.async = true}) : comm.broadcast(x, {.async = true});
        Work second = comm.rank() == 1 ? comm.broadcast(x, {.async = true}) : comm.all_reduce(x, {.async = true});
        first.wait();
        second.wait();
      },
      "order");
  require_mentions(text, {"broadcast(float32[8], root 0)", "rank 1: all_reduce(float32[8], sum)"});
}
// Rank 0 sends its `x` to rank 1, which receives another one. The other ranks wait for a message that nobody sends, and
// get the failure of these two.
std::string wrong_message_error(Communicator& comm, const at::Tensor& x, const std::string& what) {
  return prompt_error_of(
      comm,
      [&] {
        if (comm.rank() == 0)
          comm.send(x, 1);
        else if (comm.rank() == 1)
          comm.recv(x, 0);
        else
          comm.recv(x, comm.rank() - 1, {.tag = 9});
      },
      what);
}
void fail_message_type(Communicator& comm) {
  const auto type = at::TensorOptions().dtype(comm.rank() == 0 ? ScalarType::Float : ScalarType::Int);
  require_mentions(wrong_message_error(comm, at::full({16}, 1, type), "message type mismatch"),
                   {"float32[16]", "int32[16]"});
}
void fail_message(Communicator& comm) {
  require_mentions(wrong_message_error(comm, at::full({comm.rank() == 0 ? 5 : 6}, 1.0F), "message mismatch"),
                   {"float32[5]", "float32[6]"});
}
void fail_missing(Communicator& comm) {
  at::Tensor x = at::full({7}, 1.0F);
  comm.all_reduce(x);
  const auto begin = std::chrono::steady_clock::now();
  if (comm.rank() == 0) {
    // This rank does not join, and has a longer timeout, until the others have failed. Then any operation fails at
    // once.
    const std::string text = require_error<CommError>(
        [&] {
          for (;;) comm.recv(x, comm.rank(), {.tag = 99});
        },
        "late");
    require(!text.empty(), "an error");
    return;
  }
  comm.mark_started();
  const std::string text = require_error<CommError>([&] { comm.all_reduce(x); }, "missing rank");
  // The other ranks call at the same time. A rank that the node has delayed for longer than the timeout is named
  // too.
  require(text.find("ranks 0, ") == std::string::npos, "late: " + text);
  require_mentions(text, {"all_reduce(float32[7], sum)", "timed out", "rank 0"});
  require(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20), "the time-out came late");
}
void fail_abort(Communicator& comm) {
  at::Tensor x = at::full({7}, 1.0F);
  if (comm.rank() == comm.size() - 1) {
    comm.barrier();  // the groups of the other ranks exist now
    comm.abort("had enough");
    return;
  }
  const auto body = [&] {
    comm.barrier();
    comm.all_reduce(x);
  };
  require_mentions(require_error<CommError>(body, "aborted"), {"had enough"});
}

// One rank sends a message to a rank that is in a collective.
void fail_send_and_collective(Communicator& comm) {
  at::Tensor x = at::full({7}, 1.0F);
  const std::string text = at_odds(
      comm, 0, "send and collective", [&] { comm.send(x, 1); }, [&] { comm.all_reduce(x); });
  require_mentions(text, {"do not call the same operation", "rank 0 sends a message to rank 1"});
}
void fail_receive_and_collective(Communicator& comm) {
  at::Tensor x = at::full({7}, 1.0F);
  // Earlier messages that were received out of order make no difference.
  if (comm.rank() == 0) {
    Work one = comm.send(x, 1, {.tag = 1, .async = true});
    comm.send(x, 1, {.tag = 2});
    one.wait();
  } else if (comm.rank() == 1) {
    comm.recv(x, 0, {.tag = matches_in_order(comm) ? 1 : 2});
    comm.recv(x, 0, {.tag = matches_in_order(comm) ? 2 : 1});
  }
  comm.all_reduce(x);
  const std::string text = at_odds(
      comm, 1, "receive and collective", [&] { comm.recv(x, 0); }, [&] { comm.all_reduce(x); });
  require_mentions(text, {"do not call the same operation", "rank 1 waits to receive a message from rank 0"});
}

constexpr std::array kFailureSuite{SuiteCase{"verb", fail_verb},
                                   SuiteCase{"type", fail_type},
                                   SuiteCase{"size", fail_size},
                                   SuiteCase{"root", fail_root},
                                   SuiteCase{"root_of_reduce", fail_root_of_reduce},
                                   SuiteCase{"root_of_gather", fail_root_of_gather},
                                   SuiteCase{"root_of_scatter", fail_root_of_scatter},
                                   SuiteCase{"barrier", fail_barrier},
                                   SuiteCase{"bytes", fail_bytes},
                                   SuiteCase{"bytes_and_barrier", fail_bytes_and_barrier},
                                   SuiteCase{"batch", fail_batch},
                                   SuiteCase{"op", fail_op},
                                   SuiteCase{"counts", fail_counts},
                                   SuiteCase{"type_elsewhere", fail_type_elsewhere},
                                   SuiteCase{"order", fail_order},
                                   SuiteCase{"message_type", fail_message_type},
                                   SuiteCase{"message", fail_message},
                                   SuiteCase{"missing", fail_missing, false, true},
                                   SuiteCase{"abort", fail_abort},
                                   SuiteCase{"send_and_collective", fail_send_and_collective},
                                   SuiteCase{"receive_and_collective", fail_receive_and_collective}};

}  // namespace
}  // namespace suite

std::span<const SuiteCase> backend_failure_suite() { return suite::kFailureSuite; }

CommunicatorOptions failure_options(const SuiteCase& test) {
  using namespace std::chrono_literals;
  return {.first_timeout = 60s, .timeout = test.needs_time_out ? 500ms : 60'000ms};
}

}  // namespace phalanx
