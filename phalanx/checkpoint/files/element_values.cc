#include "phalanx/checkpoint/files/element_values.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace phalanx {
namespace {

using safetensors::Dtype;

double half_value(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000U} << 16, exponent = (bits >> 10) & 31U,
                      mantissa = bits & 1023U;
  if (exponent == 0) {  // zero, or a multiple of 2^-24
    const double magnitude = mantissa * 0x1p-24;
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t widened = exponent == 31 ? 255 : exponent + 112;
  return std::bit_cast<float>(sign | widened << 23 | mantissa << 13);
}

std::uint16_t half_bits(float value) {
  const auto all = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((all >> 16) & 0x8000U);
  std::uint32_t bits = all & 0x7fffffffU;
  if (bits > 0x7f800000U) return sign | 0x7e00U;   // NaN
  if (bits >= 0x477ff000U) return sign | 0x7c00U;  // 65520 and more round to infinity
  if (bits < 0x38800000U) {
    // Below 2^-14: adding 1/2 puts the float's last bit at 2^-24, and rounds as the addition does.
    const float shifted = std::bit_cast<float>(bits) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U));
  }
  bits += 0xfffU + ((bits >> 13) & 1U);  // half a unit of the result, to even
  return static_cast<std::uint16_t>(sign | ((bits - (112U << 23)) >> 13));
}

double bfloat16_value(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

std::uint16_t bfloat16_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return 0x7fc0U;
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

/// 1 sign, 4 exponent (bias 7) and 3 mantissa bits, no infinity.
double float8_e4m3_value(std::uint8_t bits) {
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  if ((bits & 0x7f) == 0x7f) magnitude = std::numeric_limits<double>::quiet_NaN();
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

double float8_e5m2_value(std::uint8_t bits) { return half_value(static_cast<std::uint16_t>(bits << 8)); }

template <class Stored, class Value>
void decode_each(std::span<const std::byte> bytes, std::span<double> values, Value value) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, bytes.data() + i * sizeof stored, sizeof stored);
    values[i] = value(stored);
  }
}

template <class Stored, class Bits>
void encode_each(std::span<const double> values, std::span<std::byte> bytes, Bits bits) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Stored stored = bits(values[i]);
    std::memcpy(bytes.data() + i * sizeof stored, &stored, sizeof stored);
  }
}

}  // namespace

bool is_floating_point(Dtype dtype) {
  switch (dtype) {
    case Dtype::f8_e4m3:
    case Dtype::f8_e5m2:
    case Dtype::f16:
    case Dtype::bf16:
    case Dtype::f32:
    case Dtype::f64:
      return true;
    default:
      return false;
  }
}

void decode_elements(Dtype dtype, std::span<const std::byte> bytes, std::span<double> values) {
  const auto plain = [](auto value) { return static_cast<double>(value); };
  switch (dtype) {
    case Dtype::boolean:
    case Dtype::u8:
      return decode_each<std::uint8_t>(bytes, values, plain);
    case Dtype::i8:
      return decode_each<std::int8_t>(bytes, values, plain);
    case Dtype::f8_e4m3:
      return decode_each<std::uint8_t>(bytes, values, float8_e4m3_value);
    case Dtype::f8_e5m2:
      return decode_each<std::uint8_t>(bytes, values, float8_e5m2_value);
    case Dtype::u16:
      return decode_each<std::uint16_t>(bytes, values, plain);
    case Dtype::i16:
      return decode_each<std::int16_t>(bytes, values, plain);
    case Dtype::f16:
      return decode_each<std::uint16_t>(bytes, values, half_value);
    case Dtype::bf16:
      return decode_each<std::uint16_t>(bytes, values, bfloat16_value);
    case Dtype::u32:
      return decode_each<std::uint32_t>(bytes, values, plain);
    case Dtype::i32:
      return decode_each<std::int32_t>(bytes, values, plain);
    case Dtype::f32:
    case Dtype::c64:
      return decode_each<float>(bytes, values, plain);
    case Dtype::u64:
      return decode_each<std::uint64_t>(bytes, values, plain);
    case Dtype::i64:
      return decode_each<std::int64_t>(bytes, values, plain);
    case Dtype::f64:
      return decode_each<double>(bytes, values, plain);
  }
}

bool can_encode(Dtype dtype) {
  return dtype == Dtype::f64 || dtype == Dtype::f32 || dtype == Dtype::f16 || dtype == Dtype::bf16;
}

void encode_elements(Dtype dtype, std::span<const double> values, std::span<std::byte> bytes) {
  switch (dtype) {
    case Dtype::f64:
      return encode_each<double>(values, bytes, [](double value) { return value; });
    case Dtype::f32:
      return encode_each<float>(values, bytes, [](double value) { return static_cast<float>(value); });
    case Dtype::f16:
      return encode_each<std::uint16_t>(values, bytes, [](double v) { return half_bits(static_cast<float>(v)); });
    case Dtype::bf16:
      return encode_each<std::uint16_t>(values, bytes, [](double v) { return bfloat16_bits(static_cast<float>(v)); });
    default:
      return;
  }
}

}  // namespace phalanx
