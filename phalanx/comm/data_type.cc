#include "phalanx/comm/data_type.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr std::array<std::pair<DataType, c10::ScalarType>, 8> kTypes = {{{DataType::f32, c10::ScalarType::Float},
                                                                         {DataType::f64, c10::ScalarType::Double},
                                                                         {DataType::f16, c10::ScalarType::Half},
                                                                         {DataType::bf16, c10::ScalarType::BFloat16},
                                                                         {DataType::i32, c10::ScalarType::Int},
                                                                         {DataType::i64, c10::ScalarType::Long},
                                                                         {DataType::u8, c10::ScalarType::Byte},
                                                                         {DataType::boolean, c10::ScalarType::Bool}}};

}  // namespace

c10::ScalarType scalar_type_of(DataType type) noexcept {
  for (const auto& [own, torchs] : kTypes)
    if (own == type) return torchs;
  return c10::ScalarType::Undefined;
}

std::optional<DataType> find_data_type(c10::ScalarType type) noexcept {
  for (const auto& [own, torchs] : kTypes)
    if (torchs == type) return own;
  return std::nullopt;
}

DataType data_type_of(c10::ScalarType type) {
  if (const auto found = find_data_type(type)) return *found;
  throw Error(
      fmt::format("{} tensors are neither communicated nor sharded: expected float32, float64, float16, "
                  "bfloat16, int32, int64, uint8 or bool",
                  c10::toString(type)));
}

}  // namespace phalanx
