// Two levels across real processes. Which rank is on which "node" is told by the test, but for the proof itself.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/device/staged_backend.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/hierarchical/node_discovery.h"
#include "phalanx/comm/hierarchical/node_layout.h"
#include "phalanx/comm/reduce.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/fake_streams.h"
#include "phalanx/comm/testing/fault_world.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/comm/testing/hierarchical_ranks.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using c10::ScalarType;
using std::chrono::seconds;

void expect_here(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

// --- the proof

using Exchange = std::function<std::vector<std::string>(const std::string&)>;

// node_of of `size` ranks (threads), each of which may see, or say, something else.
std::vector<int> proof_of(int size, const std::function<std::string(int)>& hint_of,
                          const std::function<Exchange(int, Exchange)>& through = {}) {
  std::vector<std::vector<int>> found(static_cast<std::size_t>(size));
  run_local_ranks(size, [&](const std::shared_ptr<Communicator>& comm) {
    Exchange exchange = [&](const std::string& value) { return comm->all_gather_bytes(value); };
    if (through) exchange = through(comm->rank(), exchange);
    found[static_cast<std::size_t>(comm->rank())] = discover_nodes(comm->rank(), size, exchange, hint_of(comm->rank()));
  });
  for (const auto& one : found) EXPECT_EQ(one, found[0]);
  return found[0];
}

TEST(NodeDiscovery, RanksThatShareMemoryShareANode) {
  EXPECT_THAT(proof_of(1, [](int) { return local_host_id(); }), ElementsAre(0));
  EXPECT_THAT(proof_of(4, [](int) { return local_host_id(); }), ElementsAre(0, 0, 0, 0));
}

TEST(NodeDiscovery, OtherHintsAreOtherNodes) {
  EXPECT_THAT(proof_of(5, [](int rank) { return fmt::format("boot net:{} pid:1", rank % 2); }),
              ElementsAre(0, 1, 0, 1, 0));
}

// As clones of a virtual node: equal hints, but the process of that number is another, with a token of its own.
TEST(NodeDiscovery, EqualHintsProveNothing) {
  const auto through = [](int rank, Exchange exchange) -> Exchange {
    return [rank, exchange](const std::string& value) {
      std::vector<std::string> all = exchange(value);
      // Ranks 2 and 3 find rank 2's memory where ranks 0 and 1 said that theirs is.
      if (rank >= 2 && value.starts_with("/proc/"))
        for (int other : {0, 1}) all[static_cast<std::size_t>(other)] = all[2];
      return all;
    };
  };
  EXPECT_THAT(proof_of(
                  4, [](int) { return std::string("same"); }, through),
              ElementsAre(0, 0, 1, 1));
}

TEST(NodeDiscovery, AWrongTokenIsNoProof) {
  const auto through = [](int rank, Exchange exchange) -> Exchange {
    return [rank, exchange, calls = 0](const std::string& value) mutable {
      std::string said = value;
      if (++calls == 2 && rank == 1) said.back() = said.back() == '0' ? '1' : '0';
      return exchange(said);
    };
  };
  EXPECT_THAT(proof_of(
                  3, [](int) { return std::string("same"); }, through),
              ElementsAre(0, 1, 0));
}

TEST(NodeDiscovery, WhatIsNoMemoryOfARankIsNotRead) {
  for (const std::string address : {"/proc/self/exe", "/dev/null", "/no/such/file", "-", ""}) {
    const auto through = [&](int rank, Exchange exchange) -> Exchange {
      return [&address, rank, exchange](const std::string& value) {
        return exchange(rank == 0 && value.starts_with("/proc/") ? address + " same" : value);
      };
    };
    // Rank 0 cannot be reached; the others find each other.
    EXPECT_THAT(proof_of(
                    3, [](int) { return std::string("same"); }, through),
                ElementsAre(0, 1, 1))
        << address;
  }
}

TEST(NodeDiscovery, NetworkNamespacesAreNodes) {
  // Forked twice, so that this process stays where it is.
  if (run_forked_ranks(1, [](int) { expect_here(unshare(CLONE_NEWNET) == 0, "no"); }) != "")
    GTEST_SKIP() << "network namespaces cannot be made here (that needs root)";
  TcpStoreServer server;
  EXPECT_EQ(
      run_forked_ranks(4,
                       [&](int rank) {
                         // Its connection stays in the network where it was made.
                         TcpStore store(server.address());
                         store.set(fmt::format("pid/{}", rank), std::to_string(getpid()));
                         if (rank == 2) {
                           expect_here(unshare(CLONE_NEWNET) == 0, "unshare");
                           store.set("moved", "");
                         } else if (rank == 3) {
                           store.wait({"moved"});
                           const int other = open(fmt::format("/proc/{}/ns/net", store.get("pid/2")).c_str(), O_RDONLY);
                           expect_here(setns(other, CLONE_NEWNET) == 0, "setns");
                         }
                         int call = 0;
                         const auto found = discover_nodes(rank, 4, [&](const std::string& value) {
                           std::vector<std::string> keys;
                           for (int r = 0; r < 4; ++r) keys.push_back(fmt::format("{}/{}", call, r));
                           store.set(keys[static_cast<std::size_t>(rank)], value);
                           ++call;
                           return store.get_all(keys, seconds(60));
                         });
                         expect_here(found == std::vector<int>{0, 0, 1, 1}, fmt::format("{}", fmt::join(found, " ")));
                       }),
      "");
}

// --- the layout

TEST(NodeLayout, NumbersNodesLanesAndOrder) {
  const NodeLayout layout({7, 7, 7, 3, 3});
  EXPECT_EQ(layout.nodes(), 2);
  EXPECT_THAT(layout.members(0), ElementsAre(0, 1, 2));
  EXPECT_THAT(layout.members(1), ElementsAre(3, 4));
  EXPECT_EQ(layout.lanes(), 2);
  EXPECT_EQ(layout.local_rank_of(4), 1);
  EXPECT_TRUE(layout.is_contiguous());
  EXPECT_FALSE(NodeLayout({0, 1, 0, 1}).is_contiguous());
}

TEST(NodeLayout, TheChainIsTakenWhereItMovesLess) {
  const NodeLayout two_by_two({0, 0, 1, 1}), two_by_four({0, 0, 0, 0, 1, 1, 1, 1});
  EXPECT_TRUE(two_by_two.is_chain_better(Verb::all_reduce, DataType::f32));       // 4 bytes an element, not 7
  EXPECT_FALSE(two_by_two.is_chain_better(Verb::all_reduce, DataType::bf16));     // 4, not 3.5
  EXPECT_TRUE(two_by_four.is_chain_better(Verb::all_reduce, DataType::bf16));     // 4, not 5.75
  EXPECT_FALSE(two_by_two.is_chain_better(Verb::reduce_scatter, DataType::f32));  // 4, and 4
  EXPECT_TRUE(two_by_four.is_chain_better(Verb::reduce_scatter, DataType::f32));  // 4, not 8
}

// --- the suites

struct Placement {
  const char* name;
  std::vector<int> nodes;
  bool is_eager = true;  // else as it is used: small operations are the flat backend's
};

class HierarchicalSuite : public ::testing::TestWithParam<Placement> {};

TEST_P(HierarchicalSuite, Passes) {
  HierarchicalOptions options;
  options.nodes = GetParam().nodes;
  EXPECT_EQ(run_hierarchical_ranks(GetParam().is_eager ? eager_hierarchical_options(GetParam().nodes) : options,
                                   [](Communicator& comm) {
                                     expect_here(comm.backend_name() == "shm+gloo", comm.backend_name());
                                     run_backend_suite(comm, [&](const SuiteCase& test) {
                                       const std::string name = test.name;
                                       // With many ranks what is new: the verbs over more nodes.
                                       const bool is_long = name == "all_reduce" || name == "soak" || name == "async";
                                       return comm.size() <= 4 || !is_long;
                                     });
                                   }),
            "");
}

INSTANTIATE_TEST_SUITE_P(Gloo, HierarchicalSuite,
                         ::testing::Values(Placement{"TwoAndTwo", {0, 0, 1, 1}},
                                           Placement{"InTurns", {0, 1, 0, 1}, false},
                                           Placement{"ThreeThreeTwo", {0, 0, 0, 1, 1, 1, 2, 2}}),
                         [](const auto& info) { return info.param.name; });

class HierarchicalFailures : public ::testing::TestWithParam<Placement> {};

TEST_P(HierarchicalFailures, AreClear) {
  for (const SuiteCase& test : backend_failure_suite()) {
    SCOPED_TRACE(test.name);
    // What depends on where the ranks are: who waits for whom.
    const std::string name = test.name;
    if (std::string(GetParam().name) == "InTurns" && (name == "root" || name == "op" || name == "type_elsewhere" ||
                                                      name == "size" || name == "type" || name == "counts"))
      continue;
    EXPECT_EQ(again_if_late([&] {
                return run_hierarchical_ranks(eager_hierarchical_options(GetParam().nodes, failure_options(test)),
                                              [&](Communicator& comm) { test.run(comm); });
              }),
              "");
  }
}

INSTANTIATE_TEST_SUITE_P(Gloo, HierarchicalFailures,
                         ::testing::Values(Placement{"TwoAndOne", {0, 0, 1}}, Placement{"InTurns", {0, 1, 0, 1}}),
                         [](const auto& info) { return info.param.name; });

TEST(HierarchicalGloo, CudaTensorsAreStagedOverIt) {
  EXPECT_EQ(run_hierarchical_ranks(eager_hierarchical_options({0, 0, 1}),
                                   [](Communicator& comm) {
                                     auto streams = std::make_shared<FakeStreams>();
                                     Communicator staged(make_staged_backend(comm.backend(), -1, streams), {});
                                     run_backend_suite(staged, [](const SuiteCase& test) {
                                       const std::string name = test.name;
                                       return name == "all_gather" || name == "rank_order";
                                     });
                                   }),
            "");
}

// However few steps of an operation are looked at: no rank waits for what another has out of sight.
TEST(HierarchicalGloo, FewStepsAtOnceAreEnough) {
  HierarchicalOptions options = eager_hierarchical_options({0, 1, 2, 3, 3});
  options.steps_at_once = 2;
  EXPECT_EQ(run_hierarchical_ranks(
                options,
                [](Communicator& comm) {
                  const auto require_value = [](bool is_right, const char* verb) {
                    if (!is_right) throw std::runtime_error(verb);
                  };
                  const std::int64_t n = comm.size(), count = 200'000;
                  const at::Tensor mine = at::full({count}, comm.rank() + 1.0F);
                  at::Tensor all = at::zeros({n * count});
                  comm.all_gather(all, mine);
                  for (std::int64_t i = 0; i < n * count; i += 999)
                    require_value(all.const_data_ptr<float>()[i] == static_cast<float>(i / count + 1), "all_gather");
                  at::Tensor dealt = at::zeros({n * count});
                  comm.all_to_all(dealt, all);
                  require_value(dealt.const_data_ptr<float>()[0] == comm.rank() + 1.0F, "all_to_all");
                  comm.broadcast(dealt, {.root = 2});
                  require_value(dealt.const_data_ptr<float>()[0] == 3.0F, "broadcast");
                }),
            "");
}

// --- bits

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

// Rank r's input: any bits that are numbers of the type.
at::Tensor awkward_tensor(std::int64_t count, ScalarType type, int rank) {
  at::Tensor values = at::empty({count}, at::TensorOptions().dtype(ScalarType::Double));
  auto* data = values.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t bits = static_cast<std::uint32_t>(i) * 2654435761U + static_cast<std::uint32_t>(rank) * 40503U + 1;
    bits ^= bits >> 15;
    bits *= 2246822519U;
    bits ^= bits >> 13;
    data[i] = static_cast<double>(static_cast<std::int32_t>(bits)) * 1e-8;
  }
  if (type == ScalarType::Bool) return values.gt(0);
  if (c10::isIntegralType(type, true)) return values.mul(1e3).to(ScalarType::Long).to(type);
  return values.to(type);
}

