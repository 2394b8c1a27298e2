#include "phalanx/optim/widen.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace phalanx {
namespace {

template <class T>
void widen_values(std::size_t count, const T* from, float* to) {
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

template <class T>
void narrow_values(std::size_t count, const float* from, T* to) {
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
}

template <class T>
void adopt_values(std::size_t count, const T* values, float* masters) {
  for (std::size_t i = 0; i < count; ++i) {
    const bool changed = static_cast<T>(masters[i]).x != values[i].x;  // by their bits
    masters[i] = changed ? static_cast<float>(values[i]) : masters[i];
  }
}

}  // namespace

void widen(c10::ScalarType dtype, std::size_t count, const void* from, float* to) {
  if (dtype == c10::ScalarType::Half) return widen_values(count, static_cast<const c10::Half*>(from), to);
  widen_values(count, static_cast<const c10::BFloat16*>(from), to);
}

void narrow(c10::ScalarType dtype, std::size_t count, const float* from, void* to) {
  if (dtype == c10::ScalarType::Half) return narrow_values(count, from, static_cast<c10::Half*>(to));
  narrow_values(count, from, static_cast<c10::BFloat16*>(to));
}

void adopt_changes(c10::ScalarType dtype, std::size_t count, const void* values, float* masters) {
  if (dtype == c10::ScalarType::Half) return adopt_values(count, static_cast<const c10::Half*>(values), masters);
  adopt_values(count, static_cast<const c10::BFloat16*>(values), masters);
}

}  // namespace phalanx
