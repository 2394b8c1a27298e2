#include "phalanx/data/corpus/unfinished_tokens.h"

#include <fmt/format.h>

#include <cstring>
#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "phalanx/base/content_hash.h"
#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/mapped_file.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

constexpr std::size_t kHashSize = 32;

/// In front of the lengths of a block of documents.
struct BlockHead {
  std::int64_t documents = 0, tokens = 0;
  char hash[kHashSize] = {};  // of the ids
};

std::string path_of(const std::string& prefix) { return prefix + ".unfinished"; }
std::string bin_path_of(const std::string& prefix) { return prefix + ".bin.tmp"; }

bool exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

/// The 0 in front says to whoever lists files that it is no text.
std::string header_of(const UnfinishedOrigin& origin) {
  return std::string(1, '\0') +
         json{{"phalanx_unfinished_tokens", 1},
              {"identity", origin.identity},
              {"tokenizer", origin.tokenizer},
              {"set_aside", origin.set_aside}}
             .dump() +
         "\n";
}

std::string hash_of_tokens(const MappedFile& bin, std::int64_t first, std::int64_t tokens, TokenType type) {
  return ContentHash()
      .add_bytes(bin.bytes().subspan(static_cast<std::size_t>(first * bytes_of(type)),
                                     static_cast<std::size_t>(tokens * bytes_of(type))))
      .hex();
}

/// The lengths of the block at the start of `text`; nothing if it is not whole, or its ids are not those of `bin`.
std::optional<std::vector<std::int32_t>> block_at(std::string_view text, const MappedFile& bin, std::int64_t first,
                                                  TokenType type) {
  BlockHead head;
  if (text.size() < sizeof(head)) return std::nullopt;
  std::memcpy(&head, text.data(), sizeof(head));
  text.remove_prefix(sizeof(head));
  const auto room = static_cast<std::int64_t>(text.size() / sizeof(std::int32_t));
  const std::int64_t there = static_cast<std::int64_t>(bin.size()) / bytes_of(type) - first;
  if (head.documents < 1 || head.documents > room || head.tokens < 0 || head.tokens > there) return std::nullopt;
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(head.documents));
  std::memcpy(lengths.data(), text.data(), lengths.size() * sizeof(std::int32_t));
  std::int64_t sum = 0;
  for (const std::int32_t length : lengths) {
    if (length < 0) return std::nullopt;
    sum += length;
  }
  const bool is_right =
      sum == head.tokens && hash_of_tokens(bin, first, sum, type) == std::string_view(head.hash, kHashSize);
  return is_right ? std::optional(std::move(lengths)) : std::nullopt;
}

}  // namespace

std::optional<UnfinishedOrigin> unfinished_tokens(const std::string& prefix) {
  if (!exists(path_of(prefix)) || !exists(bin_path_of(prefix))) return std::nullopt;
  const std::string text = read_file(path_of(prefix));
  const json header = json::parse(text.substr(1, text.find('\n')), nullptr, /*allow_exceptions=*/false);
  if (!header.is_object() || !header.contains("phalanx_unfinished_tokens")) return std::nullopt;
  return UnfinishedOrigin{.identity = header.value("identity", ""),
                          .tokenizer = header.value("tokenizer", ""),
                          .set_aside = header.value("set_aside", "")};
}

UnfinishedTokens::UnfinishedTokens(const std::string& prefix, const UnfinishedOrigin& origin, FileSystem& file_system)
    : path_(path_of(prefix)), bin_path_(bin_path_of(prefix)), header_(header_of(origin)), file_system_(file_system) {}

UnfinishedTokens::~UnfinishedTokens() {
  if (!file_ || !is_empty_) return;
  try {
    remove();
  } catch (const std::exception&) {
    // The first error is the one to report.
  }
}

std::vector<std::int32_t> UnfinishedTokens::take_over(TokenType type) {
  std::vector<std::int32_t> result;
  if (!exists(path_) || !exists(bin_path_)) return result;
  const std::string text = read_file(path_);
  if (!text.starts_with(header_)) {
    log::warn(
        fmt::format("{}: of other inputs or options, of another tokenizer or version: what a stopped command has "
                    "encoded is dropped",
                    path_));
    return result;
  }
  taken_bytes_ = header_.size();
  const MappedFile bin(bin_path_, MappedFile::Access::sequential);
  while (const auto lengths = block_at(std::string_view(text).substr(taken_bytes_), bin, tokens_, type)) {
    taken_bytes_ += sizeof(BlockHead) + lengths->size() * sizeof(std::int32_t);
    for (const std::int32_t length : *lengths) tokens_ += length;
    result.insert(result.end(), lengths->begin(), lengths->end());
  }
  is_empty_ = result.empty();
  return result;
}

void UnfinishedTokens::begin() {
  if (taken_bytes_ == 0) {
    replace_file(path_, header_, file_system_);
  } else {
    std::error_code error;
    std::filesystem::resize_file(path_, taken_bytes_, error);
    if (error) throw FileError(fmt::format("cannot cut {}: {}", path_, error.message()), error.value());
  }
  file_ = file_system_.append(path_);
}

void UnfinishedTokens::add(std::span<const std::int32_t> lengths, TokenType type) {
  BlockHead head{.documents = std::ssize(lengths)};
  for (const std::int32_t length : lengths) head.tokens += length;
  hash_of_tokens(MappedFile(bin_path_), tokens_, head.tokens, type).copy(head.hash, kHashSize);
  std::string block(reinterpret_cast<const char*>(&head), sizeof(head));
  block.append(reinterpret_cast<const char*>(lengths.data()), lengths.size_bytes());
  file_->write(block);
  file_->sync();
  tokens_ += head.tokens;
  is_empty_ = false;
}

void UnfinishedTokens::remove() {
  file_.reset();
  file_system_.remove_all(path_);
}

}  // namespace phalanx::data
