// A checkpoint's manifest.json, as it is and under a checksum that fits: behind it stands what only a hostile file has.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/models/config/llama_json.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = fuzz::text_of(data, size);
  fuzz::parse([&] { parse_manifest(fuzz::kFile, text); });
  return fuzz::parse([&] {
    const auto hash = hash_block(std::as_bytes(std::span(data, size)));
    const auto manifest =
        parse_manifest(fuzz::kFile, fmt::format("{{\"checksum\": \"xxh3:{}\",\n{}", format_hash(hash), text));
    for (const auto& file : manifest.files) {
      fuzz::require(file.name.find('/') == std::string::npos && file.name != "..", "files are in the directory");
    }
    parse_manifest(fuzz::kFile, format_manifest(manifest));
    const auto metadata = nlohmann::json::parse(manifest.metadata);
    if (metadata.contains("model") && metadata["model"].is_object()) {
      models::llama_from_metadata(metadata["model"], fuzz::kFile);
    }
  });
}
