// Compares nccl_table.h with NCCL's own header. Compiled by scripts/cuda_check.sh and never linked.
#include <nccl.h>

#include <type_traits>

#include "phalanx/comm/backends/nccl/nccl_table.h"

namespace phalanx {
namespace {

// Passed alike by the C calling convention: pointers as pointers, enumerations as int, structures by size.
template <class Ours, class Theirs>
constexpr bool passed_alike() {
  return sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs) &&
         std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> && std::is_class_v<Ours> == std::is_class_v<Theirs>;
}

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class R, class... A, class S, class... B>
requires(sizeof...(A) == sizeof...(B)) struct SameCall<std::function<R(A...)>, S(B...)>
    : std::bool_constant<passed_alike<R, S>() && (passed_alike<A, B>() && ...)> {
};

#define PHALANX_SAME_CALL(member, function) \
  static_assert(SameCall<decltype(NcclTable::member), decltype(::function)>::value, #function)
PHALANX_SAME_CALL(get_version, ncclGetVersion);
PHALANX_SAME_CALL(get_error_string, ncclGetErrorString);
PHALANX_SAME_CALL(get_last_error, ncclGetLastError);
PHALANX_SAME_CALL(get_unique_id, ncclGetUniqueId);
PHALANX_SAME_CALL(comm_init_rank_config, ncclCommInitRankConfig);
PHALANX_SAME_CALL(comm_split, ncclCommSplit);
PHALANX_SAME_CALL(comm_finalize, ncclCommFinalize);
PHALANX_SAME_CALL(comm_destroy, ncclCommDestroy);
PHALANX_SAME_CALL(comm_abort, ncclCommAbort);
PHALANX_SAME_CALL(comm_get_async_error, ncclCommGetAsyncError);
PHALANX_SAME_CALL(group_start, ncclGroupStart);
PHALANX_SAME_CALL(group_end, ncclGroupEnd);
PHALANX_SAME_CALL(all_reduce, ncclAllReduce);
PHALANX_SAME_CALL(broadcast, ncclBroadcast);
PHALANX_SAME_CALL(reduce, ncclReduce);
PHALANX_SAME_CALL(all_gather, ncclAllGather);
PHALANX_SAME_CALL(reduce_scatter, ncclReduceScatter);
PHALANX_SAME_CALL(send, ncclSend);
PHALANX_SAME_CALL(recv, ncclRecv);
#undef PHALANX_SAME_CALL

#define PHALANX_SAME_VALUE(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs), #theirs)
PHALANX_SAME_VALUE(NcclResult::success, ncclSuccess);
PHALANX_SAME_VALUE(NcclResult::unhandled_cuda_error, ncclUnhandledCudaError);
PHALANX_SAME_VALUE(NcclResult::system_error, ncclSystemError);
PHALANX_SAME_VALUE(NcclResult::internal_error, ncclInternalError);
PHALANX_SAME_VALUE(NcclResult::invalid_argument, ncclInvalidArgument);
PHALANX_SAME_VALUE(NcclResult::invalid_usage, ncclInvalidUsage);
PHALANX_SAME_VALUE(NcclResult::remote_error, ncclRemoteError);
PHALANX_SAME_VALUE(NcclResult::in_progress, ncclInProgress);
PHALANX_SAME_VALUE(NcclOp::sum, ncclSum);
PHALANX_SAME_VALUE(NcclOp::product, ncclProd);
PHALANX_SAME_VALUE(NcclOp::max, ncclMax);
PHALANX_SAME_VALUE(NcclOp::min, ncclMin);
PHALANX_SAME_VALUE(NcclOp::avg, ncclAvg);
PHALANX_SAME_VALUE(NcclType::int8, ncclInt8);
PHALANX_SAME_VALUE(NcclType::uint8, ncclUint8);
PHALANX_SAME_VALUE(NcclType::int32, ncclInt32);
PHALANX_SAME_VALUE(NcclType::uint32, ncclUint32);
PHALANX_SAME_VALUE(NcclType::int64, ncclInt64);
PHALANX_SAME_VALUE(NcclType::uint64, ncclUint64);
PHALANX_SAME_VALUE(NcclType::float16, ncclFloat16);
PHALANX_SAME_VALUE(NcclType::float32, ncclFloat32);
PHALANX_SAME_VALUE(NcclType::float64, ncclFloat64);
PHALANX_SAME_VALUE(NcclType::bfloat16, ncclBfloat16);
PHALANX_SAME_VALUE(kNcclNoColor, NCCL_SPLIT_NOCOLOR);
PHALANX_SAME_VALUE(NcclConfig::kUndefined, NCCL_CONFIG_UNDEF_INT);
#undef PHALANX_SAME_VALUE

static_assert(NcclConfig{}.magic == NCCL_API_MAGIC);
static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(offsetof(NcclConfig, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(NcclConfig, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(NcclConfig, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(NcclConfig, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(NcclConfig, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(NcclConfig, split_share) == offsetof(ncclConfig_t, splitShare));
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));

}  // namespace
}  // namespace phalanx