void same_bits(Communicator& comm, bool in_every_type) {
  const std::vector<std::pair<ScalarType, DataType>> types{
      {ScalarType::Float, DataType::f32},     {ScalarType::Double, DataType::f64},  {ScalarType::Half, DataType::f16},
      {ScalarType::BFloat16, DataType::bf16}, {ScalarType::Int, DataType::i32},     {ScalarType::Long, DataType::i64},
      {ScalarType::Byte, DataType::u8},       {ScalarType::Bool, DataType::boolean}};
  const std::int64_t count = 6'007 * comm.size();
  for (const auto& [scalar, dtype] : types) {
    if (!in_every_type && dtype != DataType::f32 && dtype != DataType::bf16) continue;
    std::vector<at::Tensor> inputs;
    std::vector<const void*> sources;
    for (int r = 0; r < comm.size(); ++r) {
      inputs.push_back(awkward_tensor(count, scalar, r));
      sources.push_back(inputs.back().const_data_ptr());
    }
    const at::Tensor& mine = inputs[static_cast<std::size_t>(comm.rank())];
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
      if (!reducible(dtype, op)) continue;
      const std::string what = fmt::format("{} {}", name_of(dtype), name_of(op));
      // What the local and the shm backend do with the same inputs.
      const at::Tensor expected = at::empty({count}, mine.options());
      reduce_kernel(dtype, op)(bytes_of(expected), sources.data(), comm.size(), static_cast<std::size_t>(count));
      at::Tensor x = mine.clone();
      comm.all_reduce(x, {.op = op});
      expect_here(std::memcmp(bytes_of(x), bytes_of(expected), x.nbytes()) == 0, "all_reduce " + what);
      const int root = comm.size() - 2;
      x = mine.clone();
      comm.reduce(x, {.root = root, .op = op});
      const at::Tensor& wanted = comm.rank() == root ? expected : mine;
      expect_here(std::memcmp(bytes_of(x), bytes_of(wanted), x.nbytes()) == 0, "reduce " + what);
      const std::int64_t part = count / comm.size();
      at::Tensor own = at::empty({part}, mine.options());
      comm.reduce_scatter(own, mine.clone(), {.op = op});
      const at::Tensor slice = expected.narrow(0, comm.rank() * part, part);
      expect_here(std::memcmp(bytes_of(own), slice.const_data_ptr(), own.nbytes()) == 0, "reduce_scatter " + what);
    }
  }
}

