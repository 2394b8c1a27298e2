// NCCL inside "nodes" and gloo between them, over doubles of NCCL and of streams, across real processes. Which rank
// is on which node is told by the test.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/expect_failure_suite.h"
#include "phalanx/comm/testing/fake_nccl.h"
#include "phalanx/comm/testing/fake_streams.h"
#include "phalanx/comm/testing/fault_calls.h"
#include "phalanx/comm/testing/fault_world.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/comm/testing/nccl_hierarchical_rank.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

void require_that(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

std::shared_ptr<NcclRank> make_gloo_hierarchical_rank(const HostPort& server, int rank, const std::vector<int>& nodes,
                                                      const CommunicatorOptions& options = {},
                                                      std::int64_t piece_bytes = 1 << 20) {
  auto store = std::make_shared<TcpStore>(server);
  auto flat = make_gloo_communicator(store, rank, static_cast<int>(nodes.size()), {.communicator = options});
  return make_hierarchical_rank(
      std::move(flat), *store,
      {.communicator = options, .nodes = nodes, .hint = {}, .device_piece_bytes = piece_bytes});
}

std::string run_hierarchical(const std::vector<int>& nodes, const std::function<void(NcclRank&)>& body,
                             const CommunicatorOptions& options = {}, std::int64_t piece_bytes = 1 << 20) {
  TcpStoreServer server;
  return run_forked_ranks(static_cast<int>(nodes.size()), [&](int r) {
    const auto rank = make_gloo_hierarchical_rank(server.address(), r, nodes, options, piece_bytes);
    body(*rank);
    end_hierarchical_rank(*rank);
  });
}

struct HierarchicalWorld {
  const char* name;
  std::vector<int> nodes;
  const char* backend;
};

class NcclHierarchicalSuite : public ::testing::TestWithParam<HierarchicalWorld> {};

TEST_P(NcclHierarchicalSuite, Passes) {
  EXPECT_EQ(
      run_hierarchical(GetParam().nodes,
                       [](NcclRank& rank) {
                         const std::string expected = GetParam().backend;
                         require_that(rank.comm->backend_name() == expected, std::string(rank.comm->backend_name()));
                         // Inside of a node messages have none.
                         require_that(rank.comm->backend()->traits().has_tags == !expected.starts_with("nccl"), "tags");
                         const int ranks = rank.comm->size();
                         const std::vector<int>& nodes = GetParam().nodes;
                         const bool has_node_of_three =
                             ranks > 3 && (std::ranges::count(nodes, 0) == 3 || std::ranges::count(nodes, 1) == 3);
                         run_backend_suite(*rank.comm, [&](const SuiteCase& test) {
                           const std::string name = test.name;
                           // With many ranks what is new: the verbs over more nodes.
                           const bool is_long = name == "all_reduce" || name == "soak" || name == "async";
                           // The suite wants the average to the last bit, which that of averages over three ranks
                           // is not.
                           const bool is_rounded =
                               has_node_of_three && (name.find("reduce") != std::string::npos || name == "every_type");
                           return !test.needs_rank_order && !(ranks > 4 && is_long) && !is_rounded;
                         });
                       }),
      "");
}

INSTANTIATE_TEST_SUITE_P(Gloo, NcclHierarchicalSuite,
                         ::testing::Values(HierarchicalWorld{"OneNode", {3, 3}, "nccl"},
                                           HierarchicalWorld{"NoneBesideAnother", {0, 1, 2}, "gloo"},
                                           HierarchicalWorld{"TwoAndTwo", {0, 0, 1, 1}, "nccl+gloo"},
                                           HierarchicalWorld{"ThreeAndThree", {0, 0, 0, 1, 1, 1}, "nccl+gloo"},
                                           HierarchicalWorld{"ThreeAndOne", {0, 0, 0, 1}, "nccl+gloo"},
                                           HierarchicalWorld{"TwoAndThree", {0, 0, 1, 1, 1}, "nccl+gloo"},
                                           HierarchicalWorld{"InTurns", {0, 1, 0, 1}, "nccl+gloo"},
                                           HierarchicalWorld{"FourTimesTwo", {0, 0, 1, 1, 2, 2, 3, 3}, "nccl+gloo"},
                                           HierarchicalWorld{"TwoTimesFour", {0, 0, 0, 0, 1, 1, 1, 1}, "nccl+gloo"}),
                         [](const auto& info) { return info.param.name; });

// Rank r has r + 1 everywhere, and counts differ from rank to rank; slices and parts do not divide evenly.
void require_reductions(Communicator& comm, at::ScalarType type, std::int64_t count, ReduceOp op) {
  const int n = comm.size();
  const double sum = n * (n + 1) / 2.0, product = std::tgamma(n + 1.0);
  const double expected = op == ReduceOp::sum       ? sum
                          : op == ReduceOp::avg     ? sum / n
                          : op == ReduceOp::product ? product
                          : op == ReduceOp::max     ? n
                                                    : 1;
  // Rounded to the type: what each of up to four nodes has, and the result; whole numbers are exact.
  const double unit = type == at::kFloat      ? 0x1p-24
                      : type == at::kDouble   ? 0x1p-53
                      : type == at::kHalf     ? 0x1p-11
                      : type == at::kBFloat16 ? 0x1p-8
                                              : 0;
  const auto require_all = [&](const at::Tensor& x, double value, const std::string& what) {
    const at::Tensor wide = x.to(at::kDouble);
    for (std::int64_t i = 0; i < wide.numel(); ++i)
      require_that(std::abs(wide.const_data_ptr<double>()[i] - value) <= 5 * unit * value,
                   fmt::format("{} of {}: element {} of {} is {}, expected {}", what, c10::toString(type), i, x.numel(),
                               wide.const_data_ptr<double>()[i], value));
  };
  const at::TensorOptions options(type);
  const auto mine = [&](std::int64_t length) { return at::full({length}, comm.rank() + 1, options); };
  at::Tensor x = mine(count);
  comm.all_reduce(x, {.op = op});
  require_all(x, expected, "all_reduce");
  // The same bits everywhere.
  const std::string bits(static_cast<const char*>(x.const_data_ptr()), x.nbytes());
  for (const std::string& other : comm.all_gather_bytes(bits)) require_that(other == bits, "other bits");
  for (const int root : {0, n - 1}) {
    x = mine(count);
    comm.reduce(x, {.root = root, .op = op});
    require_all(x, comm.rank() == root ? expected : comm.rank() + 1.0, "reduce");
  }
  std::vector<std::int64_t> counts;
  std::int64_t total = 0;
  for (int r = 0; r < n; ++r) total += counts.emplace_back(r == 1 ? 0 : count + r);
  at::Tensor part = at::zeros({counts[static_cast<std::size_t>(comm.rank())]}, options);
  comm.reduce_scatter_uneven(part, mine(total), counts, {.op = op});
  require_all(part, expected, "reduce_scatter");
}

void require_all_reductions(Communicator& comm) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
    for (const std::int64_t count : {1, 63, 1'000, 20'011}) require_reductions(comm, at::kFloat, count, op);
    for (const at::ScalarType type : {at::kDouble, at::kHalf, at::kBFloat16}) require_reductions(comm, type, 63, op);
    if (op == ReduceOp::avg) continue;
    for (const at::ScalarType type : {at::kInt, at::kLong}) require_reductions(comm, type, 63, op);
  }
}

