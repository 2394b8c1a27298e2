// Which transport carries how many bytes: what a hierarchical backend says of it (comm_volume), in closed forms, and
// held against what the backends inside and between the nodes were given, counted there.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/hierarchical/hierarchical_backend.h"
#include "phalanx/comm/hierarchical/node_layout.h"
#include "phalanx/comm/testing/counting_backend.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/comm/testing/hierarchical_ranks.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using c10::ScalarType;

void require_that_bytes(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

// --- in closed forms

struct Moved {
  std::int64_t intra_node = 0, inter_node = 0;
};
// Of all ranks together, by body.
template <class Body>
Moved moved_by(Communicator& comm, Communicator& counter, Body body) {
  const CommVolume before = *comm_volume(*comm.backend());
  body();
  const CommVolume after = *comm_volume(*comm.backend());
  at::Tensor sum = at::zeros({2}, at::TensorOptions().dtype(ScalarType::Long));
  sum.mutable_data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(after.intra_node - before.intra_node);
  sum.mutable_data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(after.inter_node - before.inter_node);
  counter.all_reduce(sum);
  return {sum.const_data_ptr<std::int64_t>()[0], sum.const_data_ptr<std::int64_t>()[1]};
}

void require_moved(const Moved& moved, std::int64_t intra_node, std::int64_t inter_node, const std::string& what) {
  require_that_bytes(moved.intra_node == intra_node && moved.inter_node == inter_node,
                     fmt::format("{}: {} bytes inside, {} between; expected {} and {}", what, moved.intra_node,
                                 moved.inter_node, intra_node, inter_node));
}

TEST(HierarchicalGloo, EachByteCrossesTheWireOnce) {
  EXPECT_EQ(
      run_hierarchical_ranks(
          eager_hierarchical_options({0, 0, 1, 1, 1}),
          [](Communicator& comm) {
            const auto counter = comm.split(0, comm.rank(), "counter");
            const int n = comm.size();
            constexpr std::int64_t kCount = 100'000, kBytes = 4 * kCount;
            const auto tensor = [](std::int64_t count) { return at::full({count}, 1.0F); };
            const auto check = [&](const char* what, std::int64_t intra_node, std::int64_t inter_node, auto body) {
              require_moved(moved_by(comm, *counter, body), intra_node, inter_node, what);
            };
            // Passed on inside by one rank of each node; one copy to the other node.
            check("broadcast", 2 * kBytes, kBytes, [&] { comm.broadcast(tensor(kCount), {.root = 3}); });
            check("all_gather", 2 * n * kBytes, n * kBytes,
                  [&] { comm.all_gather(tensor(kCount * n), tensor(kCount)); });
            // Up to the other node, and down again; every rank brings its input, every node deals the
            // result.
            check("all_reduce", (n + 2) * kBytes, 2 * kBytes, [&] { comm.all_reduce(tensor(kCount)); });
            check("reduce", (n + 1) * kBytes, kBytes, [&] { comm.reduce(tensor(kCount), {.root = 4}); });
            check("reduce to node 0", (n + 1) * kBytes, 2 * kBytes, [&] { comm.reduce(tensor(kCount), {.root = 1}); });
            // Two fifths of the result are node 0's.
            check("reduce_scatter", (n * n + n) * kBytes, (n + 2) * kBytes,
                  [&] { comm.reduce_scatter(tensor(kCount), tensor(kCount * n)); });
            // Pairs of one node: 2 * 1 and 3 * 2; of two: 2 * 2 * 3.
            check("all_to_all", 8 * kBytes, 12 * kBytes,
                  [&] { comm.all_to_all(tensor(kCount * n), tensor(kCount * n)); });
            check("gather", 2 * kBytes, 2 * kBytes, [&] {
              comm.gather(comm.rank() == 2 ? tensor(kCount * n) : at::Tensor(), tensor(kCount), {.root = 2});
            });
            check("scatter", 1 * kBytes, 3 * kBytes, [&] {
              comm.scatter(tensor(kCount), comm.rank() == 0 ? tensor(kCount * n) : at::Tensor(), {.root = 0});
            });
            const auto message = [&](int from, int to) {
              if (comm.rank() == from) comm.send(tensor(kCount), to);
              if (comm.rank() == to) comm.recv(tensor(kCount), from);
            };
            check("send inside", kBytes, 0, [&] { message(4, 2); });
            check("send between", 0, kBytes, [&] { message(1, 4); });
            check("batch", 5 * kBytes - 2 * kBytes, 2 * kBytes, [&] {
              comm.batch_isend_irecv({{true, tensor(kCount), (comm.rank() + 1) % n, 1},
                                      {false, tensor(kCount), (comm.rank() + n - 1) % n, 1}});
            });
          }),
      "");
}

TEST(HierarchicalGloo, WhatIsSmallOrNotInOrderIsTheFlatBackends) {
  const auto all_reduce = [](Communicator& comm) {
    const auto counter = comm.split(0, comm.rank(), "counter");
    require_moved(moved_by(comm, *counter, [&] { comm.all_reduce(at::full({1000}, 1.0F)); }), 0, 4000 * comm.size(),
                  "all_reduce");
  };
  EXPECT_EQ(run_hierarchical_ranks({.communicator = {}, .nodes = {0, 0, 1, 1}, .hint = std::nullopt}, all_reduce), "");
  EXPECT_EQ(run_hierarchical_ranks(eager_hierarchical_options({0, 1, 1, 0}), all_reduce), "");
}

// --- as counted below

struct CountedHierarchy {
  std::shared_ptr<CountingBackend> intra_node, inter_node;  // inside: null where a rank is alone
  std::shared_ptr<Communicator> comm;
};

// As make_hierarchical_communicator(), with a counter before each of the two backends.
CountedHierarchy make_counted_hierarchy(const std::shared_ptr<Communicator>& flat, const HierarchicalOptions& options) {
  const NodeLayout layout(options.nodes);
  const int node = layout.node_of(flat->rank());
  const bool is_alone = layout.members(node).size() == 1;
  CountedHierarchy made;
  made.inter_node = std::make_shared<CountingBackend>(flat->backend());
  if (auto intra_node = make_shm_part(is_alone ? std::vector<int>() : layout.members(node),
                                      is_alone ? -1 : layout.local_rank_of(flat->rank()),
                                      [&](const std::string& value) { return flat->all_gather_bytes(value); }))
    made.intra_node = std::make_shared<CountingBackend>(std::move(intra_node));
  made.comm = std::make_shared<Communicator>(
      std::make_shared<HierarchicalBackend>(made.inter_node, made.intra_node, layout,
                                            HierarchicalBackend::Tuning{.smallest_bytes = options.smallest_bytes,
                                                                        .by_estimate = options.by_estimate,
                                                                        .piece_bytes = options.piece_bytes}),
      CommunicatorOptions{});
  return made;
}

// Every verb once.
void compare_with_counts(const CountedHierarchy& hierarchical, std::int64_t count, ScalarType type) {
  Communicator& comm = *hierarchical.comm;
  const int n = comm.size();
  const int me = comm.rank();
  const auto tensor = [&](std::int64_t elements) { return at::full({elements}, 1, at::TensorOptions().dtype(type)); };
  const auto said = [&] { return *comm_volume(*comm.backend()); };
  const auto counted = [&] {
    return CommVolume{hierarchical.intra_node ? hierarchical.intra_node->bytes() : 0, hierarchical.inter_node->bytes()};
  };
  CommVolume of_all;
  const auto check = [&](const char* verb, const auto& body) {
    const CommVolume said_before = said(), before = counted();
    body();
    const CommVolume after = counted();
    const std::uint64_t intra_node = after.intra_node - before.intra_node,
                        inter_node = after.inter_node - before.inter_node;
    require_that_bytes(said().intra_node - said_before.intra_node == intra_node &&
                           said().inter_node - said_before.inter_node == inter_node,
                       fmt::format("{} {} [{}]: said to be {} bytes inside and {} between; counted: {} and {}", verb,
                                   c10::toString(type), count, said().intra_node - said_before.intra_node,
                                   said().inter_node - said_before.inter_node, intra_node, inter_node));
    of_all.intra_node += intra_node;
    of_all.inter_node += inter_node;
  };
  std::vector<std::int64_t> counts;
  std::vector<std::int64_t> sends;
  std::vector<std::int64_t> receives;
  for (int r = 0; r < n; ++r) {
    counts.push_back(r == 1 ? 0 : count + r);
    sends.push_back((me + 2 * r) % 3 * count);
    receives.push_back((r + 2 * me) % 3 * count);
  }
  std::int64_t total = 0, sent = 0, received = 0;
  for (int r = 0; r < n; ++r) {
    total += counts[static_cast<std::size_t>(r)];
    sent += sends[static_cast<std::size_t>(r)];
    received += receives[static_cast<std::size_t>(r)];
  }
  const std::int64_t own = counts[static_cast<std::size_t>(me)];
  for (const int root : {0, n - 1}) {
    const auto at_root = [&] { return me == root ? tensor(count * n) : at::Tensor(); };
    check("broadcast", [&] { comm.broadcast(tensor(count), {.root = root}); });
    check("reduce", [&] { comm.reduce(tensor(count), {.root = root}); });
    check("gather", [&] { comm.gather(at_root(), tensor(count), {.root = root}); });
    check("scatter", [&] { comm.scatter(tensor(count), at_root(), {.root = root}); });
  }
  check("all_reduce", [&] { comm.all_reduce(tensor(count)); });
  check("all_gather", [&] { comm.all_gather(tensor(count * n), tensor(count)); });
  check("uneven all_gather", [&] { comm.all_gather_uneven(tensor(total), tensor(own), counts); });
  check("reduce_scatter", [&] { comm.reduce_scatter(tensor(count), tensor(count * n)); });
  check("uneven reduce_scatter", [&] { comm.reduce_scatter_uneven(tensor(own), tensor(total), counts); });
  check("all_to_all", [&] { comm.all_to_all(tensor(count * n), tensor(count * n)); });
  check("uneven all_to_all", [&] { comm.all_to_all_uneven(tensor(received), tensor(sent), receives, sends); });
  check("barrier", [&] { comm.barrier(); });
  for (const int other : {1, n - 1}) {  // inside, and between, in most placements
    check("send and recv", [&] {
      if (me == 0) comm.send(tensor(count), other);
      if (me == other) comm.recv(tensor(count), 0);
    });
  }
  check("batch", [&] {
    comm.batch_isend_irecv({{true, tensor(count), (me + 1) % n, 1}, {false, tensor(count), (me + n - 1) % n, 1}});
  });
  check("byte objects", [&] { comm.all_gather_bytes(std::string(static_cast<std::size_t>(count + me), 'x')); });
  require_that_bytes(of_all.inter_node > 0, "nothing was counted between the nodes");
  require_that_bytes(of_all.intra_node > 0 || !hierarchical.intra_node, "nothing was counted inside");
}

TEST(HierarchicalGloo, WhatTheBackendsWereGivenIsWhatIsSaid) {
  HierarchicalOptions as_used;
  as_used.nodes = {0, 0, 1, 1};
  const std::vector<HierarchicalOptions> all{eager_hierarchical_options({0, 0, 1, 1}),
                                             eager_hierarchical_options({0, 0, 0, 1}),
                                             eager_hierarchical_options({0, 1, 1, 0}), as_used};
  for (const HierarchicalOptions& options : all) {
    const int world = static_cast<int>(options.nodes.size());
    TcpStoreServer server;
    EXPECT_EQ(run_forked_ranks(world,
                               [&](int rank) {
                                 const auto hierarchical = make_counted_hierarchy(
                                     make_gloo_communicator(std::make_shared<TcpStore>(server.address()), rank, world),
                                     options);
                                 for (const std::int64_t count : {std::int64_t{5}, std::int64_t{90'001}})
                                   for (const ScalarType type : {ScalarType::Float, ScalarType::BFloat16})
                                     compare_with_counts(hierarchical, count, type);
                               }),
              "");
  }
}

}  // namespace
}  // namespace phalanx