TEST(HierarchicalGloo, ReductionsHaveTheBitsOfTheLocalBackend) {
  for (const std::vector<int>& nodes : {std::vector{0, 0, 0, 1, 1}, std::vector{0, 1, 1, 2}}) {
    HierarchicalOptions options = eager_hierarchical_options(nodes);
    options.piece_bytes = 10'000;  // more than fit into memory at once
    const bool in_every_type = nodes.size() == 5;
    EXPECT_EQ(run_hierarchical_ranks(options, [=](Communicator& comm) { same_bits(comm, in_every_type); }), "");
  }
}

// --- messages and errors

TEST(HierarchicalGloo, ATagIsReserved) {
  EXPECT_EQ(run_hierarchical_ranks(eager_hierarchical_options({0, 0, 1}),
                                   [](Communicator& comm) {
                                     at::Tensor x = at::full({3}, 1.0F);
                                     std::string text;
                                     try {
                                       comm.send(x, (comm.rank() + 1) % 3, {.tag = 2'000'000});
                                     } catch (const CommError& e) {
                                       text = e.what();
                                     }
                                     expect_here(text.find("tag 2000000 is reserved") != std::string::npos ||
                                                     text.find("aborted") != std::string::npos,
                                                 text);
                                   }),
            "");
}

// Inside a node, too: there rank 2 is the second, and of the group below rank 3 is.
TEST(HierarchicalGloo, ErrorsCallTheRanksAsTheGroupDoes) {
  const auto require_error = [](const std::function<void()>& body, const std::string& part) {
    try {
      body();
    } catch (const CommError& error) {
      return expect_here(std::string(error.what()).find(part) != std::string::npos, error.what());
    }
    throw std::runtime_error("no error: " + part);
  };
  TcpStoreServer server;
  EXPECT_EQ(kill_one_of(
                4, 2,
                [&](FaultRank& self) -> std::function<void()> {
                  auto flat = make_gloo_communicator(std::make_shared<TcpStore>(server.address()), self.rank(), 4);
                  const std::shared_ptr<Communicator> comm =
                      make_hierarchical_communicator(std::move(flat), eager_hierarchical_options({0, 1, 0, 1}));
                  const auto reversed = comm->split(0, -comm->rank());
                  at::Tensor x = at::full({comm->rank() == 0 ? 5 : 6}, 1.0F);
                  if (reversed->rank() == 3)
                    require_error([&] { reversed->send(x, 1); }, "rank 3 sends float32[5]; rank 1 receives float32[6]");
                  if (reversed->rank() == 1)
                    require_error([&] { reversed->recv(x, 3); }, "rank 3 sends float32[5]; rank 1 receives float32[6]");
                  comm->barrier();
                  return [comm, &require_error] {
                    at::Tensor y = at::full({100'000}, 1.0F);
                    require_error(
                        [&] {
                          for (;;) comm->all_reduce(y);
                        },
                        "rank 2 has died");
                  };
                }),
            "");
}

// Its neighbour, for whose message rank 0 waits, does nothing that could tell it.
TEST(HierarchicalGloo, AnAbortOnAnotherNodeIsHeardOf) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(3,
                             [&](int rank) {
                               auto store = std::make_shared<TcpStore>(server.address());
                               const CommunicatorOptions options{.first_timeout = seconds(20)};
                               const auto comm = make_hierarchical_communicator(
                                   make_gloo_communicator(store, rank, 3, {.communicator = options}),
                                   eager_hierarchical_options({0, 0, 1}, options));
                               if (rank == 1) return store->wait({"heard"}, seconds(60));
                               if (rank == 0) store->set("made", "");
                               if (rank == 2) {
                                 store->wait({"made"}, seconds(60));
                                 comm->abort("had enough");
                                 return store->wait({"heard"}, seconds(60));
                               }
                               std::string text;
                               at::Tensor x = at::full({7}, 1.0F);
                               try {
                                 comm->recv(x, 1);
                               } catch (const CommError& error) {
                                 text = error.what();
                               }
                               store->set("heard", "");
                               expect_here(text.find("had enough") != std::string::npos, text);
                             }),
            "");
}

