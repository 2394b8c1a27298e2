// NCCL's C calls, as a table. NCCL is opened at run time, so one program runs with and without it, and a test can fill
// the table with a fake. The types are declared here, so nccl.h is not needed to build (nccl_header_check.cc compares
// the two if it is available). Names and numbers are NCCL's own, from version 2.18 on.
//
//   std::shared_ptr<const NcclTable> table = load_nccl();        // CommError: why libnccl.so.2 cannot be loaded
//   table->all_reduce(data, data, count, NcclType::float32, NcclOp::sum, comm, stream);
#pragma once

#include <climits>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "phalanx/comm/device/device_streams.h"
#include "phalanx/comm/types.h"

namespace phalanx {

struct NcclComm;  // NCCL's own, opaque

struct NcclUniqueId {
  char bytes[128];
};

enum class NcclResult : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7
};
enum class NcclOp : int { sum = 0, product = 1, max = 2, min = 3, avg = 4 };
enum class NcclType : int {
  int8 = 0,
  uint8 = 1,
  int32 = 2,
  uint32 = 3,
  int64 = 4,
  uint64 = 5,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9
};

/// The members that NCCL 2.18 has; later versions accept the shorter structure by its size and version.
struct NcclConfig {
  static constexpr int kUndefined = INT_MIN;
  std::size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};
inline constexpr int kNcclNoColor = -1;

struct NcclTable {
  template <class Signature>
  using Call = std::function<Signature>;

  Call<NcclResult(int*)> get_version;
  Call<const char*(NcclResult)> get_error_string;
  Call<const char*(NcclComm*)> get_last_error;
  Call<NcclResult(NcclUniqueId*)> get_unique_id;
  Call<NcclResult(NcclComm**, int ranks, NcclUniqueId, int rank, NcclConfig*)> comm_init_rank_config;
  Call<NcclResult(NcclComm*, int color, int key, NcclComm**, NcclConfig*)> comm_split;
  Call<NcclResult(NcclComm*)> comm_finalize;
  Call<NcclResult(NcclComm*)> comm_destroy;
  Call<NcclResult(NcclComm*)> comm_abort;
  Call<NcclResult(NcclComm*, NcclResult*)> comm_get_async_error;
  Call<NcclResult()> group_start;
  Call<NcclResult()> group_end;
  Call<NcclResult(const void*, void*, std::size_t, NcclType, NcclOp, NcclComm*, DeviceStream)> all_reduce;
  Call<NcclResult(const void*, void*, std::size_t, NcclType, int root, NcclComm*, DeviceStream)> broadcast;
  Call<NcclResult(const void*, void*, std::size_t, NcclType, NcclOp, int root, NcclComm*, DeviceStream)> reduce;
  Call<NcclResult(const void*, void*, std::size_t, NcclType, NcclComm*, DeviceStream)> all_gather;
  Call<NcclResult(const void*, void*, std::size_t, NcclType, NcclOp, NcclComm*, DeviceStream)> reduce_scatter;
  Call<NcclResult(const void*, std::size_t, NcclType, int peer, NcclComm*, DeviceStream)> send;
  Call<NcclResult(void*, std::size_t, NcclType, int peer, NcclComm*, DeviceStream)> recv;
};

/// Calls visit(member, "ncclName") for every member: the one list of names.
template <class Table, class Visitor>
void for_each_nccl_call(Table& table, Visitor visit) {
  visit(table.get_version, "ncclGetVersion");
  visit(table.get_error_string, "ncclGetErrorString");
  visit(table.get_last_error, "ncclGetLastError");
  visit(table.get_unique_id, "ncclGetUniqueId");
  visit(table.comm_init_rank_config, "ncclCommInitRankConfig");
  visit(table.comm_split, "ncclCommSplit");
  visit(table.comm_finalize, "ncclCommFinalize");
  visit(table.comm_destroy, "ncclCommDestroy");
  visit(table.comm_abort, "ncclCommAbort");
  visit(table.comm_get_async_error, "ncclCommGetAsyncError");
  visit(table.group_start, "ncclGroupStart");
  visit(table.group_end, "ncclGroupEnd");
  visit(table.all_reduce, "ncclAllReduce");
  visit(table.broadcast, "ncclBroadcast");
  visit(table.reduce, "ncclReduce");
  visit(table.all_gather, "ncclAllGather");
  visit(table.reduce_scatter, "ncclReduceScatter");
  visit(table.send, "ncclSend");
  visit(table.recv, "ncclRecv");
}

/// Opens `library` (once per process; it stays open). Throws CommError: the loader's error, the missing call, or that
/// the version is older than 2.18.
std::shared_ptr<const NcclTable> load_nccl(const std::string& library = "libnccl.so.2");

/// "2.29.7"
std::string nccl_version_text(const NcclTable& table);

NcclType nccl_type_of(DataType type);
/// For bool, which travels as uint8, the sum is a logical or, the product a logical and.
NcclOp nccl_op_of(ReduceOp op, DataType type);

}  // namespace phalanx
