// The basic types of communication: element types, reductions, verbs. Knows no tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace phalanx {

enum class DataType : std::uint8_t { f32, f64, f16, bf16, i32, i64, u8, boolean };
enum class ReduceOp : std::uint8_t { sum, avg, min, max, product };
enum class Verb : std::uint8_t {
  broadcast,
  all_reduce,
  reduce,
  all_gather,
  reduce_scatter,
  gather,
  scatter,
  all_to_all,
  send,
  recv,
  batch_isend_irecv,
  barrier
};

/// Options of memory that the ranks of one node share.
struct SymmetricOptions {
  // True: the peers' parts stay in this process's page tables between collectives, so they count in its memory (RSS),
  // as they do in the peers'. False: they are unmapped after each collective; the next one that reads them maps them
  // again, 16 pages per fault. Use false for data that is rarely read, such as shards.
  bool keeps_peers_mapped = true;
};

constexpr std::size_t element_size(DataType type) {
  switch (type) {
    case DataType::f64:
    case DataType::i64:
      return 8;
    case DataType::f32:
    case DataType::i32:
      return 4;
    case DataType::f16:
    case DataType::bf16:
      return 2;
    case DataType::u8:
    case DataType::boolean:
      return 1;
  }
  return 0;
}

std::string_view name_of(DataType type);  // "float32", "bfloat16", ...
std::string_view name_of(ReduceOp op);    // "sum", "avg", ...
std::string_view name_of(Verb verb);      // "all_reduce", ...

}  // namespace phalanx
