// MPI's calls and constants, as a table that a small module of ours fills (mpi_module.cc). Only the module is linked
// with Open MPI, whose constants are data symbols. It is opened when a rank first needs MPI. So one program runs with
// and without an MPI. Types, and constants that are plain numbers, are those of <mpi.h>.
//
//   mpi().isend(data, count, mpi().byte, peer, tag, comm, &request);      // MPI_Isend with MPI_BYTE
#pragma once

#include <mpi.h>

#include <cstddef>

namespace phalanx {

struct MpiTable {
  std::size_t size = sizeof(MpiTable);  // shows that module and program are of one build

  MPI_Comm comm_world, comm_null;
  MPI_Group group_null;
  MPI_Request request_null;
  MPI_Errhandler errors_return;
  MPI_Datatype byte, uint8, uint16, uint32, uint64, int32, int64, float_type, double_type;
  MPI_Op sum, prod, min, max, lor, land;

  decltype(&MPI_Isend) isend;
  decltype(&MPI_Irecv) irecv;
  decltype(&MPI_Iallgather) iallgather;
  decltype(&MPI_Iallgatherv) iallgatherv;
  decltype(&MPI_Ialltoall) ialltoall;
  decltype(&MPI_Ialltoallv) ialltoallv;
  decltype(&MPI_Ibcast) ibcast;
  decltype(&MPI_Igather) igather;
  decltype(&MPI_Iscatter) iscatter;
  decltype(&MPI_Iallreduce) iallreduce;
  decltype(&MPI_Ireduce) ireduce;
  decltype(&MPI_Ireduce_scatter) ireduce_scatter;
  decltype(&MPI_Ireduce_scatter_block) ireduce_scatter_block;
  decltype(&MPI_Test) test;
  decltype(&MPI_Testall) testall;
  decltype(&MPI_Iprobe) iprobe;
  decltype(&MPI_Recv) recv;
  decltype(&MPI_Init_thread) init_thread;
  decltype(&MPI_Initialized) initialized;
  decltype(&MPI_Finalize) finalize;
  decltype(&MPI_Finalized) finalized;
  decltype(&MPI_Query_thread) query_thread;
  decltype(&MPI_Abort) abort;
  decltype(&MPI_Error_string) error_string;
  decltype(&MPI_Get_library_version) get_library_version;
  decltype(&MPI_Comm_rank) comm_rank;
  decltype(&MPI_Comm_size) comm_size;
  decltype(&MPI_Comm_group) comm_group;
  decltype(&MPI_Comm_create_group) comm_create_group;
  decltype(&MPI_Comm_free) comm_free;
  decltype(&MPI_Comm_get_attr) comm_get_attr;
  decltype(&MPI_Comm_set_errhandler) comm_set_errhandler;
  decltype(&MPI_Group_incl) group_incl;
  decltype(&MPI_Group_free) group_free;
};

/// The module's table; the first call opens it. Throws ConfigError if the module or its MPI cannot be loaded.
const MpiTable& mpi();

/// The exported name of the module's table: a function that returns a `const MpiTable*`.
inline constexpr const char* kMpiTableSymbol = "phalanx_mpi_table";

}  // namespace phalanx