// A rank that has finished and gone is not dead to those who still read what it left.
TEST(HierarchicalGloo, RanksMayLeaveEarly) {
  EXPECT_EQ(run_hierarchical_ranks(eager_hierarchical_options({0, 0, 1, 1}),
                                   [](Communicator& comm) {
                                     at::Tensor x = at::full({200'000}, 1.0F);
                                     for (int k = 0; k < 5; ++k) comm.all_reduce(x);
                                   }),
            "");
}

// --- groups

TEST(HierarchicalGloo, EveryGroupGetsTheTransportsThatItCanHave) {
  EXPECT_EQ(run_hierarchical_ranks(
                eager_hierarchical_options({0, 0, 1, 1, 2}),
                [](Communicator& comm) {
                  const auto check = [&](int color, int key, const std::string& expected) {
                    const auto group = comm.split(color, key);
                    if (expected.empty()) return expect_here(group == nullptr, "a negative colour");
                    expect_here(group->backend_name() == expected,
                                fmt::format("rank {}, colour {}: {} instead of {}", comm.rank(), color,
                                            group->backend_name(), expected));
                    at::Tensor x = at::full({20'000}, 1.0F);
                    group->all_reduce(x);
                    expect_here(x.const_data_ptr<float>()[19'999] == static_cast<float>(group->size()), "sum");
                    // A group of a group, whose ranks are in reverse order.
                    const auto nested = group->split(0, -group->rank());
                    nested->all_reduce(x);
                    expect_here(x.const_data_ptr<float>()[0] == static_cast<float>(group->size() * group->size()),
                                "nested");
                    expect_here(nested->backend_name() == expected, nested->backend_name());
                  };
                  const int r = comm.rank();
                  check(0, r, "shm+gloo");                               // all
                  check(0, -r, "shm+gloo");                              // in reverse order
                  check(r / 2, r, r == 4 ? "gloo" : "shm");              // by node; one is alone
                  check(r == 4 ? 0 : r % 2, r, "gloo");                  // one of each node
                  check(r < 3 ? 0 : 1, r, r < 3 ? "shm+gloo" : "gloo");  // two and one; one and one
                  check(r == 2 ? -1 : 0, r, r == 2 ? "" : "shm+gloo");   // not all
                  check(r % 2 == 0 && r < 4 ? -1 : 1, r % 3, r % 2 == 0 && r < 4 ? "" : "gloo");
                }),
            "");
}

TEST(HierarchicalGloo, WhatIsOnOneLevelHasOne) {
  EXPECT_EQ(run_hierarchical_ranks({.communicator = {}, .nodes = {5, 5, 5}, .hint = std::nullopt},
                                   [](Communicator& comm) {
                                     expect_here(comm.backend_name() == "shm", comm.backend_name());
                                     comm.barrier();
                                   }),
            "");
  EXPECT_EQ(run_hierarchical_ranks({.communicator = {}, .nodes = {1, 2, 0}, .hint = std::nullopt},
                                   [](Communicator& comm) {
                                     expect_here(comm.backend_name() == "gloo", comm.backend_name());
                                     comm.barrier();
                                   }),
            "");
}

// With the real proof: these processes do share a node, unless their hints differ. What launchers write into the
// environment says the opposite, once of all and once of each rank.
TEST(HierarchicalGloo, TheProofDecidesAndNoVariable) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(
                3,
                [&](int rank) {
                  for (const bool apart : {false, true}) {
                    const std::string node = apart ? "0" : std::to_string(rank);
                    for (const char* name : {"GROUP_RANK", "NODE_RANK", "SLURM_NODEID", "SLURMD_NODENAME", "HOSTNAME"})
                      setenv(name, node.c_str(), 1);
                    for (const char* name : {"LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"})
                      setenv(name, apart ? std::to_string(rank).c_str() : "0", 1);
                    for (const char* name : {"LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
                                             "OMPI_COMM_WORLD_LOCAL_SIZE"})
                      setenv(name, apart ? "3" : "1", 1);
                    auto store = std::make_shared<TcpStore>(server.address());
                    HierarchicalOptions options;
                    if (apart) options.hint = fmt::format("node {}", rank / 2);
                    const auto comm = make_hierarchical_communicator(make_gloo_communicator(store, rank, 3), options);
                    expect_here(comm->backend_name() == (apart ? "shm+gloo" : "shm"), comm->backend_name());
                    comm->barrier();
                  }
                }),
            "");
}

}  // namespace
}  // namespace phalanx
