#include "phalanx/comm/backends/mpi/testing/mpi_calls.h"

#include <mpi.h>

#include <atomic>

namespace phalanx {
namespace {

std::atomic<std::int64_t> calls_made{0};
std::atomic<int> threads_seen{0}, threads_inside{0}, most_threads_inside{0};

class InMpi {
 public:
  InMpi() {
    thread_local bool is_known = false;
    if (!is_known) threads_seen.fetch_add(1);
    is_known = true;
    calls_made.fetch_add(1);
    const int now = threads_inside.fetch_add(1) + 1;
    int most = most_threads_inside.load();
    while (now > most && !most_threads_inside.compare_exchange_weak(most, now)) continue;
  }
  ~InMpi() { threads_inside.fetch_sub(1); }
};

}  // namespace

MpiCalls mpi_calls() {
  return {.calls = calls_made.load(), .threads = threads_seen.load(), .most_at_once = most_threads_inside.load()};
}

}  // namespace phalanx

// clang-format off
#define PHALANX_COUNTED(name, parameters, arguments) \
  extern "C" int MPI_##name parameters {             \
    const phalanx::InMpi here;                       \
    return PMPI_##name arguments;                    \
  }

PHALANX_COUNTED(Test, (MPI_Request* request, int* flag, MPI_Status* status), (request, flag, status))
PHALANX_COUNTED(Testall, (int count, MPI_Request requests[], int* flag, MPI_Status statuses[]),
                (count, requests, flag, statuses))
PHALANX_COUNTED(Iprobe, (int source, int tag, MPI_Comm comm, int* flag, MPI_Status* status),
                (source, tag, comm, flag, status))
PHALANX_COUNTED(Recv,
                (void* data, int count, MPI_Datatype type, int source, int tag, MPI_Comm comm, MPI_Status* status),
                (data, count, type, source, tag, comm, status))
PHALANX_COUNTED(Isend,
                (const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request),
                (data, count, type, to, tag, comm, request))
PHALANX_COUNTED(Irecv,
                (void* data, int count, MPI_Datatype type, int source, int tag, MPI_Comm comm, MPI_Request* request),
                (data, count, type, source, tag, comm, request))
PHALANX_COUNTED(Ibcast, (void* data, int count, MPI_Datatype type, int root, MPI_Comm comm, MPI_Request* request),
                (data, count, type, root, comm, request))
PHALANX_COUNTED(Iallreduce,
                (const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                 MPI_Request* request),
                (in, out, count, type, op, comm, request))
PHALANX_COUNTED(Ireduce,
                (const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm,
                 MPI_Request* request),
                (in, out, count, type, op, root, comm, request))
PHALANX_COUNTED(Ireduce_scatter,
                (const void* in, void* out, const int counts[], MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                 MPI_Request* request),
                (in, out, counts, type, op, comm, request))
PHALANX_COUNTED(Ireduce_scatter_block,
                (const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                 MPI_Request* request),
                (in, out, count, type, op, comm, request))
PHALANX_COUNTED(Iallgather,
                (const void* in, int sent, MPI_Datatype of, void* out, int received, MPI_Datatype type, MPI_Comm comm,
                 MPI_Request* request),
                (in, sent, of, out, received, type, comm, request))
PHALANX_COUNTED(Iallgatherv,
                (const void* in, int sent, MPI_Datatype of, void* out, const int counts[], const int begins[],
                 MPI_Datatype type, MPI_Comm comm, MPI_Request* request),
                (in, sent, of, out, counts, begins, type, comm, request))
PHALANX_COUNTED(Ialltoall,
                (const void* in, int sent, MPI_Datatype of, void* out, int received, MPI_Datatype type, MPI_Comm comm,
                 MPI_Request* request),
                (in, sent, of, out, received, type, comm, request))
PHALANX_COUNTED(Ialltoallv,
                (const void* in, const int sent[], const int from[], MPI_Datatype of, void* out, const int received[],
                 const int to[], MPI_Datatype type, MPI_Comm comm, MPI_Request* request),
                (in, sent, from, of, out, received, to, type, comm, request))
PHALANX_COUNTED(Igather,
                (const void* in, int sent, MPI_Datatype of, void* out, int received, MPI_Datatype type, int root,
                 MPI_Comm comm, MPI_Request* request),
                (in, sent, of, out, received, type, root, comm, request))
PHALANX_COUNTED(Iscatter,
                (const void* in, int sent, MPI_Datatype of, void* out, int received, MPI_Datatype type, int root,
                 MPI_Comm comm, MPI_Request* request),
                (in, sent, of, out, received, type, root, comm, request))
PHALANX_COUNTED(Comm_free, (MPI_Comm* comm), (comm))
// clang-format on
#undef PHALANX_COUNTED
