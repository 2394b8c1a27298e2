#include "phalanx/comm/testing/verb_places.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "phalanx/base/testing/error_text.h"
#include "phalanx/comm/backends/local_shm/shared_heap.h"

namespace phalanx {

void must_be(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

namespace {

// Small integers that depend on rank and element, so sums and products are exact.
at::Tensor values(std::int64_t count, int rank, c10::ScalarType type) {
  at::Tensor t = at::empty({count});
  for (std::int64_t i = 0; i < count; ++i) t.data_ptr<float>()[i] = static_cast<float>((i * 7 + rank * 3) % 11 - 4);
  return t.to(type);
}

// Allocates this rank's data: a tensor of `count` elements.
using Place = std::function<at::Tensor(std::int64_t count)>;

struct VerbCase {
  const char* name;
  // Runs the verb with `count` elements per rank and returns this rank's output. `place` allocates the data that peers
  // may read.
  std::function<at::Tensor(Communicator&, std::int64_t count, c10::ScalarType, const Place& place)> run;
};

std::vector<VerbCase> verb_cases() {
  const auto put = [](const Place& place, const at::Tensor& data) { return place(data.numel()).copy_(data); };
  std::vector<VerbCase> cases;
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::max}) {
    cases.push_back({"all_reduce", [=](Communicator& c, std::int64_t n, c10::ScalarType t, const Place& place) {
                       at::Tensor x = put(place, values(n, c.rank(), t));
                       c.all_reduce(x, {.op = op});
                       return x.clone();
                     }});
    cases.push_back({"reduce_scatter", [=](Communicator& c, std::int64_t n, c10::ScalarType t, const Place& place) {
                       const at::Tensor in = put(place, values(n * c.size(), c.rank(), t));
                       at::Tensor out = at::empty({n}, in.options());
                       c.reduce_scatter(out, in, {.op = op});
                       return out;
                     }});
  }
  cases.push_back(
      {"reduce_scatter in place", [=](Communicator& c, std::int64_t n, c10::ScalarType t, const Place& place) {
         const at::Tensor in = put(place, values(n * c.size(), c.rank(), t));
         const at::Tensor out = in.narrow(0, n * c.rank(), n);
         c.reduce_scatter(out, in);
         return out.clone();
       }});
  cases.push_back(
      {"reduce_scatter uneven", [=](Communicator& c, std::int64_t n, c10::ScalarType t, const Place& place) {
         std::vector<std::int64_t> counts(static_cast<std::size_t>(c.size()), n);
         counts.back() = 0;
         counts.front() = n + 77;
         const std::int64_t all = n * std::max(1, c.size() - 1) + 77;
         const at::Tensor in = put(place, values(all, c.rank(), t));
         at::Tensor out = at::empty({counts[static_cast<std::size_t>(c.rank())]}, in.options());
         c.reduce_scatter_uneven(out, in, counts);
         return out;
       }});
  cases.push_back({"all_gather", [=](Communicator& c, std::int64_t n, c10::ScalarType t, const Place& place) {
                     const at::Tensor in = put(place, values(n, c.rank(), t));
                     at::Tensor out = at::empty({n * c.size()}, in.options());
                     c.all_gather(out, in);
                     return out;
                   }});
  cases.push_back({"all_gather in place", [=](Communicator& c, std::int64_t n, c10::ScalarType t, const Place& place) {
                     at::Tensor out = place(n * c.size());
                     const at::Tensor in = out.narrow(0, n * c.rank(), n);
                     in.copy_(values(n, c.rank(), t));
                     c.all_gather(out, in);
                     return out.clone();
                   }});
  cases.push_back({"all_to_all", [=](Communicator& c, std::int64_t n, c10::ScalarType t, const Place& place) {
                     const at::Tensor in = put(place, values(n * c.size(), c.rank(), t));
                     at::Tensor out = at::empty({n * c.size()}, in.options());
                     c.all_to_all(out, in);
                     return out;
                   }});
  for (const bool last : {false, true}) {
    const auto root_of = [=](const Communicator& c) { return last ? c.size() - 1 : 0; };
    cases.push_back({"broadcast", [=](Communicator& c, std::int64_t n, c10::ScalarType t, const Place& place) {
                       at::Tensor x = put(place, values(n, c.rank(), t));
                       c.broadcast(x, {.root = root_of(c)});
                       return x.clone();
                     }});
    cases.push_back({"reduce", [=](Communicator& c, std::int64_t n, c10::ScalarType t, const Place& place) {
                       at::Tensor x = put(place, values(n, c.rank(), t));
                       c.reduce(x, {.root = root_of(c)});
                       return x.clone();
                     }});
    cases.push_back({"gather", [=](Communicator& c, std::int64_t n, c10::ScalarType t, const Place& place) {
                       const at::Tensor in = put(place, values(n, c.rank(), t));
                       at::Tensor out = at::empty({c.rank() == root_of(c) ? n * c.size() : 0}, in.options());
                       c.gather(out, in, {.root = root_of(c)});
                       return out;
                     }});
  }
  return cases;
}

}  // namespace

