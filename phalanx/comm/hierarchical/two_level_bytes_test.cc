// Which transport carries how many bytes: what two levels say of it (transport_bytes), in closed forms, and held
// against what the backends inside and between the machines were given, counted there.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/hierarchical/two_level.h"
#include "phalanx/comm/hierarchical/two_level_backend.h"
#include "phalanx/comm/hierarchical/two_level_layout.h"
#include "phalanx/comm/testing/counting_backend.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/comm/testing/two_level_ranks.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using c10::ScalarType;

void require_that_bytes(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

// --- in closed forms

struct Moved {
  std::int64_t inside = 0, between = 0;
};
// Of all ranks together, by body.
template <class Body>
Moved moved_by(Communicator& comm, Communicator& counter, Body body) {
  const TransportBytes before = *transport_bytes(*comm.backend());
  body();
  const TransportBytes after = *transport_bytes(*comm.backend());
  at::Tensor sum = at::zeros({2}, at::TensorOptions().dtype(ScalarType::Long));
  sum.mutable_data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(after.inside - before.inside);
  sum.mutable_data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(after.between - before.between);
  counter.all_reduce(sum);
  return {sum.const_data_ptr<std::int64_t>()[0], sum.const_data_ptr<std::int64_t>()[1]};
}

void require_moved(const Moved& moved, std::int64_t inside, std::int64_t between, const std::string& what) {
  require_that_bytes(moved.inside == inside && moved.between == between,
                     fmt::format("{}: {} bytes inside, {} between; expected {} and {}", what, moved.inside,
                                 moved.between, inside, between));
}

TEST(TwoLevelGloo, EachByteCrossesTheWireOnce) {
  EXPECT_EQ(run_two_level_ranks(
                eager_two_levels({0, 0, 1, 1, 1}),
                [](Communicator& comm) {
                  const auto counter = comm.split(0, comm.rank(), "counter");
                  const int n = comm.size();
                  constexpr std::int64_t kCount = 100'000, kBytes = 4 * kCount;
                  const auto tensor = [](std::int64_t count) { return at::full({count}, 1.0F); };
                  const auto check = [&](const char* what, std::int64_t inside, std::int64_t between, auto body) {
                    require_moved(moved_by(comm, *counter, body), inside, between, what);
                  };
                  // Passed on inside by one rank of each machine; one copy to the other machine.
                  check("broadcast", 2 * kBytes, kBytes, [&] { comm.broadcast(tensor(kCount), {.root = 3}); });
                  check("all_gather", 2 * n * kBytes, n * kBytes,
                        [&] { comm.all_gather(tensor(kCount * n), tensor(kCount)); });
                  // Up to the other machine, and down again; every rank brings its input, every machine deals the
                  // result.
                  check("all_reduce", (n + 2) * kBytes, 2 * kBytes, [&] { comm.all_reduce(tensor(kCount)); });
                  check("reduce", (n + 1) * kBytes, kBytes, [&] { comm.reduce(tensor(kCount), {.root = 4}); });
                  check("reduce to machine 0", (n + 1) * kBytes, 2 * kBytes,
                        [&] { comm.reduce(tensor(kCount), {.root = 1}); });
                  // Two fifths of the result are machine 0's.
                  check("reduce_scatter", (n * n + n) * kBytes, (n + 2) * kBytes,
                        [&] { comm.reduce_scatter(tensor(kCount), tensor(kCount * n)); });
                  // Pairs of one machine: 2 * 1 and 3 * 2; of two: 2 * 2 * 3.
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
                    comm.batch_peer_to_peer({{true, tensor(kCount), (comm.rank() + 1) % n, 1},
                                             {false, tensor(kCount), (comm.rank() + n - 1) % n, 1}});
                  });
                }),
            "");
}

TEST(TwoLevelGloo, WhatIsSmallOrNotInOrderIsTheFlatBackends) {
  const auto all_reduce = [](Communicator& comm) {
    const auto counter = comm.split(0, comm.rank(), "counter");
    require_moved(moved_by(comm, *counter, [&] { comm.all_reduce(at::full({1000}, 1.0F)); }), 0, 4000 * comm.size(),
                  "all_reduce");
  };
  EXPECT_EQ(run_two_level_ranks({.communicator = {}, .machines = {0, 0, 1, 1}, .hint = std::nullopt}, all_reduce), "");
  EXPECT_EQ(run_two_level_ranks(eager_two_levels({0, 1, 1, 0}), all_reduce), "");
}

