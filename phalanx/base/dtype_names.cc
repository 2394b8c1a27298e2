#include "phalanx/base/dtype_names.h"

#include <array>
#include <utility>

namespace phalanx {

std::string canonical_dtype(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 14> kNames = {{{"bf16", "bfloat16"},
                                                                                            {"bfloat16", "bfloat16"},
                                                                                            {"f16", "float16"},
                                                                                            {"fp16", "float16"},
                                                                                            {"half", "float16"},
                                                                                            {"float16", "float16"},
                                                                                            {"f32", "float32"},
                                                                                            {"fp32", "float32"},
                                                                                            {"float", "float32"},
                                                                                            {"float32", "float32"},
                                                                                            {"f64", "float64"},
                                                                                            {"fp64", "float64"},
                                                                                            {"double", "float64"},
                                                                                            {"float64", "float64"}}};
  constexpr std::string_view kPrefix = "torch.";
  const std::string_view bare = name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : name;
  for (const auto& [alias, canonical] : kNames) {
    if (bare == alias) return std::string(canonical);
  }
  return std::string(name);
}

}  // namespace phalanx
