// A tour of the collectives on small vectors, before and after, rank by rank. Best with four ranks:
//
//   phalanx launch --nproc-per-node 4 -- collectives_tour
//
// Note that all_gather of what reduce_scatter leaves on the ranks gives the result of all_reduce:
// all-reduce = reduce-scatter + all-gather. Sharded data parallelism uses this to do only the first half.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <cstdio>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"

namespace {

std::string text(at::Tensor tensor) {
  if (!tensor.defined()) return "-";
  tensor = tensor.cpu();
  std::string list;
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    list += fmt::format("{}{}", i == 0 ? "" : " ", tensor.const_data_ptr<float>()[i]);
  }
  return "[" + list + "]";
}

/// Rank 0 prints the line of every rank, in the order of the ranks.
void show(phalanx::Communicator& comm, const char* title, const std::string& before, const at::Tensor& after) {
  const auto lines = comm.gather_bytes(fmt::format("{:<12} -> {}", before, text(after)));
  if (comm.rank() != 0) return;
  fmt::print("{}\n", title);
  for (std::size_t rank = 0; rank < lines.size(); ++rank) fmt::print("  rank {}: {}\n", rank, lines[rank]);
}

/// On the GPU if there is one: then data goes from GPU to GPU.
void tour(phalanx::Communicator& comm, c10::Device device) {
  const int n = comm.size(), rank = comm.rank();
  const bool is_root = rank == 0;
  const at::TensorOptions here = at::TensorOptions(at::kFloat).device(device);
  const auto mine = [&] { return at::arange(n, here) + rank; };  // [0, 1, 2, 3] + rank
  const std::string before = text(mine());
  const at::Tensor nothing;

  at::Tensor x = mine();
  comm.broadcast(x, {.root = 0});
  show(comm, "broadcast from rank 0", before, x);

  x = mine();
  comm.reduce(x, {.root = 0});
  show(comm, "reduce to rank 0: the others keep what they had", before, x);

  x = mine();
  comm.all_reduce(x);
  show(comm, "all_reduce", before, x);

  at::Tensor part = at::zeros({1}, here);
  comm.reduce_scatter(part, mine());
  show(comm, "reduce_scatter: rank r has element r of the sum", before, part);

  at::Tensor whole = at::zeros({n}, here);
  comm.all_gather(whole, part);
  show(comm, "all_gather of those: the all_reduce again", text(part), whole);

  const at::Tensor one = at::full({1}, 10.0 * rank, here);
  whole = is_root ? at::zeros({n}, here) : nothing;
  comm.gather(whole, one, {.root = 0});
  show(comm, "gather to rank 0", text(one), whole);

  const at::Tensor source = is_root ? at::arange(n, here) * 10 : nothing;
  part = at::zeros({1}, here);
  comm.scatter(part, source, {.root = 0});
  show(comm, "scatter from rank 0", text(source), part);

  const at::Tensor letters = at::arange(n, here) + 10 * rank;
  at::Tensor exchanged = at::zeros({n}, here);
  comm.all_to_all(exchanged, letters);
  show(comm, "all_to_all: element j of rank i becomes element i of rank j", text(letters), exchanged);
}

}  // namespace

int main() try {
  const phalanx::ProcessContext context = phalanx::init_from_environment();
  tour(*context.world, context.device);
  return 0;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) std::fprintf(stderr, "collectives_tour: %s\n", error.what());
  return error.exit_status();
}