TEST(NcclHierarchicalGloo, ReductionsAreRightAndTheSameOnAllRanks) {
  for (const std::vector<int>& nodes :
       {std::vector{0, 0, 0, 1, 1, 1}, std::vector{0, 0, 1, 1, 2, 2, 3, 3}, std::vector{0, 0, 1, 1, 1}})
    EXPECT_EQ(run_hierarchical(nodes, [](NcclRank& rank) { require_all_reductions(*rank.comm); }), "");
}

// The sum of a node would not fit into float16.
TEST(NcclHierarchicalGloo, AnAverageOfFloat16DoesNotOverflow) {
  EXPECT_EQ(run_hierarchical({0, 0, 0, 1, 1},
                             [](NcclRank& rank) {
                               at::Tensor x = at::full({1000}, 30'000, at::TensorOptions(at::kHalf));
                               rank.comm->all_reduce(x, {.op = ReduceOp::avg});
                               const at::Tensor wide = x.to(at::kFloat);
                               for (std::int64_t i = 0; i < wide.numel(); ++i)
                                 require_that(wide.const_data_ptr<float>()[i] == 30'000.0F, "average");
                             }),
            "");
}

// Many more pieces than are in memory at a time; every element has a value of its own.
void require_reductions_in_pieces(Communicator& comm) {
  constexpr std::int64_t kCount = 10'007;
  const std::int64_t n = comm.size(), r = comm.rank(), sum = n * (n + 1) / 2;
  const auto multiples = [](std::int64_t first, std::int64_t length, std::int64_t by) {
    return at::arange(first * by, (first + length) * by, by, at::kLong);
  };
  const auto require_equal = [](const at::Tensor& found, const at::Tensor& expected, const char* what) {
    require_that(at::equal(found, expected), what);
  };
  at::Tensor x = multiples(0, kCount, r + 1);
  comm.all_reduce(x);
  require_equal(x, multiples(0, kCount, sum), "all_reduce");
  for (int root = 0; root < n; ++root) {
    x = multiples(0, kCount, r + 1);
    comm.reduce(x, {.root = root});
    require_equal(x, multiples(0, kCount, r == root ? sum : r + 1), "reduce");
  }
  at::Tensor part = at::zeros({kCount}, at::kLong);
  comm.reduce_scatter(part, multiples(0, n * kCount, r + 1));
  require_equal(part, multiples(r * kCount, kCount, sum), "reduce_scatter");
  x = multiples(0, kCount, r + 1);
  comm.broadcast(x, {.root = 1});
  require_equal(x, multiples(0, kCount, 2), "broadcast");
}

TEST(NcclHierarchicalGloo, PiecesShareMemoryInTurn) {
  for (const std::vector<int>& nodes :
       {std::vector{0, 0, 1, 1}, std::vector{0, 0, 1, 1, 1}, std::vector{0, 1, 0, 1}, std::vector{0, 0, 1}})
    EXPECT_EQ(run_hierarchical(
                  nodes, [](NcclRank& rank) { require_reductions_in_pieces(*rank.comm); }, {}, 512),
              "");
}

// --- which transport

// Of all ranks together, given to NCCL and to gloo by body.
template <class Body>
void require_given(Communicator& comm, Communicator& counter, std::int64_t intra_node, std::int64_t inter_node,
                   const std::string& what, Body body) {
  const CommVolume before = *comm_volume(*comm.backend());
  body();
  const CommVolume after = *comm_volume(*comm.backend());
  at::Tensor sum = at::zeros({2}, at::TensorOptions().dtype(c10::ScalarType::Long));
  auto* data = sum.mutable_data_ptr<std::int64_t>();
  data[0] = static_cast<std::int64_t>(after.intra_node - before.intra_node);
  data[1] = static_cast<std::int64_t>(after.inter_node - before.inter_node);
  counter.all_reduce(sum);
  require_that(data[0] == intra_node && data[1] == inter_node,
               fmt::format("{}: {} bytes inside, {} between; expected {} and {}", what, data[0], data[1], intra_node,
                           inter_node));
}

TEST(NcclHierarchicalGloo, NcclMovesWhatStaysOnANodeAndGlooTheRest) {
  EXPECT_EQ(
      run_hierarchical(
          {0, 0, 1, 1},
          [](NcclRank& rank) {
            Communicator& comm = *rank.comm;
            const auto counter = comm.split(0, comm.rank(), "counter");
            const int r = comm.rank();
            constexpr std::int64_t kCount = 1024, kBytes = 4 * kCount;  // slices of 512
            const auto tensor = [](std::int64_t count) { return at::full({count}, 1.0F); };
            const auto check = [&](const char* what, std::int64_t intra_node, std::int64_t inter_node, auto body) {
              require_given(comm, *counter, intra_node, inter_node, what, body);
            };
            std::vector<std::string> before = rank.nccl->calls();
            // All inputs, and the slices of two nodes; between: half a tensor a rank.
            check("all_reduce", 6 * kBytes, 2 * kBytes, [&] { comm.all_reduce(tensor(kCount)); });
            std::vector<std::string> calls = rank.nccl->calls();
            calls.erase(calls.begin(), calls.begin() + static_cast<std::ptrdiff_t>(before.size()));
            require_that(calls.size() >= 2 && calls[0] == "group(reduce_scatter)" && calls[1] == "group(all_gather)",
                         fmt::format("NCCL's calls: {}", fmt::join(calls, "; ")));
            // All inputs, and the sum to the root's node, where the root gets both halves.
            check("reduce", 5 * kBytes, kBytes, [&] { comm.reduce(tensor(kCount), {.root = 1}); });
            // Each node's sum of what is for the other node.
            check("reduce_scatter", 16 * kBytes, 4 * kBytes,
                  [&] { comm.reduce_scatter(tensor(kCount), tensor(4 * kCount)); });
            check("all_gather", 8 * kBytes, 4 * kBytes, [&] { comm.all_gather(tensor(4 * kCount), tensor(kCount)); });
            check("broadcast", 2 * kBytes, kBytes, [&] { comm.broadcast(tensor(kCount), {.root = 3}); });
            check("gather", kBytes, 2 * kBytes,
                  [&] { comm.gather(r == 2 ? tensor(4 * kCount) : at::Tensor(), tensor(kCount), {.root = 2}); });
            check("scatter", kBytes, 2 * kBytes,
                  [&] { comm.scatter(tensor(kCount), r == 0 ? tensor(4 * kCount) : at::Tensor(), {.root = 0}); });
            check("all_to_all", 4 * kBytes, 8 * kBytes,
                  [&] { comm.all_to_all(tensor(4 * kCount), tensor(4 * kCount)); });
            const auto message = [&](int from, int to) {
              if (r == from) comm.send(tensor(kCount), to);
              if (r == to) comm.recv(tensor(kCount), from);
            };
            check("send inside", kBytes, 0, [&] { message(3, 2); });
            check("send between", 0, kBytes, [&] { message(1, 2); });
            check("batch", 2 * kBytes, 2 * kBytes, [&] {
              comm.batch_isend_irecv({{true, tensor(kCount), (r + 1) % 4, 1}, {false, tensor(kCount), (r + 3) % 4, 1}});
            });
          }),
      "");
}

// --- groups

TEST(NcclHierarchicalGloo, EveryGroupGetsWhatItCanHave) {
  EXPECT_EQ(run_hierarchical({0, 0, 1, 1, 2, 2},
                             [](NcclRank& rank) {
                               Communicator& comm = *rank.comm;
                               const int r = comm.rank();
                               const auto check = [&](int color, int key, const std::string& expected) {
                                 const auto group = comm.split(color, key);
                                 if (expected.empty()) return require_that(group == nullptr, "a negative colour");
                                 require_that(group->backend_name() == expected,
                                              fmt::format("rank {}, colour {}: {} instead of {}", r, color,
                                                          group->backend_name(), expected));
                                 const auto nested = group->split(0, -group->rank());
                                 for (Communicator* one : {group.get(), nested.get()}) {
                                   at::Tensor x = at::full({1'001}, 1.0F);
                                   one->all_reduce(x);
                                   require_that(x.const_data_ptr<float>()[1'000] == static_cast<float>(one->size()),
                                                "sum");
                                 }
                               };
                               check(0, -r, "nccl+gloo");                              // in reverse order
                               check(r / 2, r, "nccl");                                // by node
                               check(r % 2, r, "gloo");                                // one of each node
                               check(r < 4 ? 0 : -1, r, r < 4 ? "nccl+gloo" : "");     // two nodes
                               check(r < 3 ? 0 : 1, r, "nccl+gloo");                   // two and one, one and two
                               check(0, r % 2, "nccl+gloo");                           // in turns
                               check(r < 5 ? 0 : 1, r, r < 5 ? "nccl+gloo" : "nccl");  // one alone
                             }),
            "");
}

// --- failures

TEST(NcclHierarchicalGloo, MistakesAreClear) {
  expect_failure_suite([](const auto& body, const CommunicatorOptions& options) {
    return run_hierarchical(
        {0, 0, 1, 1}, [&](NcclRank& rank) { body(*rank.comm); }, options);
  });
}

// NCCL of one node cannot be had: nobody on the others waits for it.
TEST(NcclHierarchicalGloo, ANodeWithoutNcclIsAnErrorOnAll) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(4,
                             [&](int r) {
                               auto store = std::make_shared<TcpStore>(server.address());
                               auto streams = std::make_shared<FakeStreams>();
                               auto nccl = std::make_shared<FakeNccl>(
                                   make_shm_backend(*store, r % 2, 2, fmt::format("transport/{}", r / 2), 60s));
                               if (r == 3) nccl->fail_with(NcclResult::system_error);
                               std::string text;
                               try {
                                 make_nccl_hierarchical_communicator(make_gloo_communicator(store, r, 4), -1,
                                                                     nccl->table(), streams,
                                                                     {.communicator = {}, .nodes = {0, 0, 1, 1}});
                               } catch (const CommError& error) {
                                 text = error.what();
                               }
                               const std::string part = "nccl+gloo: rank 3: NCCL: making the group: fake error";
                               require_that(text.find(part) != std::string::npos, "'" + text + "'");
                             }),
            "");
}

// In the middle of NCCL's work, or of gloo's: whichever it is in when it dies.
std::string dies_in(const FaultCall& call) {
  constexpr int kVictim = 2;
  constexpr std::int64_t kCount = 100'000;
  TcpStoreServer server;
  FaultWorld world(4, [&](FaultRank& self) {
    const auto rank = make_gloo_hierarchical_rank(server.address(), self.rank(), {0, 0, 1, 1});
    call.begin(*rank->comm, kCount)();
    self.arrive();
    const std::string text = self.error_within(1s, [&] {
      for (;;) call.begin(*rank->comm, kCount)();
    });
    require_told(call, text, kCount, kVictim);
    for (const char* part : {"rank 2 has died", "group 'world'"})
      require_that(text.find(part) != std::string::npos, "wrong error: " + text);
    end_hierarchical_rank(*rank);
  });
  for (int r = 0; r < 4; ++r)
    if (!world.await(r, 1)) return fmt::format("rank {} did not come", r);
  world.strike(kVictim, SIGKILL);
  return world.finish();
}

TEST(NcclHierarchicalGloo, SurvivorsNameTheRankThatWasKilledWithinASecond) {
  for (const FaultCall& call : fault_calls(2)) {
    if (call.prepare) continue;  // symmetric memory is shm's
    EXPECT_EQ(again_if_late([&] { return dies_in(call); }), "") << call.name;
  }
}

}  // namespace
}  // namespace phalanx
