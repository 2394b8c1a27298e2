#include "phalanx/checkpoint/files/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/json_number.h"
#include "phalanx/base/json_reader.h"
#include "phalanx/base/json_text.h"
#include "phalanx/checkpoint/files/block_hash.h"

namespace phalanx {
namespace {

constexpr int kManifestVersion = 1;
constexpr const char* kManifestFormat = "phalanx-checkpoint";

std::string checksum_line(std::string_view rest) {
  return fmt::format("{{\"checksum\": \"xxh3:{}\",\n", hash_of_text(rest));
}

nlohmann::json to_json(const ManifestFile& file) {
  auto hashes = nlohmann::json::array();
  for (const auto hash : file.block_hashes) hashes.push_back(format_hash(hash));
  nlohmann::json json = {{"name", file.name}, {"size", file.size}, {"xxh3", std::move(hashes)}};
  if (file.header_hash) json["header_xxh3"] = format_hash(*file.header_hash);
  return json;
}

/// A name that stays inside the checkpoint's directory.
bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

std::int64_t whole_number(const nlohmann::json& value, std::string_view what) {
  if (is_whole_number(value)) return value.get<std::int64_t>();
  throw CheckpointError(fmt::format("{} is {}: expected a whole number", what, value.dump().substr(0, 40)));
}

std::uint64_t hash_from_json(const nlohmann::json& json, std::string_view file) {
  if (!json.is_string()) throw CheckpointError(fmt::format("{} has the malformed hash {}", file, json.dump()));
  const auto& digits = json.get_ref<const std::string&>();
  std::uint64_t hash = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), hash, 16);
  if (digits.size() != 16 || error != std::errc() || end != digits.data() + digits.size())
    throw CheckpointError(fmt::format("{} has the malformed hash \"{}\"", file, digits));
  return hash;
}

ManifestFile file_from_json(const nlohmann::json& json) {
  const JsonReader<CheckpointError> read(json, "malformed manifest: an entry of \"files\"");
  ManifestFile file;
  file.name = read.get<std::string>("name");
  if (!is_plain_file_name(file.name)) throw CheckpointError(fmt::format("\"{}\" is not a file name", file.name));
  const std::int64_t size = whole_number(read.get<nlohmann::json>("size"), file.name + "'s size");
  if (size < 0) throw CheckpointError(fmt::format("{}'s size is {}: expected 0 or more", file.name, size));
  file.size = static_cast<std::uint64_t>(size);
  const auto& hashes = read.array("xxh3");
  const auto expected = file.size / kHashBlockBytes + (file.size % kHashBlockBytes != 0);
  if (hashes.size() != expected)
    throw CheckpointError(
        fmt::format("{} has {} hashes, {} bytes need {}", file.name, hashes.size(), file.size, expected));
  for (const auto& entry : hashes) file.block_hashes.push_back(hash_from_json(entry, file.name));
  if (json.contains("header_xxh3")) file.header_hash = hash_from_json(json["header_xxh3"], file.name);
  return file;
}

Manifest manifest_from_json(const nlohmann::json& json) {
  const JsonReader<CheckpointError> read(json, "malformed manifest");
  if (read.get<nlohmann::json>("format") != kManifestFormat) throw CheckpointError("it is not a manifest of Phalanx");
  if (const auto version = whole_number(read.get<nlohmann::json>("version"), "version"); version != kManifestVersion)
    throw CheckpointError(
        fmt::format("its format version is {}; this program reads version {}", version, kManifestVersion));
  if (whole_number(read.get<nlohmann::json>("block_bytes"), "block_bytes") != std::int64_t{kHashBlockBytes})
    throw CheckpointError(fmt::format("block_bytes is not {}", kHashBlockBytes));
  Manifest manifest;
  manifest.step = whole_number(read.get<nlohmann::json>("step"), "step");
  for (const auto& [name, value] : read.object("integers").items()) {
    manifest.integers[name] = whole_number(value, fmt::format("the integer \"{}\"", name));
  }
  manifest.metadata = read.object("metadata").dump();
  for (const auto& entry : read.array("files")) manifest.files.push_back(file_from_json(entry));
  return manifest;
}

}  // namespace

std::string format_manifest(const Manifest& manifest) {
  const auto metadata = nlohmann::json::parse(manifest.metadata, nullptr, /*allow_exceptions=*/false);
  if (!metadata.is_object()) throw CheckpointError("the metadata to save with a checkpoint is not a JSON object");
  std::string rest = fmt::format(
      "\"format\": \"{}\", \"version\": {}, \"step\": {},\n\"integers\": {},\n\"metadata\": {},\n\"block_bytes\": {},\n"
      "\"files\": [",
      kManifestFormat, kManifestVersion, manifest.step, nlohmann::json(manifest.integers).dump(), metadata.dump(),
      kHashBlockBytes);
  const char* separator = "\n";
  for (const auto& file : manifest.files) {
    rest += separator + to_json(file).dump();
    separator = ",\n";
  }
  rest += "\n]}\n";
  return checksum_line(rest) + rest;
}

Manifest parse_manifest(const std::string& file, std::string_view text) {
  const auto line_end = std::min(text.find('\n'), text.size() - 1);
  if (text.empty() || text.substr(0, line_end + 1) != checksum_line(text.substr(line_end + 1)))
    throw CheckpointError(fmt::format("{}: damaged: its checksum does not match its contents", file));
  const auto json = parse_json_object<CheckpointError>(text, file);
  try {
    return manifest_from_json(json);
  } catch (const nlohmann::json::exception& error) {
    throw CheckpointError(fmt::format("{}: malformed manifest: {}", file, json_value_fault(error)));
  } catch (const CheckpointError& error) {
    throw CheckpointError(fmt::format("{}: {}", file, error.what()));
  }
}

std::string format_manifest_file(const ManifestFile& file) { return to_json(file).dump(); }

ManifestFile parse_manifest_file(const std::string& text) { return file_from_json(nlohmann::json::parse(text)); }

}  // namespace phalanx
