// For tests: the weights of scripts/make_llama_golden.py and make_hf_golden.py, which are a formula of the tensor's
// name.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <string>

namespace phalanx::models {

/// `adds_one`: of a model whose norms add one to their weights. Bytes are codes in 4 bits, or scales of such.
/// REQUIRES: `parameter` is fp32 or bytes, and contiguous.
inline void set_golden_weight(const std::string& name, const at::Tensor& parameter, bool adds_one = false) {
  std::uint32_t crc = 0xFFFFFFFFu;
  for (const char c : name) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
  }
  crc = ~crc;
  const at::NoGradGuard no_grad;
  if (parameter.scalar_type() == at::kByte) {
    auto* bytes = parameter.mutable_data_ptr<std::uint8_t>();
    for (std::int64_t i = 0; i < parameter.numel(); ++i) {
      const auto x = static_cast<std::uint32_t>(static_cast<std::uint64_t>(i) * 2654435761u + crc);
      bytes[i] = static_cast<std::uint8_t>(name.ends_with("_scales") ? 122 + (x >> 16) % 3 : x >> 24);
    }
    return;
  }
  auto* out = parameter.mutable_data_ptr<float>();
  const bool is_scale =
      name.find("norm") != std::string::npos || (name.find(".ln_") != std::string::npos && name.ends_with("weight"));
  const double shift = is_scale && !adds_one ? 1.0 : 0.0;
  for (std::int64_t i = 0; i < parameter.numel(); ++i) {
    const auto x = static_cast<std::uint32_t>(static_cast<std::uint64_t>(i) * 2654435761u + crc);
    out[i] = static_cast<float>((x / 4294967296.0 - 0.5) * 0.4 + shift);
  }
}

}  // namespace phalanx::models
