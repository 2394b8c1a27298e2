#include "phalanx/comm/testing/backend_suite.h"

#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <array>
#include <iostream>
#include <sstream>
#include <stdexcept>

#include "phalanx/comm/testing/suite_parts.h"

namespace phalanx {
namespace suite {
namespace {

// All ranks; in a large world only two.
std::vector<int> suite_roots(const Communicator& comm) {
  std::vector<int> roots;
  for (int root = 0; root < comm.size(); root += is_small_world(comm) ? 1 : std::max(1, comm.size() - 1))
    roots.push_back(root);
  return roots;
}

void suite_all_reduce(Communicator& comm) {
  for_each_reduction([&](ScalarType type, ReduceOp op) {
    for (std::int64_t count : suite_sizes(comm, type)) {
      at::Tensor x = make_tensor(count, type, [&](std::int64_t i) { return suite_value(op, type, comm.rank(), i); });
      comm.all_reduce(x, {.op = op});
      require_equal(x, make_tensor(count, type, [&](std::int64_t i) { return suite_result(op, type, comm.size(), i); }),
                    label("all_reduce", type, op, count));
    }
  });
}

void suite_reduce(Communicator& comm) {
  for (ScalarType type : {ScalarType::Float, ScalarType::BFloat16, ScalarType::Long}) {
    for (std::int64_t count : suite_sizes(comm, {0, 5, 300'007})) {
      for (int root : suite_roots(comm)) {
        const auto mine = [&](std::int64_t i) { return suite_value(ReduceOp::sum, type, comm.rank(), i); };
        at::Tensor x = make_tensor(count, type, mine);
        comm.reduce(x, {.root = root});
        const auto all = [&](std::int64_t i) { return suite_result(ReduceOp::sum, type, comm.size(), i); };
        require_equal(x, comm.rank() == root ? make_tensor(count, type, all) : make_tensor(count, type, mine),
                      label("reduce", type, ReduceOp::sum, count));
      }
    }
  }
}

void suite_broadcast(Communicator& comm) {
  for (ScalarType type : kTypes) {
    for (std::int64_t count : suite_sizes(comm, {0, 3, 10'000, 900'001})) {
      if (count > 10'000 && type != ScalarType::Float) continue;
      for (int root : suite_roots(comm)) {
        at::Tensor x = make_tensor(count, type, [&](std::int64_t i) { return (i + comm.rank()) % 2; });
        comm.broadcast(x, {.root = root});
        require_equal(x, make_tensor(count, type, [&](std::int64_t i) { return (i + root) % 2; }),
                      label("broadcast", type, ReduceOp::sum, count));
      }
    }
  }
}

// The element counts of the ranks in the uneven forms; some are 0.
std::vector<std::int64_t> uneven_counts(int world, std::int64_t base) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < world; ++r) counts.push_back(r % 3 == 1 ? 0 : base + 13 * r);
  return counts;
}
void suite_all_gather(Communicator& comm) {
  const int n = comm.size();
  for (ScalarType type : {ScalarType::Float, ScalarType::Byte, ScalarType::Half}) {
    for (std::int64_t count : suite_sizes(comm, {0, 6, 200'003})) {
      const at::Tensor expected = make_tensor(count * n, type, [](std::int64_t i) { return i % 120; });
      const at::Tensor mine = expected.narrow(0, comm.rank() * count, count).clone();
      at::Tensor out = at::full({count * n}, 0, expected.options());
      comm.all_gather(out, mine);
      require_equal(out, expected, label("all_gather", type, ReduceOp::sum, count));
      out.zero_();
      at::Tensor slice = out.narrow(0, comm.rank() * count, count);
      slice.copy_(mine);
      comm.all_gather(out, slice);
      require_equal(out, expected, label("all_gather in place", type, ReduceOp::sum, count));
    }
  }
  for (std::int64_t base : {std::int64_t{1}, std::int64_t{150'000}}) {
    const auto counts = uneven_counts(n, base);
    const at::Tensor expected = make_tensor(total_of(counts), ScalarType::Float, [](std::int64_t i) { return i; });
    at::Tensor out = at::full({total_of(counts)}, -1.0F);
    const std::int64_t own = counts[static_cast<std::size_t>(comm.rank())];
    comm.all_gather_uneven(out, expected.narrow(0, begin_of(counts, comm.rank()), own).clone(), counts);
    require_equal(out, expected, fmt::format("all_gather_uneven from {}", base));
  }
}

void suite_reduce_scatter(Communicator& comm) {
  const int n = comm.size();
  for (ScalarType type : {ScalarType::Float, ScalarType::BFloat16, ScalarType::Int}) {
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
      for (std::int64_t count : suite_sizes(comm, {0, 5, 200'003})) {
        const at::Tensor in =
            make_tensor(count * n, type, [&](std::int64_t i) { return suite_value(op, type, comm.rank(), i); });
        const at::Tensor expected = make_tensor(
            count, type, [&](std::int64_t i) { return suite_result(op, type, n, i + comm.rank() * count); });
        at::Tensor out = at::full({count}, 0, in.options());
        comm.reduce_scatter(out, in.clone(), {.op = op});
        require_equal(out, expected, label("reduce_scatter", type, op, count));
        at::Tensor whole = in.clone();
        at::Tensor slice = whole.narrow(0, comm.rank() * count, count);
        comm.reduce_scatter(slice, whole, {.op = op});
        require_equal(slice, expected, label("reduce_scatter in place", type, op, count));
      }
    }
  }
  const auto counts = uneven_counts(n, 90'000);
  const at::Tensor in = make_tensor(total_of(counts), ScalarType::Float, [&](std::int64_t i) {
    return suite_value(ReduceOp::sum, ScalarType::Float, comm.rank(), i);
  });
  const std::int64_t own = counts[static_cast<std::size_t>(comm.rank())];
  at::Tensor out = at::full({own}, -1.0F);
  comm.reduce_scatter_uneven(out, in, counts);
  require_equal(out,
                make_tensor(own, ScalarType::Float,
                            [&](std::int64_t i) {
                              return suite_result(ReduceOp::sum, ScalarType::Float, n,
                                                  i + begin_of(counts, comm.rank()));
                            }),
                "reduce_scatter_uneven");
}

void suite_gather_scatter(Communicator& comm) {
  const int n = comm.size();
  for (std::int64_t count : suite_sizes(comm, {0, 9, 250'000})) {
    const at::Tensor whole = make_tensor(count * n, ScalarType::Float, [](std::int64_t i) { return i; });
    const at::Tensor mine = whole.narrow(0, comm.rank() * count, count).clone();
    for (int root : suite_roots(comm)) {
      at::Tensor out;
      if (comm.rank() == root) out = at::full({count * n}, -1.0F);
      comm.gather(out, mine, {.root = root});
      if (comm.rank() == root) require_equal(out, whole, fmt::format("gather [{}] root {}", count, root));
      at::Tensor part = at::full({count}, -1.0F);
      comm.scatter(part, comm.rank() == root ? whole : at::Tensor(), {.root = root});
      require_equal(part, mine, fmt::format("scatter [{}] root {}", count, root));
    }
  }
}

void suite_all_to_all(Communicator& comm) {
  const int n = comm.size();
  for (std::int64_t count : {std::int64_t{0}, std::int64_t{3}, std::int64_t{120'001}}) {
    const auto value = [&](int from, int to, std::int64_t i) {
      return (from * 10 + to) * 2.0 + static_cast<double>(i % 7);
    };
    const at::Tensor in = make_tensor(count * n, ScalarType::Float, [&](std::int64_t i) {
      return value(comm.rank(), static_cast<int>(i / std::max<std::int64_t>(count, 1)),
                   i % std::max<std::int64_t>(count, 1));
    });
    at::Tensor out = at::full({count * n}, -1.0F);
    comm.all_to_all(out, in);
    require_equal(out,
                  make_tensor(count * n, ScalarType::Float,
                              [&](std::int64_t i) {
                                return value(static_cast<int>(i / std::max<std::int64_t>(count, 1)), comm.rank(),
                                             i % std::max<std::int64_t>(count, 1));
                              }),
                  fmt::format("all_to_all [{}]", count));
  }
  for (std::int64_t scale : {std::int64_t{1}, std::int64_t{60'000}}) {
    const auto count = [&](int from, int to) { return (from + 2 * to) % 4 * scale; };
    std::vector<std::int64_t> sends;
    std::vector<std::int64_t> receives;
    for (int r = 0; r < n; ++r) {
      sends.push_back(count(comm.rank(), r));
      receives.push_back(count(r, comm.rank()));
    }
    at::Tensor in = at::full({total_of(sends)}, 0.0F);
    at::Tensor expected = at::full({total_of(receives)}, 0.0F);
    for (int r = 0; r < n; ++r) {
      in.narrow(0, begin_of(sends, r), count(comm.rank(), r)).fill_(comm.rank() * 100 + r);
      expected.narrow(0, begin_of(receives, r), count(r, comm.rank())).fill_(r * 100 + comm.rank());
    }
    at::Tensor out = at::full({total_of(receives)}, -1.0F);
    comm.all_to_all_uneven(out, in, receives, sends);
    require_equal(out, expected, fmt::format("all_to_all_uneven x{}", scale));
  }
}

void suite_p2p(Communicator& comm) {
  const int n = comm.size();
  const int next = (comm.rank() + 1) % n;
  const int before = (comm.rank() + n - 1) % n;
  // A ring, with all ranks at once. The last size is larger than a channel.
  for (std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1000}, std::int64_t{500'000}}) {
    at::Tensor in = at::full({count}, -1.0F);
    comm.batch_isend_irecv({{false, in, before, 5}, {true, at::full({count}, comm.rank() * 1.0F), next, 5}});
    require_equal(in, at::full({count}, before * 1.0F), fmt::format("ring [{}]", count));
  }
  if (n == 1) return;
  // One message after the other, in both directions, with tags out of order.
  if (comm.rank() == 0) {
    comm.send(at::full({10}, 1.0F), 1, {.tag = 1});
    Work late = comm.send(at::full({100'000}, 2.0F), 1, {.tag = 2, .async = true});
    Work early = comm.send(at::full({3}, 3.0F), 1, {.tag = 3, .async = true});
    at::Tensor back = at::full({4}, 0.0F);
    comm.recv(back, 1);
    require_equal(back, at::full({4}, 9.0F), "recv from rank 1");
    late.wait();
    early.wait();
  } else if (comm.rank() == 1) {
    at::Tensor first = at::full({10}, 0.0F);
    at::Tensor second = at::full({100'000}, 0.0F);
    at::Tensor third = at::full({3}, 0.0F);
    comm.recv(first, 0, {.tag = 1});
    if (matches_in_order(comm)) comm.recv(second, 0, {.tag = 2});
    comm.recv(third, 0, {.tag = 3});
    if (!matches_in_order(comm)) comm.recv(second, 0, {.tag = 2});
    comm.send(at::full({4}, 9.0F), 0);
    require_equal(first, at::full({10}, 1.0F), "tag 1");
    require_equal(second, at::full({100'000}, 2.0F), "tag 2");
    require_equal(third, at::full({3}, 3.0F), "tag 3");
  }
  comm.barrier();
}

constexpr std::array kSuite{SuiteCase{"all_reduce", suite_all_reduce},
                            SuiteCase{"reduce", suite_reduce},
                            SuiteCase{"broadcast", suite_broadcast},
                            SuiteCase{"all_gather", suite_all_gather},
                            SuiteCase{"reduce_scatter", suite_reduce_scatter},
                            SuiteCase{"gather_scatter", suite_gather_scatter},
                            SuiteCase{"all_to_all", suite_all_to_all},
                            SuiteCase{"p2p", suite_p2p},
                            SuiteCase{"every_type", suite_every_type},
                            SuiteCase{"every_type_async", suite_every_type_async},
                            SuiteCase{"mixed_batch", suite_mixed_batch},
                            SuiteCase{"nothing", suite_nothing},
                            SuiteCase{"bytes", suite_bytes},
                            SuiteCase{"split", suite_split},
                            SuiteCase{"async", suite_async},
                            SuiteCase{"opposite_order", suite_opposite_order},
                            SuiteCase{"same_bits", suite_same_bits},
                            SuiteCase{"rank_order", suite_rank_order, true},
                            SuiteCase{"soak", suite_soak},
                            SuiteCase{"non_contiguous", suite_non_contiguous},
                            SuiteCase{"refusals", suite_refusals}};

}  // namespace
}  // namespace suite

std::span<const SuiteCase> backend_suite() { return suite::kSuite; }
void run_backend_suite(Communicator& comm, const std::function<bool(const SuiteCase&)>& is_wanted) {
  for (const SuiteCase& test : backend_suite()) {
    if (is_wanted && !is_wanted(test)) continue;
    try {
      test.run(comm);
    } catch (const std::exception& error) {
      throw std::runtime_error(fmt::format("{}: {}", test.name, error.what()));
    }
  }
}

std::string again_if_late(const std::function<std::string()>& run) {
  constexpr int kTries = 3;
  for (int tries = 1;; ++tries) {
    std::string failures = run();
    std::istringstream lines(failures);
    bool is_late = !failures.empty();
    for (std::string line; std::getline(lines, line);) is_late &= line.find("late: ") != std::string::npos;
    if (!is_late || tries == kTries) return failures;
    std::cerr << "tried again, since this was late:\n" << failures << "\n";
  }
}

}  // namespace phalanx
