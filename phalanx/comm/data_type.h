// The element types that can be communicated and sharded (types.h), and libtorch's names for them.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "phalanx/comm/types.h"

namespace phalanx {

c10::ScalarType scalar_type_of(DataType type) noexcept;
/// nullopt: the scalar type has no DataType.
std::optional<DataType> find_data_type(c10::ScalarType type) noexcept;
/// Throws Error for a scalar type without a DataType: complex and quantized ones, int8, int16, float8.
DataType data_type_of(c10::ScalarType type);

}  // namespace phalanx
