#include "phalanx/data/token_sidecar.h"

#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "phalanx/base/content_hash.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_text.h"

namespace phalanx::data {
namespace {

constexpr const char* kSidecarFormat = "phalanx.tokens";
constexpr std::int64_t kSidecarVersion = 1, kMaskedVersion = 2;
constexpr std::uintmax_t kMaxSidecarBytes = 1 << 20;
constexpr const char* kNone = "none";

std::string prefix_of(const std::string& bin_path) {
  const bool is_bin = bin_path.size() > 4 && bin_path.ends_with(".bin");
  return is_bin ? bin_path.substr(0, bin_path.size() - 4) : bin_path;
}

}  // namespace

std::string sidecar_path(const std::string& bin_path) { return prefix_of(bin_path) + ".json"; }
std::string mask_path(const std::string& bin_path) { return prefix_of(bin_path) + ".mask"; }

std::optional<TokenSidecar> read_sidecar(const std::string& bin_path) {
  const std::string path = sidecar_path(bin_path);
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return std::nullopt;
  if (std::filesystem::file_size(path, error) > kMaxSidecarBytes || error) return std::nullopt;
  const std::string text = read_file(path);
  if (text.find(kSidecarFormat) == std::string::npos) return std::nullopt;
  const nlohmann::json json = parse_json_object<DataError>(text, path);
  if (const auto format = json.find("format"); format == json.end() || *format != kSidecarFormat) return std::nullopt;
  const auto fail = [&](const char* key, const std::string& expected, const nlohmann::json& found) {
    throw DataError(
        fmt::format("{}: \"{}\": expected {}, found {}", path, key, expected, found.dump(-1, ' ', true).substr(0, 60)));
  };
  const auto number = [&](const char* key) -> std::optional<std::int64_t> {
    const auto found = json.find(key);
    if (found == json.end() || found->is_null()) return std::nullopt;
    if (!found->is_number_unsigned() || found->get<std::uint64_t>() > (std::uint64_t{1} << 60)) {
      fail(key, "a number of 0 or more", *found);
    }
    return found->get<std::int64_t>();
  };
  const auto text_of = [&](const char* key) -> std::string {
    const auto found = json.find(key);
    if (found == json.end() || found->is_null()) return "";
    if (!found->is_string()) fail(key, "a string", *found);
    return found->get<std::string>();
  };
  const std::int64_t version = number("version").value_or(kSidecarVersion);
  if (version != kSidecarVersion && version != kMaskedVersion) {
    fail("version", "1 or 2 (a later version of Phalanx wrote it)", json["version"]);
  }
  TokenSidecar sidecar{.tokens = number("tokens"),
                       .documents = number("documents"),
                       .vocab_size = number("vocab_size").value_or(0),
                       .tokenizer = text_of("tokenizer"),
                       .content = text_of("content"),
                       .set_aside = text_of("set_aside"),
                       .mask = text_of("mask")};
  if ((version == kMaskedVersion) != !sidecar.mask.empty()) {
    fail("mask", version == kMaskedVersion ? "the hash of the mask" : "none in version 1", json["mask"]);
  }
  if (const auto around = json.find("special_tokens"); around != json.end() && !around->is_null()) {
    if (!around->is_boolean()) fail("special_tokens", "true or false", *around);
    sidecar.special_tokens = around->get<bool>();
  }
  if (const auto end = json.find("document_end"); end != json.end() && !end->is_null()) {
    if (*end != kNone && !end->is_number_unsigned()) fail("document_end", "an id, or \"none\"", *end);
    sidecar.document_end = *end == kNone ? kNoDocumentEnd : number("document_end");
    if (sidecar.vocab_size > 0 && *sidecar.document_end >= sidecar.vocab_size) {
      fail("document_end", fmt::format("an id below \"vocab_size\", {}, or \"none\"", sidecar.vocab_size), *end);
    }
  }
  if (const std::string type = text_of("type"); !type.empty()) {
    sidecar.type = token_type_named(type);
    if (!sidecar.type) fail("type", "uint8, int8, uint16, int16, uint32, int32 or int64", json["type"]);
  }
  return sidecar;
}

std::string hash_of_ids(TokenType type, std::span<const std::byte> ids) {
  constexpr std::size_t kWholeBytes = std::size_t{4} << 20;
  constexpr std::size_t kBlocks = 256, kBlockBytes = kWholeBytes / kBlocks;
  ContentHash hash;
  hash.add(to_string(type)).add(static_cast<std::int64_t>(ids.size()));
  if (ids.size() <= kWholeBytes) return hash.add_bytes(ids).hex();
  const std::size_t last = ids.size() - kBlockBytes, stride = last / (kBlocks - 1);
  for (std::size_t i = 0; i + 1 < kBlocks; ++i) hash.add_bytes(ids.subspan(i * stride, kBlockBytes));
  return hash.add_bytes(ids.subspan(last)).hex();
}

std::string document_end_text(std::int64_t id) {
  return id == kNoDocumentEnd ? std::string("by no token") : fmt::format("by token {}", id);
}

nlohmann::json document_end_json(std::int64_t id) {
  return id == kNoDocumentEnd ? nlohmann::json(kNone) : nlohmann::json(id);
}

bool names_mask(const std::string& bin_path) {
  try {
    const std::optional<TokenSidecar> sidecar = read_sidecar(bin_path);
    return sidecar && !sidecar->mask.empty();
  } catch (const DataError&) {
    return std::filesystem::exists(sidecar_path(bin_path));  // a damaged one of Phalanx's
  }
}

bool is_foreign_mask(const std::string& bin_path) {
  std::error_code error;
  return std::filesystem::exists(mask_path(bin_path), error) && !names_mask(bin_path);
}

std::string foreign_mask_text(const std::string& bin_path) {
  return fmt::format(
      "{} exists and {} does not name it: it would be taken for the mask of {}; choose another output, or move it away",
      mask_path(bin_path), sidecar_path(bin_path), bin_path);
}

bool is_foreign_sidecar(const std::string& bin_path) {
  std::error_code error;
  if (!std::filesystem::exists(sidecar_path(bin_path), error)) return false;
  try {
    return !read_sidecar(bin_path);
  } catch (const DataError&) {
    return false;
  }
}

std::string sidecar_text(const TokenSidecar& sidecar) {
  nlohmann::ordered_json json = {{"format", kSidecarFormat},
                                 {"version", sidecar.mask.empty() ? kSidecarVersion : kMaskedVersion}};
  if (sidecar.type) json["type"] = to_string(*sidecar.type);
  if (sidecar.tokens) json["tokens"] = *sidecar.tokens;
  if (sidecar.documents) json["documents"] = *sidecar.documents;
  if (sidecar.vocab_size > 0) json["vocab_size"] = sidecar.vocab_size;
  if (!sidecar.tokenizer.empty()) json["tokenizer"] = sidecar.tokenizer;
  if (sidecar.document_end) json["document_end"] = document_end_json(*sidecar.document_end);
  if (sidecar.special_tokens) json["special_tokens"] = *sidecar.special_tokens;
  if (!sidecar.content.empty()) json["content"] = sidecar.content;
  if (!sidecar.set_aside.empty()) json["set_aside"] = sidecar.set_aside;
  if (!sidecar.mask.empty()) json["mask"] = sidecar.mask;
  return json.dump(2) + "\n";
}

}  // namespace phalanx::data
