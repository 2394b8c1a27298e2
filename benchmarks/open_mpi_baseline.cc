#include "benchmarks/open_mpi_baseline.h"

#include "phalanx/base/error.h"

#ifdef PHALANX_HAVE_MPI
#include <fmt/format.h>
#include <mpi.h>

#include <cstdlib>
#endif

namespace phalanx::benchmarks {

#ifdef PHALANX_HAVE_MPI

namespace {

using measure::BenchVerb;

void start_mpi() {
  int is_initialised = 0;
  MPI_Initialized(&is_initialised);
  if (is_initialised != 0) return;
  MPI_Init(nullptr, nullptr);
  std::atexit([] { MPI_Finalize(); });
}

MPI_Datatype mpi_type(DataType type) {
  switch (type) {
    case DataType::f32:
      return MPI_FLOAT;
    case DataType::f64:
      return MPI_DOUBLE;
    case DataType::i32:
      return MPI_INT32_T;
    case DataType::i64:
      return MPI_INT64_T;
    case DataType::u8:
      return MPI_UINT8_T;
    default:
      throw Error(fmt::format("Open MPI has no {}", measure::text_of(type)));
  }
}

MPI_Op mpi_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return MPI_SUM;
    case ReduceOp::min:
      return MPI_MIN;
    case ReduceOp::max:
      return MPI_MAX;
    case ReduceOp::product:
      return MPI_PROD;
    case ReduceOp::avg:
      break;
  }
  throw Error("Open MPI has no avg");
}

std::function<void()> call_of(const measure::CommBenchCase& what, int rank, int ranks, const measure::BenchBuffers& b) {
  start_mpi();
  // The caller of prepare holds the tensors.
  void* const whole = b.whole.mutable_data_ptr();
  void* const part = b.part.mutable_data_ptr();
  void* const received = b.received.defined() ? b.received.mutable_data_ptr() : nullptr;
  const int count = static_cast<int>(what.count), share = count / ranks, root = what.root;
  const int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
  const MPI_Datatype type = mpi_type(what.type);
  const MPI_Op op = measure::reduces(what.verb) ? mpi_op(what.op) : MPI_SUM;
  const MPI_Comm world = MPI_COMM_WORLD;
  const bool is_root = rank == root;
  if (what.place == measure::Place::in && what.verb != BenchVerb::all_reduce && what.verb != BenchVerb::broadcast &&
      what.verb != BenchVerb::reduce && what.verb != BenchVerb::pingpong && what.verb != BenchVerb::barrier)
    throw Error("split verbs of Open MPI are not measured in place");
  switch (what.verb) {
    case BenchVerb::all_reduce:
      return [=] { MPI_Allreduce(MPI_IN_PLACE, whole, count, type, op, world); };
    case BenchVerb::all_gather:
      return [=] { MPI_Allgather(part, share, type, whole, share, type, world); };
    case BenchVerb::reduce_scatter:
      return [=] { MPI_Reduce_scatter_block(whole, part, share, type, op, world); };
    case BenchVerb::broadcast:
      return [=] { MPI_Bcast(whole, count, type, root, world); };
    case BenchVerb::reduce:
      return [=] { MPI_Reduce(is_root ? MPI_IN_PLACE : whole, whole, count, type, op, root, world); };
    case BenchVerb::gather:
      return [=] { MPI_Gather(part, share, type, whole, share, type, root, world); };
    case BenchVerb::scatter:
      return [=] { MPI_Scatter(whole, share, type, part, share, type, root, world); };
    case BenchVerb::all_to_all:
      return [=] { MPI_Alltoall(whole, share, type, received, share, type, world); };
    case BenchVerb::sendrecv:
      return [=] {
        MPI_Sendrecv(whole, count, type, next, 0, received, count, type, before, 0, world, MPI_STATUS_IGNORE);
      };
    case BenchVerb::pingpong:
      return [=] {
        if (rank > 1) return;
        if (rank == 0) MPI_Send(whole, count, type, 1, 0, world);
        MPI_Recv(whole, count, type, 1 - rank, 0, world, MPI_STATUS_IGNORE);
        if (rank == 1) MPI_Send(whole, count, type, 0, 0, world);
      };
    case BenchVerb::barrier:
      return [=] { MPI_Barrier(world); };
  }
  return {};
}

}  // namespace

measure::BenchBaseline open_mpi_baseline() { return {"openmpi", call_of}; }

#else

measure::BenchBaseline open_mpi_baseline() {
  return {"openmpi", [](const auto&...) -> std::function<void()> {
            throw Error("this build has no MPI (Debian: libopenmpi-dev)");
          }};
}

#endif

}  // namespace phalanx::benchmarks
