#include "phalanx/comm/types.h"

namespace phalanx {

std::string_view name_of(DataType type) {
  switch (type) {
    case DataType::f32:
      return "float32";
    case DataType::f64:
      return "float64";
    case DataType::f16:
      return "float16";
    case DataType::bf16:
      return "bfloat16";
    case DataType::i32:
      return "int32";
    case DataType::i64:
      return "int64";
    case DataType::u8:
      return "uint8";
    case DataType::boolean:
      return "bool";
  }
  return "unknown";
}

std::string_view name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::avg:
      return "avg";
    case ReduceOp::min:
      return "min";
    case ReduceOp::max:
      return "max";
    case ReduceOp::product:
      return "product";
  }
  return "unknown";
}

std::string_view name_of(Verb verb) {
  switch (verb) {
    case Verb::broadcast:
      return "broadcast";
    case Verb::all_reduce:
      return "all_reduce";
    case Verb::reduce:
      return "reduce";
    case Verb::all_gather:
      return "all_gather";
    case Verb::reduce_scatter:
      return "reduce_scatter";
    case Verb::gather:
      return "gather";
    case Verb::scatter:
      return "scatter";
    case Verb::all_to_all:
      return "all_to_all";
    case Verb::send:
      return "send";
    case Verb::recv:
      return "recv";
    case Verb::batch_isend_irecv:
      return "batch_isend_irecv";
    case Verb::barrier:
      return "barrier";
  }
  return "unknown";
}

}  // namespace phalanx
