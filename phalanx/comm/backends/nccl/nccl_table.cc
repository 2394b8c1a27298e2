#include "phalanx/comm/backends/nccl/nccl_table.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr int kOldestNccl = 21800;  // ncclCommSplit

template <class Result, class... Arguments>
bool bind_nccl_call(std::function<Result(Arguments...)>& call, void* symbol) {
  if (symbol == nullptr) return false;
  call = reinterpret_cast<Result (*)(Arguments...)>(symbol);
  return true;
}

int nccl_version_number(const NcclTable& table) {
  int version = 0;
  table.get_version(&version);
  return version;
}

std::string nccl_version_words(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

std::shared_ptr<const NcclTable> load_nccl(const std::string& library) {
  // Never closed: NCCL starts threads.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    throw CommError(fmt::format("NCCL cannot be loaded: {}", why != nullptr ? why : "unknown error"));
  }
  auto table = std::make_shared<NcclTable>();
  std::string missing;
  for_each_nccl_call(*table, [&](auto& call, const char* name) {
    if (!bind_nccl_call(call, dlsym(handle, name))) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", name);
  });
  if (table->get_version) {
    const int version = nccl_version_number(*table);
    if (version < kOldestNccl)
      throw CommError(fmt::format("{} is NCCL {}; 2.18 or later is needed", library, nccl_version_words(version)));
  }
  if (!missing.empty()) throw CommError(fmt::format("{} lacks {}; NCCL 2.18 or later is needed", library, missing));
  return table;
}

std::string nccl_version_text(const NcclTable& table) { return nccl_version_words(nccl_version_number(table)); }

NcclType nccl_type_of(DataType type) {
  switch (type) {
    case DataType::f32:
      return NcclType::float32;
    case DataType::f64:
      return NcclType::float64;
    case DataType::f16:
      return NcclType::float16;
    case DataType::bf16:
      return NcclType::bfloat16;
    case DataType::i32:
      return NcclType::int32;
    case DataType::i64:
      return NcclType::int64;
    case DataType::u8:
    case DataType::boolean:
      return NcclType::uint8;
  }
  return NcclType::uint8;
}

NcclOp nccl_op_of(ReduceOp op, DataType type) {
  const bool is_bool = type == DataType::boolean;
  switch (op) {
    case ReduceOp::sum:
      return is_bool ? NcclOp::max : NcclOp::sum;
    case ReduceOp::avg:
      return NcclOp::avg;
    case ReduceOp::min:
      return NcclOp::min;
    case ReduceOp::max:
      return NcclOp::max;
    case ReduceOp::product:
      return is_bool ? NcclOp::min : NcclOp::product;
  }
  return NcclOp::sum;
}

}  // namespace phalanx
