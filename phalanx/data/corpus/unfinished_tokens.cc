#include "phalanx/data/corpus/unfinished_tokens.h"

#include <fmt/format.h>

#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

namespace phalanx::data {
namespace {

std::string path_of(const std::string& prefix) { return prefix + ".unfinished"; }
std::string bin_path_of(const std::string& prefix) { return prefix + ".bin.tmp"; }

bool exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

}  // namespace

bool has_unfinished_tokens(const std::string& prefix) { return exists(path_of(prefix)) && exists(bin_path_of(prefix)); }

UnfinishedTokens::UnfinishedTokens(const std::string& prefix, std::string identity, FileSystem& file_system)
    : path_(path_of(prefix)),
      bin_path_(bin_path_of(prefix)),
      header_(std::string(1, '\0') + fmt::format("phalanx unfinished tokens 1 {}\n", identity)),  // 0: it is no text
      file_system_(file_system) {}

std::vector<std::int32_t> UnfinishedTokens::lengths(TokenType type) const {
  std::vector<std::int32_t> result;
  if (!exists(path_) || !exists(bin_path_)) return result;
  const std::string text = read_file(path_);
  if (!text.starts_with(header_)) return result;
  const std::size_t count = (text.size() - header_.size()) / sizeof(std::int32_t);
  result.resize(count);
  std::memcpy(result.data(), text.data() + header_.size(), count * sizeof(std::int32_t));
  // What follows a length that cannot be, or ids that are not there, is of a damaged disk.
  const auto there = static_cast<std::int64_t>(std::filesystem::file_size(bin_path_)) / bytes_of(type);
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (result[i] < 0 || tokens + result[i] > there) {
      result.resize(i);
      break;
    }
    tokens += result[i];
  }
  return result;
}

void UnfinishedTokens::begin(std::span<const std::int32_t> lengths) {
  file_ = file_system_.create(path_);
  file_->write(header_);
  add(lengths);
}

void UnfinishedTokens::add(std::span<const std::int32_t> lengths) {
  file_->write(std::as_bytes(lengths));
  file_->sync();
}

void UnfinishedTokens::remove() {
  file_.reset();
  file_system_.remove_all(path_);
}

}  // namespace phalanx::data
