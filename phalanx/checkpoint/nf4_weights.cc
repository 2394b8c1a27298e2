#include "phalanx/checkpoint/nf4_weights.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <system_error>
#include <unordered_map>

#include "phalanx/base/error.h"
#include "phalanx/base/json_reader.h"
#include "phalanx/base/json_text.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/files/weight_files.h"
#include "phalanx/models/config/lora_config.h"

namespace phalanx {
namespace {

using safetensors::Dtype;
constexpr const char *kAbsmax = ".absmax", *kNestedAbsmax = ".nested_absmax", *kQuantMap = ".quant_map",
                     *kNestedQuantMap = ".nested_quant_map", *kQuantState = ".quant_state.bitsandbytes__";
constexpr const char* kNf4State = ".quant_state.bitsandbytes__nf4";

at::Tensor in_bytes(std::span<const std::byte> bytes, at::IntArrayRef shape) {
  at::Tensor tensor = at::empty(shape, at::TensorOptions(at::kByte));
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

bool are_finite(std::span<const std::byte> bytes) {
  for (std::size_t at = 0; at + sizeof(float) <= bytes.size(); at += sizeof(float)) {
    float value = 0;
    std::memcpy(&value, bytes.data() + at, sizeof(value));
    if (!std::isfinite(value)) return false;
  }
  return true;
}

bool are_same_values(std::span<const std::byte> bytes, const at::Tensor& values) {
  const at::Tensor on_host = values.cpu();
  return bytes.size() == on_host.nbytes() && std::memcmp(bytes.data(), on_host.const_data_ptr(), bytes.size()) == 0;
}

}  // namespace

BitsAndBytesFiles::BitsAndBytesFiles(const std::filesystem::path& path) {
  if (std::error_code error; std::filesystem::is_regular_file(path / kManifestName, error)) return;
  for (const auto& file : weight_files(path).paths) files_.emplace_back(file.string());
  for (const safetensors::File& file : files_) {
    for (const safetensors::TensorInfo& info : file.tensors()) {
      const std::size_t state = info.name.find(kQuantState);
      if (state != std::string::npos) names_.push_back(info.name.substr(0, state));
    }
  }
}

bool BitsAndBytesFiles::has(const std::string& name) const { return std::ranges::find(names_, name) != names_.end(); }

bool BitsAndBytesFiles::is_part(const std::string& name) const {
  if (const std::size_t state = name.find(kQuantState); state != std::string::npos) return has(name.substr(0, state));
  return std::ranges::any_of(std::array{kAbsmax, kNestedAbsmax, kQuantMap, kNestedQuantMap},
                             [&](std::string_view suffix) {
                               return name.ends_with(suffix) && has(name.substr(0, name.size() - suffix.size()));
                             });
}

BitsAndBytesFiles::Found BitsAndBytesFiles::find(const std::string& name) const {
  for (const safetensors::File& file : files_) {
    if (const auto* info = file.find(name)) return {&file, info};
  }
  return {};
}

BitsAndBytesFiles::Found BitsAndBytesFiles::part(const std::string& name, const std::string& suffix, Dtype dtype,
                                                 std::int64_t elements) const {
  const Found found = find(name + suffix);
  if (found.info == nullptr) {
    throw CheckpointError(fmt::format("{}: the 4-bit matrix {} has no {}{}", files_.front().path(),
                                      safetensors::quote_name(name), safetensors::quote_name(name + suffix),
                                      suffix == kNestedAbsmax
                                          ? ": its scales are not quantised; expected double quantisation "
                                            "(bnb_4bit_use_double_quant = True), or the model in 16 or 32 bits"
                                          : ""));
  }
  const auto size = static_cast<std::uint64_t>(elements) * safetensors::element_size(dtype);
  if (found.info->dtype == dtype && found.info->size() == size) return found;
  throw CheckpointError(fmt::format("{}: {} is {} {}; expected {} elements of {}", found.file->path(),
                                    safetensors::quote_name(found.info->name), safetensors::name_of(found.info->dtype),
                                    safetensors::format_shape(found.info->shape), elements,
                                    safetensors::name_of(dtype)));
}

kernels::Nf4Weight BitsAndBytesFiles::read(const std::string& name, std::int64_t rows, std::int64_t columns,
                                           std::shared_ptr<const kernels::Nf4Tables> tables) const {
  const Found state = find(name + kNf4State);
  if (state.info == nullptr) {
    throw CheckpointError(
        fmt::format("{}: the 4-bit matrix {} is not in NF4 (there is no {}): expected bnb_4bit_quant_type = \"nf4\"",
                    files_.front().path(), safetensors::quote_name(name), kNf4State + 1));
  }
  const std::string where = fmt::format("{}: {}", state.file->path(), safetensors::quote_name(state.info->name));
  const std::span<const std::byte> text = state.file->bytes(*state.info);
  const auto json =
      parse_json_object<CheckpointError>(std::string(reinterpret_cast<const char*>(text.data()), text.size()), where);
  const JsonReader<CheckpointError> read(json, where);
  if (read.get<std::int64_t>("blocksize") != kNf4Block) read.fail("blocksize", "64");
  const std::int64_t elements = rows * columns, blocks = elements / kNf4Block, nested = nf4_nested_scales(elements);
  const Found nested_absmax = part(name, kNestedAbsmax, Dtype::f32, nested);
  if (read.get<std::int64_t>("nested_blocksize") != kNf4NestedBlock) read.fail("nested_blocksize", "256");
  if (read.get<std::vector<std::int64_t>>("shape") != std::vector<std::int64_t>{rows, columns}) {
    read.fail("shape", fmt::format("[{}, {}]", rows, columns).c_str());
  }
  const Found codes = part(name, "", Dtype::u8, elements / 2), absmax = part(name, kAbsmax, Dtype::u8, blocks);
  for (const auto& [suffix, values] : {std::pair{kQuantMap, tables->values}, {kNestedQuantMap, tables->scales}}) {
    const Found map = part(name, suffix, Dtype::f32, values.numel());
    if (are_same_values(map.file->bytes(*map.info), values)) continue;
    throw CheckpointError(
        fmt::format("{}: {} holds other values than those of bitsandbytes' NF4, which alone are known",
                    map.file->path(), safetensors::quote_name(map.info->name)));
  }
  const at::Tensor scales = at::empty({nf4_nested_bytes(elements)}, at::TensorOptions(at::kByte));
  auto* const bytes = scales.mutable_data_ptr<std::uint8_t>();
  const std::span<const std::byte> given = nested_absmax.file->bytes(*nested_absmax.info);
  std::memcpy(bytes, given.data(), given.size());
  const auto offset = static_cast<float>(read.get<double>("nested_offset"));
  if (!std::isfinite(offset) || !are_finite(given)) {
    throw CheckpointError(fmt::format("{}: the scales of {} are not all finite", nested_absmax.file->path(),
                                      safetensors::quote_name(name)));
  }
  std::memcpy(bytes + given.size(), &offset, sizeof(offset));
  const at::Device device = tables->values.device();
  return {in_bytes(codes.file->bytes(*codes.info), {rows, columns / 2}).to(device),
          in_bytes(absmax.file->bytes(*absmax.info), {rows, columns / kNf4Block}).to(device), scales.to(device),
          std::move(tables)};
}

std::vector<NamedTensor> dense_weights(const std::vector<NamedTensor>& tensors) {
  const std::string absmax = models::kNf4Scales[0], nested = models::kNf4Scales[1];
  std::unordered_map<std::string, at::Tensor> scales;
  for (const NamedTensor& one : tensors) {
    if (one.name.ends_with(".weight" + absmax) || one.name.ends_with(".weight" + nested)) {
      scales.emplace(one.name, one.tensor);
    }
  }
  std::vector<NamedTensor> dense;
  std::shared_ptr<const kernels::Nf4Tables> tables;
  for (const NamedTensor& one : tensors) {
    if (scales.contains(one.name)) continue;
    dense.push_back(one);
    if (!scales.contains(one.name + absmax)) continue;
    if (!scales.contains(one.name + nested)) {
      throw CheckpointError(fmt::format("'{}' is a matrix in 4 bits without its '{}'", one.name, one.name + nested));
    }
    if (!tables) tables = kernels::Nf4Tables::make(one.tensor.device());
    const kernels::Nf4Weight stored{one.tensor.detach(), scales.at(one.name + absmax), scales.at(one.name + nested),
                                    tables};
    dense.back().tensor = kernels::dequantise_nf4(stored, {.columns = 2 * one.tensor.size(1)}, at::kFloat);
  }
  return dense;
}

}  // namespace phalanx
