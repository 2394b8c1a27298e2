#include "phalanx/comm/backend_suite.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <iostream>
#include <sstream>
#include <stdexcept>

#include "phalanx/base/error.h"
#include "phalanx/comm/fault_world.h"

namespace phalanx {
namespace {

using c10::ScalarType;

constexpr std::array kSuiteTypes{ScalarType::Float, ScalarType::Double, ScalarType::Half, ScalarType::BFloat16,
                                 ScalarType::Int,   ScalarType::Long,   ScalarType::Byte, ScalarType::Bool};
constexpr std::array kSuiteOps{ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::product};

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

bool is_integral(ScalarType type) {
  return type == ScalarType::Int || type == ScalarType::Long || type == ScalarType::Byte || type == ScalarType::Bool;
}

// value(i) as a tensor of the type.
template <class Value>
at::Tensor make_tensor(std::int64_t count, ScalarType type, Value value) {
  at::Tensor whole = at::empty({count}, at::TensorOptions().dtype(ScalarType::Double));
  auto* data = whole.data_ptr<double>();
  for (std::int64_t i = 0; i < count; ++i) data[i] = static_cast<double>(value(i));
  // Through int64, so that what does not fit in a byte wraps.
  return is_integral(type) && type != ScalarType::Bool ? whole.to(ScalarType::Long).to(type) : whole.to(type);
}

void require_equal(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  if (at::equal(found, expected)) return;
  const at::Tensor a = found.to(ScalarType::Double).contiguous();
  const at::Tensor b = expected.to(ScalarType::Double).contiguous();
  for (std::int64_t i = 0; i < a.numel(); ++i)
    if (!(a.data_ptr<double>()[i] == b.data_ptr<double>()[i]))
      throw std::runtime_error(fmt::format("{}: element {} of {} is {}, expected {}", what, i, a.numel(),
                                           a.data_ptr<double>()[i], b.data_ptr<double>()[i]));
  throw std::runtime_error(what + ": shapes or types differ");
}

// What rank r brings for element i: small, so that every sum and product is exact in every type.
double suite_value(ReduceOp op, ScalarType type, int rank, std::int64_t i) {
  if (type == ScalarType::Bool) return (i + rank) % 3 == 0 ? 1 : 0;
  if (op == ReduceOp::product) return static_cast<double>((i + rank) % 2 + 1);
  const auto value = static_cast<double>((i * 7 + rank * 3) % 11 + 1);
  return is_integral(type) ? value : value - 5;
}

double suite_result(ReduceOp op, ScalarType type, int world, std::int64_t i) {
  double result = suite_value(op, type, 0, i);
  for (int r = 1; r < world; ++r) {
    const double next = suite_value(op, type, r, i);
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg:
        result = type == ScalarType::Bool ? std::max(result, next) : result + next;
        break;
      case ReduceOp::min:
        result = std::min(result, next);
        break;
      case ReduceOp::max:
        result = std::max(result, next);
        break;
      case ReduceOp::product:
        result *= next;
        break;
    }
  }
  if (op == ReduceOp::avg)
    result = type == ScalarType::Double ? result / world : static_cast<float>(result) / static_cast<float>(world);
  return result;
}

std::string label(const char* verb, ScalarType type, ReduceOp op, std::int64_t count) {
  return fmt::format("{} {} {} [{}]", verb, c10::toString(type), name_of(op), count);
}

// TCP, and streams that are threads.
bool is_slow(const Communicator& comm) {
  return comm.backend_name().ends_with("gloo") || comm.backend_name() == "nccl";
}
// Messages between two ranks match in the order of issue, whatever their tags.
bool matches_in_order(const Communicator& comm) { return comm.backend_name().starts_with("nccl"); }

// Large worlds are for what depends on their size: the data are large, and the repeats many, only where the ranks have
// cores, and over what is slow only between two.
bool is_small_world(const Communicator& comm) { return comm.size() <= (is_slow(comm) ? 2 : 4); }

// Small, above the one-shot limit, and (for float32) more than all slots of a segment hold.
std::vector<std::int64_t> suite_sizes(const Communicator& comm, ScalarType type) {
  if (!is_small_world(comm))
    return type == ScalarType::Float ? std::vector<std::int64_t>{0, 7, 70'001} : std::vector<std::int64_t>{129};
  if (is_slow(comm) && type != ScalarType::Float) return {20'011};
  if (type == ScalarType::Float) return {0, 1, 7, 1000, 4097, 70'001, 1'000'003};
  return {0, 1, 129, 20'011};
}

// Sizes of the other verbs: the last is large.
std::vector<std::int64_t> suite_sizes(const Communicator& comm, std::vector<std::int64_t> sizes) {
  if (!is_small_world(comm)) sizes.back() = sizes.back() / 4 + 3;
  return sizes;
}

// All ranks, or two of a large world.
std::vector<int> suite_roots(const Communicator& comm) {
  std::vector<int> roots;
  for (int root = 0; root < comm.size(); root += is_small_world(comm) ? 1 : std::max(1, comm.size() - 1))
    roots.push_back(root);
  return roots;
}

template <class Body>
void for_each_reduction(Body body) {
  for (ScalarType type : kSuiteTypes)
    for (ReduceOp op : kSuiteOps)
      if (op != ReduceOp::avg || !is_integral(type)) body(type, op);
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
  for (ScalarType type : kSuiteTypes) {
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

// Elements of rank r in the uneven forms: some give nothing.
std::vector<std::int64_t> uneven_counts(int world, std::int64_t base) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < world; ++r) counts.push_back(r % 3 == 1 ? 0 : base + 13 * r);
  return counts;
}
std::int64_t begin_of(const std::vector<std::int64_t>& counts, int rank) {
  std::int64_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += counts[static_cast<std::size_t>(r)];
  return begin;
}
std::int64_t total_of(const std::vector<std::int64_t>& counts) {
  return begin_of(counts, static_cast<int>(counts.size()));
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

void suite_peer_to_peer(Communicator& comm) {
  const int n = comm.size();
  const int next = (comm.rank() + 1) % n;
  const int before = (comm.rank() + n - 1) % n;
  // A ring, everyone at once; the last size is larger than a channel.
  for (std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1000}, std::int64_t{500'000}}) {
    at::Tensor in = at::full({count}, -1.0F);
    comm.batch_peer_to_peer({{false, in, before, 5}, {true, at::full({count}, comm.rank() * 1.0F), next, 5}});
    require_equal(in, at::full({count}, before * 1.0F), fmt::format("ring [{}]", count));
  }
  if (n == 1) return;
  // One after the other, both directions; tags out of order.
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

void suite_bytes(Communicator& comm) {
  const auto text_of = [](int rank) {
    return std::string(static_cast<std::size_t>(rank) * 3, static_cast<char>('a' + rank));
  };
  const std::vector<std::string> all = comm.all_gather_bytes(text_of(comm.rank()));
  for (int r = 0; r < comm.size(); ++r) require(all.at(static_cast<std::size_t>(r)) == text_of(r), "all_gather_bytes");
  const int root = comm.size() - 1;
  require(comm.broadcast_bytes(comm.rank() == root ? "from the root" : "", root) == "from the root", "broadcast_bytes");
  const std::vector<std::string> gathered = comm.gather_bytes(text_of(comm.rank()), root);
  require(gathered.size() == (comm.rank() == root ? all.size() : 0), "gather_bytes: size");
  for (std::size_t r = 0; r < gathered.size(); ++r)
    require(gathered[r] == text_of(static_cast<int>(r)), "gather_bytes");
  std::vector<std::string> values;
  if (comm.rank() == root)
    for (int r = 0; r < comm.size(); ++r) values.push_back(text_of(r));
  require(comm.scatter_bytes(values, root) == text_of(comm.rank()), "scatter_bytes");
}

void suite_split(Communicator& comm) {
  // Odd and even ranks, in reverse order.
  auto half = comm.split(comm.rank() % 2, -comm.rank(), "half");
  const int size = (comm.size() + 1 - comm.rank() % 2) / 2;
  require(half->size() == size && half->rank() == size - 1 - comm.rank() / 2, "split: rank and size");
  at::Tensor sum = at::full({70'000}, comm.rank() * 1.0F);
  half->all_reduce(sum);
  float expected = 0;
  for (int r = comm.rank() % 2; r < comm.size(); r += 2) expected += static_cast<float>(r);
  require_equal(sum, at::full({70'000}, expected), "all_reduce of a half");
  // The last rank in no group; the new group outlives the one it came from.
  auto most = comm.split(comm.rank() == comm.size() - 1 ? -1 : 0, comm.rank());
  require((most == nullptr) == (comm.rank() == comm.size() - 1), "split with a negative colour");
  auto nested = half->split(0, half->rank());
  half.reset();
  at::Tensor one = at::full({1}, 1.0F);
  nested->all_reduce(one);
  require_equal(one, at::full({1}, static_cast<float>(size)), "a group that outlives its parent");
}

void suite_async(Communicator& comm) {
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int k = 0; k < 20; ++k) {
    tensors.push_back(at::full({k * 3000 + 1}, static_cast<float>(comm.rank() + k)));
    works.push_back(comm.all_reduce(tensors.back(), {.async = true}));
  }
  // A synchronous one takes its place behind them.
  at::Tensor last = at::full({3}, 1.0F);
  comm.all_reduce(last);
  for (const Work& work : works) require(work.is_done(), "operations complete in issue order");
  for (auto work = works.rbegin(); work != works.rend(); ++work) work->wait();
  const int n = comm.size();
  for (int k = 0; k < 20; ++k)
    require_equal(tensors[static_cast<std::size_t>(k)],
                  at::full({k * 3000 + 1}, static_cast<float>(n * (n - 1) / 2 + k * n)), fmt::format("async {}", k));
}

// What rank `from` has for rank `to`: exact in every type.
at::Tensor part_for(int from, int to, std::int64_t count, ScalarType type) {
  return make_tensor(count, type, [&](std::int64_t i) {
    const std::int64_t value = from * 5 + to * 2 + i;
    return type == ScalarType::Bool ? value / 2 % 2 : value % 120;
  });
}

// The parts of all ranks, one after the other; part(rank) is a tensor.
template <class Part>
at::Tensor parts_of(const Communicator& comm, Part part) {
  std::vector<at::Tensor> parts;
  for (int r = 0; r < comm.size(); ++r) parts.push_back(part(r));
  return at::cat(parts);
}

void suite_every_type_moved(Communicator& comm, ScalarType type, std::int64_t count) {
  const int n = comm.size();
  const int me = comm.rank();
  const int root = n - 1;
  const auto require_moved = [&](const at::Tensor& found, const at::Tensor& expected, const char* verb) {
    require_equal(found, expected, fmt::format("{} {} [{}]", verb, c10::toString(type), count));
  };
  const auto blank = [](const at::Tensor& like) { return at::full(like.sizes(), 0, like.options()); };
  const at::Tensor mine = part_for(me, 0, count, type);
  const at::Tensor all = parts_of(comm, [&](int r) { return part_for(r, 0, count, type); });

  at::Tensor x = mine.clone();
  comm.broadcast(x, {.root = root});
  require_moved(x, part_for(root, 0, count, type), "broadcast");
  at::Tensor gathered = blank(all);
  comm.all_gather(gathered, mine);
  require_moved(gathered, all, "all_gather");
  gathered = me == root ? blank(all) : at::Tensor();
  comm.gather(gathered, mine, {.root = root});
  if (me == root) require_moved(gathered, all, "gather");
  at::Tensor part = blank(mine);
  comm.scatter(part, me == root ? all : at::Tensor(), {.root = root});
  require_moved(part, mine, "scatter");

  const auto to_all = [&](int r) { return part_for(me, r, count, type); };
  const auto from_all = [&](int r) { return part_for(r, me, count, type); };
  at::Tensor exchanged = blank(all);
  comm.all_to_all(exchanged, parts_of(comm, to_all));
  require_moved(exchanged, parts_of(comm, from_all), "all_to_all");

  // Some pairs, and some ranks, have nothing for each other.
  const auto pair_count = [&](int from, int to) { return (from + 2 * to) % 3 * count; };
  std::vector<std::int64_t> counts;
  std::vector<std::int64_t> sends;
  std::vector<std::int64_t> receives;
  for (int r = 0; r < n; ++r) {
    counts.push_back(r % 3 == 1 ? 0 : count + r);
    sends.push_back(pair_count(me, r));
    receives.push_back(pair_count(r, me));
  }
  const at::Tensor uneven =
      parts_of(comm, [&](int r) { return part_for(r, 0, counts[static_cast<std::size_t>(r)], type); });
  gathered = blank(uneven);
  comm.all_gather_uneven(gathered, part_for(me, 0, counts[static_cast<std::size_t>(me)], type), counts);
  require_moved(gathered, uneven, "all_gather_uneven");
  const at::Tensor expected = parts_of(comm, [&](int r) { return part_for(r, me, pair_count(r, me), type); });
  exchanged = blank(expected);
  comm.all_to_all_uneven(exchanged, parts_of(comm, [&](int r) { return part_for(me, r, pair_count(me, r), type); }),
                         receives, sends);
  require_moved(exchanged, expected, "all_to_all_uneven");

  const int before = (me + n - 1) % n;
  at::Tensor received = blank(mine);
  comm.batch_peer_to_peer({{false, received, before, 1}, {true, mine, (me + 1) % n, 1}});
  require_moved(received, part_for(before, 0, count, type), "batch_peer_to_peer");
  const int peer = me ^ 1;
  if (peer >= n) return;
  if (me % 2 == 0) {
    comm.send(mine, peer);
  } else {
    received.zero_();
    comm.recv(received, peer);
    require_moved(received, part_for(peer, 0, count, type), "send and recv");
  }
}

void suite_every_type_reduced(Communicator& comm, ScalarType type, ReduceOp op, std::int64_t count) {
  const int n = comm.size();
  const int me = comm.rank();
  const int root = n - 1;
  const auto mine = [&](std::int64_t size) {
    return make_tensor(size, type, [&](std::int64_t i) { return suite_value(op, type, me, i); });
  };
  const auto result = [&](std::int64_t begin, std::int64_t size) {
    return make_tensor(size, type, [&](std::int64_t i) { return suite_result(op, type, n, begin + i); });
  };
  at::Tensor x = mine(count);
  comm.all_reduce(x, {.op = op});
  require_equal(x, result(0, count), label("all_reduce", type, op, count));
  x = mine(count);
  comm.reduce(x, {.root = root, .op = op});
  require_equal(x, me == root ? result(0, count) : mine(count), label("reduce", type, op, count));
  at::Tensor out = at::full({count}, 0, x.options());
  comm.reduce_scatter(out, mine(count * n), {.op = op});
  require_equal(out, result(me * count, count), label("reduce_scatter", type, op, count));
  std::vector<std::int64_t> counts;
  for (int r = 0; r < n; ++r) counts.push_back(r % 3 == 1 ? 0 : count + r);
  const std::int64_t own = counts[static_cast<std::size_t>(me)];
  out = at::full({own}, 0, x.options());
  comm.reduce_scatter_uneven(out, mine(total_of(counts)), counts, {.op = op});
  require_equal(out, result(begin_of(counts, me), own), label("reduce_scatter_uneven", type, op, count));
}

// Every verb with every type and, where it reduces, every operation. Small; the other cases have the sizes.
void suite_every_type(Communicator& comm) {
  for (const std::int64_t count : {0, 1, 129}) {
    for (const ScalarType type : kSuiteTypes) suite_every_type_moved(comm, type, count);
    for_each_reduction([&](ScalarType type, ReduceOp op) { suite_every_type_reduced(comm, type, op, count); });
  }
}

// Two communicators used in opposite order on two ranks: would deadlock if anything blocked in one of them.
void suite_opposite_order(Communicator& comm) {
  auto a = comm.split(0, comm.rank(), "a");
  auto b = comm.split(0, comm.rank(), "b");
  for (int round = 0; round < 5; ++round) {
    at::Tensor x = at::full({50'000}, 1.0F);
    at::Tensor y = at::full({50'000}, 2.0F);
    Communicator& first = comm.rank() % 2 == 0 ? *a : *b;
    Communicator& second = comm.rank() % 2 == 0 ? *b : *a;
    Work one = first.all_reduce(comm.rank() % 2 == 0 ? x : y, {.async = true});
    Work two = second.all_reduce(comm.rank() % 2 == 0 ? y : x, {.async = true});
    one.wait();
    two.wait();
    require_equal(x, at::full({50'000}, 1.0F * static_cast<float>(comm.size())), "communicator a");
    require_equal(y, at::full({50'000}, 2.0F * static_cast<float>(comm.size())), "communicator b");
  }
}

// Awkward values: sums depend on their order and rounding.
float awkward(int rank, std::int64_t i) {
  std::uint32_t bits = static_cast<std::uint32_t>(i) * 2654435761U + static_cast<std::uint32_t>(rank) * 40503U + 1;
  bits ^= bits >> 15;
  bits *= 2246822519U;
  bits ^= bits >> 13;
  return static_cast<float>(static_cast<std::int32_t>(bits)) * 1e-5F;
}

void suite_same_bits(Communicator& comm) {
  for (std::int64_t count : suite_sizes(comm, {777, 300'011})) {
    at::Tensor x = make_tensor(count, ScalarType::Float, [&](std::int64_t i) { return awkward(comm.rank(), i); });
    comm.all_reduce(x, {.op = ReduceOp::avg});
    at::Tensor all = at::empty({count * comm.size()});
    comm.all_gather(all, x);
    for (int r = 0; r < comm.size(); ++r)
      require(std::memcmp(all.narrow(0, r * count, count).const_data_ptr(), x.const_data_ptr(), x.nbytes()) == 0,
              fmt::format("rank {} has other bits than rank {}", r, comm.rank()));
  }
}

void suite_rank_order(Communicator& comm) {
  for (std::int64_t count : suite_sizes(comm, {777, 300'011})) {
    at::Tensor x = make_tensor(count, ScalarType::Float, [&](std::int64_t i) { return awkward(comm.rank(), i); });
    at::Tensor h = x.to(ScalarType::BFloat16);
    comm.all_reduce(x);
    comm.all_reduce(h);
    const at::Tensor rounded = h.to(ScalarType::Float);
    for (std::int64_t i = 0; i < count; ++i) {
      float sum = awkward(0, i);
      for (int r = 1; r < comm.size(); ++r) sum += awkward(r, i);
      require(x.const_data_ptr<float>()[i] == sum, fmt::format("element {} is not the sum in rank order", i));
    }
    const at::Tensor expected = [&] {
      at::Tensor sum = make_tensor(count, ScalarType::Float, [&](std::int64_t i) { return awkward(0, i); })
                           .to(ScalarType::BFloat16)
                           .to(ScalarType::Float);
      for (int r = 1; r < comm.size(); ++r)
        sum += make_tensor(count, ScalarType::Float, [&](std::int64_t i) { return awkward(r, i); })
                   .to(ScalarType::BFloat16)
                   .to(ScalarType::Float);
      return sum.to(ScalarType::BFloat16).to(ScalarType::Float);
    }();
    require_equal(rounded, expected, "bfloat16 accumulated in float32, rounded once");
  }
}

void suite_soak(Communicator& comm) {
  at::Tensor x = at::full({64}, 1.0F);
  at::Tensor all = at::empty({64 * comm.size()});
  for (int k = 0; k < (is_small_world(comm) && !is_slow(comm) ? 400 : 60); ++k) {
    x.fill_(static_cast<float>(k));
    comm.all_reduce(x);
    comm.broadcast(x, {.root = k % comm.size()});
    comm.all_gather(all, x);
    if (k % 7 == 0) comm.barrier();
    require(all.const_data_ptr<float>()[64 * comm.size() - 1] == static_cast<float>(k * comm.size()), "soak");
  }
}

template <class ErrorType, class Body>
std::string error_of(Body body, const std::string& what) {
  try {
    body();
  } catch (const ErrorType& e) {
    return e.what();
  }
  throw std::runtime_error(what + ": no error");
}

// As error_of a CommError, on ranks that call at the same time: it must come within a second (see fault_world.h).
template <class Body>
std::string prompt_error_of(Communicator& comm, Body body, const std::string& what) {
  comm.barrier();
  const LoadedTime begin = LoadedTime::now();
  std::string text = error_of<CommError>(body, what);
  const std::string how_late = late(begin, std::chrono::seconds(1));
  require(how_late.empty(), fmt::format("{}: late: {}", what, how_late));
  return text;
}

void require_mentions(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    require(text.find(part) != std::string::npos, fmt::format("'{}' is not in the error: {}", part, text));
}

// Every verb refuses a tensor with gaps, on either side of it: no hidden copy is ever made.
void suite_non_contiguous(Communicator& comm) {
  const int n = comm.size();
  const int me = comm.rank();
  const at::Tensor part = at::full({4, 6}, 1.0F);
  const at::Tensor whole = at::full({4, 6 * n}, 1.0F);
  const at::Tensor torn_part = at::full({6, 4}, 1.0F).t();
  const at::Tensor torn_whole = at::full({6 * n, 4}, 1.0F).t();
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(n), 24);
  const auto refused = [&](const char* verb, auto body) {
    require_mentions(error_of<Error>(body, std::string(verb) + " of a non-contiguous tensor"),
                     {verb, "not contiguous", "copy it first"});
  };
  refused("broadcast", [&] { comm.broadcast(torn_part); });
  refused("all_reduce", [&] { comm.all_reduce(torn_part); });
  refused("reduce", [&] { comm.reduce(torn_part); });
  refused("send", [&] { comm.send(torn_part, (me + 1) % n); });
  refused("recv", [&] { comm.recv(torn_part, (me + 1) % n); });
  for (const bool is_send : {true, false})
    refused("batch", [&] { comm.batch_peer_to_peer({{is_send, torn_part, (me + 1) % n, 0}}); });
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

// Wrong calls that this rank can see by itself: nothing is sent, and the communicator goes on working.
void suite_refusals(Communicator& comm) {
  at::Tensor x = at::full({4, 6}, 1.0F);
  require_mentions(error_of<Error>([&] { comm.all_reduce(x.t()); }, "non-contiguous"), {"not contiguous", "6x4"});
  require_mentions(error_of<Error>([&] { comm.all_reduce(x.to(ScalarType::Int), {.op = ReduceOp::avg}); }, "avg"),
                   {"avg", "int32"});
  require_mentions(error_of<Error>([&] { comm.all_reduce(x.to(ScalarType::Short)); }, "dtype"), {"Short"});
  require_mentions(error_of<Error>([&] { comm.broadcast(x, {.root = comm.size()}); }, "root"), {"root"});
  require_mentions(error_of<Error>([&] { comm.send(x, -1); }, "peer"), {"rank -1"});
  require_mentions(error_of<Error>([&] { comm.all_gather(x, x.clone().view({24}).narrow(0, 0, 7)); }, "count"),
                   {"24", std::to_string(7 * comm.size()).c_str()});
  require_mentions(error_of<Error>([&] { comm.all_reduce(at::Tensor()); }, "undefined"), {"undefined"});
  comm.all_reduce(x);
  require(x.const_data_ptr<float>()[0] == static_cast<float>(comm.size()), "works after refusals");
}

constexpr std::array kSuite{SuiteCase{"all_reduce", suite_all_reduce},
                            SuiteCase{"reduce", suite_reduce},
                            SuiteCase{"broadcast", suite_broadcast},
                            SuiteCase{"all_gather", suite_all_gather},
                            SuiteCase{"reduce_scatter", suite_reduce_scatter},
                            SuiteCase{"gather_scatter", suite_gather_scatter},
                            SuiteCase{"all_to_all", suite_all_to_all},
                            SuiteCase{"peer_to_peer", suite_peer_to_peer},
                            SuiteCase{"every_type", suite_every_type},
                            SuiteCase{"bytes", suite_bytes},
                            SuiteCase{"split", suite_split},
                            SuiteCase{"async", suite_async},
                            SuiteCase{"opposite_order", suite_opposite_order},
                            SuiteCase{"same_bits", suite_same_bits},
                            SuiteCase{"rank_order", suite_rank_order, true},
                            SuiteCase{"soak", suite_soak},
                            SuiteCase{"non_contiguous", suite_non_contiguous},
                            SuiteCase{"refusals", suite_refusals}};

// --- failures
// ---------------------------------------------------------------------------------------------------------

void fail_verb(Communicator& comm) {
  at::Tensor x = at::full({64}, 1.0F);
  const std::string text = prompt_error_of(
      comm,
      [&] {
        if (comm.rank() == 1)
          comm.broadcast(x);
        else
          comm.all_reduce(x);
      },
      "verb mismatch");
  require_mentions(text, {"all_reduce(float32[64], sum)", "broadcast(float32[64], root 0)", "rank 1:"});
  require_mentions(error_of<CommError>([&] { comm.barrier(); }, "after a failure"), {"aborted"});
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
// Everything but the type agrees, down to the number of bytes, so that only a comparison can tell.
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
void fail_message_type(Communicator& comm) {
  at::Tensor x = at::full({16}, 1, at::TensorOptions().dtype(comm.rank() == 0 ? ScalarType::Float : ScalarType::Int));
  const std::string text = prompt_error_of(
      comm,
      [&] {
        if (comm.rank() == 0)
          comm.send(x, 1);
        else if (comm.rank() == 1)
          comm.recv(x, 0);
        else
          comm.recv(x, comm.rank() - 1, {.tag = 9});  // which nobody sends: learns of the others' failure
      },
      "message type mismatch");
  require_mentions(text, {"float32[16]", "int32[16]"});
}
void fail_message(Communicator& comm) {
  at::Tensor x = at::full({comm.rank() == 0 ? 5 : 6}, 1.0F);
  const std::string text = prompt_error_of(
      comm,
      [&] {
        if (comm.rank() == 0)
          comm.send(x, 1);
        else if (comm.rank() == 1)
          comm.recv(x, 0);
        else
          comm.recv(x, comm.rank() - 1, {.tag = 9});
      },
      "message mismatch");
  require_mentions(text, {"float32[5]", "float32[6]"});
}
void fail_missing(Communicator& comm) {
  at::Tensor x = at::full({7}, 1.0F);
  comm.all_reduce(x);
  const auto begin = std::chrono::steady_clock::now();
  if (comm.rank() == 0) {
    // Stays away, and has more patience than the others, until they have given up: any operation then fails at once.
    const std::string text = error_of<CommError>(
        [&] {
          for (;;) comm.recv(x, comm.rank(), {.tag = 99});
        },
        "late");
    require(!text.empty(), "an error");
    return;
  }
  comm.mark_started();
  const std::string text = error_of<CommError>([&] { comm.all_reduce(x); }, "missing rank");
  // The others call at the same time. One that the machine has held up for longer than the time-out is named as well.
  require(text.find("ranks 0, ") == std::string::npos, "late: " + text);
  require_mentions(text, {"all_reduce(float32[7], sum)", "timed out", "rank 0"});
  require(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20), "the time-out came late");
}
void fail_abort(Communicator& comm) {
  at::Tensor x = at::full({7}, 1.0F);
  if (comm.rank() == comm.size() - 1) {
    comm.barrier();  // the others' groups are made
    comm.abort("had enough");
    return;
  }
  const auto body = [&] {
    comm.barrier();
    comm.all_reduce(x);
  };
  require_mentions(error_of<CommError>(body, "aborted"), {"had enough"});
}

// One rank sends a message to another that is in a collective.
void fail_send_and_collective(Communicator& comm) {
  at::Tensor x = at::full({7}, 1.0F);
  const std::string text = prompt_error_of(
      comm,
      [&] {
        if (comm.rank() == 0)
          comm.send(x, 1);
        else
          comm.all_reduce(x);
      },
      "send and collective");
  require_mentions(text, {"do not call the same operation", "rank 0 sends a message to rank 1"});
}
void fail_receive_and_collective(Communicator& comm) {
  at::Tensor x = at::full({7}, 1.0F);
  // Messages that were received out of order before do not matter.
  if (comm.rank() == 0) {
    Work one = comm.send(x, 1, {.tag = 1, .async = true});
    comm.send(x, 1, {.tag = 2});
    one.wait();
  } else if (comm.rank() == 1) {
    comm.recv(x, 0, {.tag = matches_in_order(comm) ? 1 : 2});
    comm.recv(x, 0, {.tag = matches_in_order(comm) ? 2 : 1});
  }
  comm.all_reduce(x);
  const std::string text = prompt_error_of(
      comm,
      [&] {
        if (comm.rank() == 1)
          comm.recv(x, 0);
        else
          comm.all_reduce(x);
      },
      "receive and collective");
  require_mentions(text, {"do not call the same operation", "rank 1 waits to receive a message from rank 0"});
}

constexpr std::array kFailureSuite{SuiteCase{"verb", fail_verb},
                                   SuiteCase{"type", fail_type},
                                   SuiteCase{"size", fail_size},
                                   SuiteCase{"root", fail_root},
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

std::span<const SuiteCase> backend_suite() { return kSuite; }
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

std::span<const SuiteCase> backend_failure_suite() { return kFailureSuite; }

CommunicatorOptions failure_options(const SuiteCase& test) {
  using namespace std::chrono_literals;
  return {.first_timeout = 60s, .timeout = test.needs_time_out ? 500ms : 60'000ms};
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

void suite_async_soak(Communicator& comm) {
  constexpr int kOperations = 10'000;
  constexpr int kInFlight = 64;
  auto a = comm.split(0, comm.rank(), "soak a");
  auto b = comm.split(0, comm.rank(), "soak b");
  struct Slot {
    at::Tensor tensor;
    Work work;
    float expected = 0;
  };
  std::array<Slot, kInFlight> slots;
  for (std::size_t k = 0; k < kInFlight; ++k) slots[k].tensor = at::empty({static_cast<std::int64_t>(1 + k % 17)});
  const auto settle = [](Slot& slot) {
    slot.work.wait();
    const auto* data = slot.tensor.const_data_ptr<float>();
    for (std::int64_t i = 0; i < slot.tensor.numel(); ++i) require(data[i] == slot.expected, "async soak");
  };
  for (int k = 0; k < kOperations; k += 2) {
    for (int which = 0; which < 2; ++which) {
      // Which of the pair comes first depends on the rank.
      const int operation = k + (comm.rank() + which) % 2;
      Slot& slot = slots[static_cast<std::size_t>(operation % kInFlight)];
      if (operation >= kInFlight) settle(slot);
      Communicator& group = operation % 2 == 0 ? *a : *b;
      auto* data = slot.tensor.mutable_data_ptr<float>();
      std::fill_n(data, slot.tensor.numel(), static_cast<float>(operation % 1000 + comm.rank()));
      if (operation % 3 == 0) {
        const int root = operation % comm.size();
        slot.expected = static_cast<float>(operation % 1000 + root);
        slot.work = group.broadcast(slot.tensor, {.root = root, .async = true});
      } else {
        slot.expected = static_cast<float>(comm.size() * (operation % 1000) + comm.size() * (comm.size() - 1) / 2);
        slot.work = group.all_reduce(slot.tensor, {.async = true});
      }
    }
  }
  for (Slot& slot : slots) settle(slot);
}

}  // namespace phalanx
