#include "phalanx/comm/testing/fault_calls.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <future>
#include <memory>
#include <stdexcept>
#include <utility>

namespace phalanx {
namespace {

using Pending = FaultCall::Pending;

at::Tensor filled(std::int64_t count) { return at::full({count}, 1.0F); }

// The input counts of the ranks in the uneven verbs. None is 0, so that all ranks wait for all.
std::vector<std::int64_t> uneven(const Communicator& comm, std::int64_t count) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < comm.size(); ++r) counts.push_back(count + r);
  return counts;
}
std::int64_t total_count(const std::vector<std::int64_t>& counts) {
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) sum += count;
  return sum;
}

Pending pending(Work work) {
  return [work = std::move(work)] { work.wait(); };
}

// A call that is only synchronous runs in a thread.
Pending pending(std::function<void()> body) {
  auto done = std::make_shared<std::future<void>>(std::async(std::launch::async, std::move(body)));
  return [done] { done->get(); };
}

// The victim's side of messages with all other ranks.
Pending with_everybody(Communicator& comm, int victim, bool victim_sends, std::int64_t n, int tag) {
  std::vector<Communicator::P2POp> operations;
  for (int r = 0; r < comm.size(); ++r)
    if (r != victim) operations.push_back({victim_sends, filled(n), r, tag});
  return pending(comm.batch_isend_irecv(std::move(operations), {.async = true}));
}

void add_even(std::vector<FaultCall>& calls) {
  calls.push_back({"all_reduce", {"all_reduce(float32[{n}], sum)"}, [](Communicator& c, std::int64_t n) {
                     return pending(c.all_reduce(filled(n), {.async = true}));
                   }});
  calls.push_back({"all_gather", {"all_gather(float32[{n}])"}, [](Communicator& c, std::int64_t n) {
                     return pending(c.all_gather(filled(n * c.size()), filled(n), {.async = true}));
                   }});
  calls.push_back({"reduce_scatter", {"reduce_scatter(float32[{n}], max)"}, [](Communicator& c, std::int64_t n) {
                     return pending(
                         c.reduce_scatter(filled(n), filled(n * c.size()), {.op = ReduceOp::max, .async = true}));
                   }});
  calls.push_back({"all_to_all", {"all_to_all(float32["}, [](Communicator& c, std::int64_t n) {
                     return pending(c.all_to_all(filled(n * c.size()), filled(n * c.size()), {.async = true}));
                   }});
  calls.push_back({"barrier",
                   {"barrier()"},
                   [](Communicator& c, std::int64_t) { return pending(c.barrier({.async = true})); },
                   {},
                   false});
}

void add_uneven(std::vector<FaultCall>& calls) {
  calls.push_back({"uneven all_gather", {"all_gather(float32["}, [](Communicator& c, std::int64_t n) {
                     const auto counts = uneven(c, n);
                     return pending(c.all_gather_uneven(filled(total_count(counts)), filled(n + c.rank()), counts,
                                                        {.async = true}));
                   }});
  calls.push_back({"uneven reduce_scatter", {"reduce_scatter(float32["}, [](Communicator& c, std::int64_t n) {
                     const auto counts = uneven(c, n);
                     return pending(c.reduce_scatter_uneven(filled(n + c.rank()), filled(total_count(counts)), counts,
                                                            {.async = true}));
                   }});
  calls.push_back({"uneven all_to_all", {"all_to_all(float32[uneven])"}, [](Communicator& c, std::int64_t n) {
                     // Every rank gets n + r elements from rank r.
                     const std::vector<std::int64_t> sends(static_cast<std::size_t>(c.size()), n + c.rank());
                     const auto receives = uneven(c, n);
                     return pending(c.all_to_all_uneven(filled(total_count(receives)), filled(total_count(sends)),
                                                        receives, sends, {.async = true}));
                   }});
}

void add_rooted(std::vector<FaultCall>& calls, int root) {
  const std::string of = fmt::format(" with root {}", root);
  const auto words = [&](const char* verb) {
    return std::vector<std::string>{fmt::format("{}, root {})", verb, root)};
  };
  calls.push_back({"broadcast" + of, words("broadcast(float32[{n}]"), [=](Communicator& c, std::int64_t n) {
                     return pending(c.broadcast(filled(n), {.root = root, .async = true}));
                   }});
  calls.push_back({"reduce" + of, words("reduce(float32[{n}], sum"), [=](Communicator& c, std::int64_t n) {
                     return pending(c.reduce(filled(n), {.root = root, .async = true}));
                   }});
  calls.push_back({"gather" + of, words("gather(float32[{n}]"), [=](Communicator& c, std::int64_t n) {
                     return pending(c.gather(c.rank() == root ? filled(n * c.size()) : at::Tensor(), filled(n),
                                             {.root = root, .async = true}));
                   }});
  calls.push_back({"scatter" + of, words("scatter(float32[{n}]"), [=](Communicator& c, std::int64_t n) {
                     return pending(c.scatter(filled(n), c.rank() == root ? filled(n * c.size()) : at::Tensor(),
                                              {.root = root, .async = true}));
                   }});
}