// --- as counted below

struct CountedLevels {
  std::shared_ptr<CountingBackend> inside, between;  // inside: null where a rank is alone
  std::shared_ptr<Communicator> comm;
};

// As make_two_level_communicator(), with a counter before each of the two backends.
CountedLevels make_counted_levels(const std::shared_ptr<Communicator>& flat, const TwoLevelOptions& options) {
  const MachineLayout layout(options.machines);
  const int machine = layout.machine_of(flat->rank());
  const bool is_alone = layout.members(machine).size() == 1;
  CountedLevels made;
  made.between = std::make_shared<CountingBackend>(flat->backend());
  if (auto inner = make_shm_part(is_alone ? std::vector<int>() : layout.members(machine),
                                 is_alone ? -1 : layout.place_of(flat->rank()),
                                 [&](const std::string& value) { return flat->all_gather_bytes(value); }))
    made.inside = std::make_shared<CountingBackend>(std::move(inner));
  made.comm = std::make_shared<Communicator>(
      std::make_shared<TwoLevelBackend>(made.between, made.inside, layout,
                                        TwoLevelBackend::Tuning{.smallest_bytes = options.smallest_bytes,
                                                                .by_estimate = options.by_estimate,
                                                                .piece_bytes = options.piece_bytes}),
      CommunicatorOptions{});
  return made;
}

// Every verb once.
void compare_with_counts(const CountedLevels& levels, std::int64_t count, ScalarType type) {
  Communicator& comm = *levels.comm;
  const int n = comm.size();
  const int me = comm.rank();
  const auto tensor = [&](std::int64_t elements) { return at::full({elements}, 1, at::TensorOptions().dtype(type)); };
  const auto said = [&] { return *transport_bytes(*comm.backend()); };
  const auto counted = [&] {
    return TransportBytes{levels.inside ? levels.inside->bytes() : 0, levels.between->bytes()};
  };
  TransportBytes of_all;
  const auto check = [&](const char* verb, const auto& body) {
    const TransportBytes said_before = said(), before = counted();
    body();
    const TransportBytes after = counted();
    const std::uint64_t inside = after.inside - before.inside, between = after.between - before.between;
    require_that_bytes(said().inside - said_before.inside == inside && said().between - said_before.between == between,
                       fmt::format("{} {} [{}]: said to be {} bytes inside and {} between; counted: {} and {}", verb,
                                   c10::toString(type), count, said().inside - said_before.inside,
                                   said().between - said_before.between, inside, between));
    of_all.inside += inside;
    of_all.between += between;
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
    comm.batch_peer_to_peer({{true, tensor(count), (me + 1) % n, 1}, {false, tensor(count), (me + n - 1) % n, 1}});
  });
  check("byte objects", [&] { comm.all_gather_bytes(std::string(static_cast<std::size_t>(count + me), 'x')); });
  require_that_bytes(of_all.between > 0, "nothing was counted between the machines");
  require_that_bytes(of_all.inside > 0 || !levels.inside, "nothing was counted inside");
}

TEST(TwoLevelGloo, WhatTheBackendsWereGivenIsWhatIsSaid) {
  TwoLevelOptions as_used;
  as_used.machines = {0, 0, 1, 1};
  const std::vector<TwoLevelOptions> all{eager_two_levels({0, 0, 1, 1}), eager_two_levels({0, 0, 0, 1}),
                                         eager_two_levels({0, 1, 1, 0}), as_used};
  for (const TwoLevelOptions& options : all) {
    const int world = static_cast<int>(options.machines.size());
    TcpStoreServer server;
    EXPECT_EQ(run_forked_ranks(world,
                               [&](int rank) {
                                 const auto levels = make_counted_levels(
                                     make_gloo_communicator(std::make_shared<TcpStore>(server.address()), rank, world),
                                     options);
                                 for (const std::int64_t count : {std::int64_t{5}, std::int64_t{90'001}})
                                   for (const ScalarType type : {ScalarType::Float, ScalarType::BFloat16})
                                     compare_with_counts(levels, count, type);
                               }),
              "");
  }
}

}  // namespace
}  // namespace phalanx
