#include "phalanx/checkpoint/files/weights_identity.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/checkpoint/files/weight_index.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kWholeFileBytes = 64 << 20;
constexpr std::size_t kSamples = 8, kSampleBytes = 4096;

/// Collects hashes and combines them into one at the end.
class HashChain {
 public:
  void add(std::uint64_t hash) { text_ += format_hash(hash); }
  void add(std::span<const std::byte> bytes) { add(hash_block(bytes)); }
  std::string result() const { return hash_of_text(text_); }

 private:
  std::string text_;
};

bool is_regular(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

std::vector<std::filesystem::path> safetensors_files(const std::filesystem::path& path) {
  if (is_regular(path)) return {path};
  require_one_model(path);
  const auto index = path / kWeightIndexName, single = path / kSingleWeightsName;
  std::set<std::filesystem::path> files;
  if (is_regular(index)) {
    for (const auto& [tensor, name] : parse_weight_index(index.string(), read_file(index, kMaxWeightIndexBytes))) {
      files.insert(path / name);
    }
  } else if (is_regular(single)) {
    files.insert(single);
  } else {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
      if (entry.path().extension() == ".safetensors") files.insert(entry.path());
    }
  }
  if (files.empty()) throw CheckpointError(fmt::format("{} holds no weights", path.string()));
  return {files.begin(), files.end()};
}

void add_samples(std::span<const std::byte> bytes, HashChain& chain) {
  if (bytes.size() <= kSamples * kSampleBytes) return chain.add(bytes);
  for (std::size_t i = 0; i < kSamples; ++i) {  // the first sample is at the start, the last at the end
    chain.add(bytes.subspan((bytes.size() - kSampleBytes) / (kSamples - 1) * i, kSampleBytes));
  }
  chain.add(bytes.last(kSampleBytes));
}

std::uint64_t add_file(const std::filesystem::path& path, HashChain& chain) {
  const safetensors::File file(path.string());
  const std::string header = safetensors::format_header(file.header());
  chain.add(std::as_bytes(std::span(header)));
  const std::uint64_t size = std::filesystem::file_size(path);
  for (const auto& tensor : file.tensors()) {
    if (size <= kWholeFileBytes) {
      chain.add(file.bytes(tensor));
    } else {
      add_samples(file.bytes(tensor), chain);
    }
  }
  return size;
}

nlohmann::json step_identity(const std::filesystem::path& folder) {
  const Manifest manifest = read_step_manifest(folder);
  HashChain chain;
  std::uint64_t bytes = 0;
  for (const auto& file : manifest.files) {
    chain.add(std::as_bytes(std::span(file.name)));
    for (const std::uint64_t hash : file.block_hashes) chain.add(hash);
    bytes += file.size;
  }
  return {{"step", manifest.step}, {"bytes", bytes}, {"hash", chain.result()}};
}

}  // namespace

nlohmann::json weights_identity(const std::filesystem::path& path) {
  if (is_regular(path / kManifestName)) return step_identity(path);
  HashChain chain;
  std::uint64_t bytes = 0;
  for (const auto& file : safetensors_files(path)) bytes += add_file(file, chain);
  return {{"bytes", bytes}, {"hash", chain.result()}};
}

}  // namespace phalanx