void add_messages(std::vector<FaultCall>& calls, int victim) {
  calls.push_back({"send", {"send(float32[{n}] to rank {v}, tag 3)"}, [=](Communicator& c, std::int64_t n) {
                     if (c.rank() == victim) return with_everybody(c, victim, false, n, 3);
                     return pending(c.send(filled(n), victim, {.tag = 3, .async = true}));
                   }});
  calls.push_back({"recv", {"recv(float32[{n}] from rank {v}, tag 4)"}, [=](Communicator& c, std::int64_t n) {
                     if (c.rank() == victim) return with_everybody(c, victim, true, n, 4);
                     return pending(c.recv(filled(n), victim, {.tag = 4, .async = true}));
                   }});
  calls.push_back({"batch",
                   {"batch_isend_irecv(2 transfers; float32[{n}] to rank {v}, tag 5"},
                   [=](Communicator& c, std::int64_t n) {
                     std::vector<Communicator::P2POp> operations;
                     for (int r = 0; r < c.size(); ++r)
                       if ((r == victim) != (c.rank() == victim))
                         for (const bool sends : {true, false}) operations.push_back({sends, filled(n), r, 5});
                     return pending(c.batch_isend_irecv(std::move(operations), {.async = true}));
                   }});
}

void add_bytes_and_groups(std::vector<FaultCall>& calls, int victim) {
  const auto text = [](std::int64_t n) { return std::string(static_cast<std::size_t>(n), 'x'); };
  const auto add = [&](std::string name, std::vector<std::string> words,
                       std::function<void(Communicator&, std::int64_t)> body) {
    calls.push_back(
        {std::move(name),
         std::move(words),
         [body = std::move(body)](Communicator& c, std::int64_t n) { return pending([&c, n, body] { body(c, n); }); },
         {},
         false});
  };
  // First the lengths, then the bytes.
  add("broadcast_bytes", {"broadcast(int64[1], root 0)", "broadcast(uint8[{n}], root 0)"},
      [=](Communicator& c, std::int64_t n) { c.broadcast_bytes(c.rank() == 0 ? text(n) : ""); });
  add("all_gather_bytes", {"all_gather(int64[1])", "all_gather(uint8["},
      [=](Communicator& c, std::int64_t n) { c.all_gather_bytes(text(n)); });
  add("gather_bytes", {fmt::format("gather(int64[1], root {})", victim), "all_to_all(uint8[uneven])"},
      [=](Communicator& c, std::int64_t n) { c.gather_bytes(text(n), victim); });
  add("scatter_bytes", {fmt::format("scatter(int64[1], root {})", victim), "all_to_all(uint8[uneven])"},
      [=](Communicator& c, std::int64_t n) {
        c.scatter_bytes(std::vector<std::string>(static_cast<std::size_t>(c.size()), text(n)), victim);
      });
  // First colours and keys, then the new group.
  add("split", {"all_gather(int64[1])", "all_gather(uint8[", "split(color 0, key "},
      [](Communicator& c, std::int64_t) { c.split(0, -c.rank()); });
}

void add_symmetric(std::vector<FaultCall>& calls, bool gathers) {
  const auto data = std::make_shared<at::Tensor>();
  calls.push_back({gathers ? "symmetric all_gather" : "symmetric all_reduce",
                   {gathers ? "all_gather(float32[{n}])" : "all_reduce(float32[{n}], sum)"},
                   [=](Communicator& c, std::int64_t n) {
                     return pending(gathers ? c.all_gather(filled(n * c.size()), *data, {.async = true})
                                            : c.all_reduce(*data, {.async = true}));
                   },
                   [=](Communicator& c, std::int64_t n) { *data = c.symmetric_empty({n}, at::kFloat).fill_(1); }});
}

}  // namespace

std::vector<FaultCall> fault_calls(int victim) {
  std::vector<FaultCall> calls;
  add_even(calls);
  add_uneven(calls);
  for (const int root : {0, victim}) add_rooted(calls, root);
  add_messages(calls, victim);
  add_bytes_and_groups(calls, victim);
  for (const bool gathers : {false, true}) add_symmetric(calls, gathers);
  return calls;
}

void require_told(const FaultCall& call, const std::string& text, std::int64_t count, int victim) {
  const bool is_told = std::ranges::any_of(call.words, [&](std::string words) {
    for (const auto& [mark, value] : {std::pair<const char*, std::int64_t>{"{n}", count}, {"{v}", victim}})
      if (const std::size_t at = words.find(mark); at != std::string::npos) words.replace(at, 3, std::to_string(value));
    return text.find(words) != std::string::npos;
  });
  if (!is_told)
    throw std::runtime_error(
        fmt::format("{}: none of '{}' is in the error: {}", call.name, fmt::join(call.words, "', '"), text));
}

}  // namespace phalanx