void compare_verbs(Communicator& comm, std::int64_t count, c10::ScalarType type, const std::string& what,
                   const std::function<at::Tensor(std::int64_t)>& place) {
  const Place ordinary = [&](std::int64_t n) {
    const SharedHeap::Pause pause;
    return at::empty({n}, at::TensorOptions().dtype(type));
  };
  for (const VerbCase& one : verb_cases()) {
    const at::Tensor expected = one.run(comm, count, type, ordinary);
    for (int k = 0; k < 2; ++k)
      must_be(at::equal(one.run(comm, count, type, place), expected),
              fmt::format("{}, {} elements, {}, call {}", one.name, count, what, k));
  }
}

void strike_at_work(Communicator& comm, at::Tensor x, int signal) {
  const auto* data = x.const_data_ptr<float>();
  const std::int64_t slice = x.numel() / comm.size();
  const auto is_begun = [&] {  // a peer has written here
    bool begun = false;
    for (int r = 0; r < comm.size(); ++r)
      if (r != comm.rank()) begun |= *static_cast<const volatile float*>(data + r * slice + 200) != 1;
    return begun;
  };
  // The first asynchronous operation creates the thread that does this rank's part. That thread must be slow.
  const sched_param none{};
  sched_setscheduler(0, SCHED_IDLE, &none);
  Work work = comm.all_reduce(x, {.async = true});
  sched_setscheduler(0, SCHED_OTHER, &none);
  while (!is_begun() && !work.is_done()) {  // done: the other ranks have failed before
  }
  if (signal == SIGKILL || is_begun()) raise(signal);
}

bool outlasts_a_stopped_rank(Communicator& comm, const at::Tensor& x, bool is_victim) {
  const std::string text = require_error<CommError>([&] {
    if (is_victim) {
      strike_at_work(comm, x, SIGSTOP);
      comm.barrier();
    } else {
      for (;;) comm.all_reduce(x);
    }
  });
  if (!is_victim) must_be(text.find("timed out") != std::string::npos, text);
  return !is_victim;
}

std::int64_t resident_kib(std::uintptr_t address, const std::string& name) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool is_ours = false;
  while (std::getline(maps, line)) {
    if (line.find(name) != std::string::npos) {
      std::size_t dash = 0;
      const std::uintptr_t begin = std::stoull(line, &dash, 16);
      is_ours = begin <= address && address < std::stoull(line.substr(dash + 1), nullptr, 16);
    }
    if (is_ours && line.starts_with("Rss:")) {
      std::istringstream text(line.substr(4));
      std::int64_t kib = 0;
      text >> kib;
      return kib;
    }
  }
  throw std::runtime_error("no such mapping");
}

std::uintptr_t only_mapping(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  std::vector<std::uintptr_t> found;
  while (std::getline(maps, line))
    if (line.find(name) != std::string::npos) found.push_back(std::stoull(line, nullptr, 16));
  must_be(found.size() == 1, fmt::format("{} mappings", found.size()));
  return found.front();
}

}  // namespace phalanx
