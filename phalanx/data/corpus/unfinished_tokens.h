// What a stopped call has encoded of a corpus, so that the same call goes on from there.
//
// PREFIX.bin.tmp holds the ids (token_file_writer.h). PREFIX.unfinished says of what they are, how many tokens each
// document has, and a hash of the ids of each block of documents. So what is taken over is whole, and is what was kept.
// The last document of a stopped call is encoded again.
//
//   UnfinishedTokens unfinished(prefix, origin);
//   TokenFileWriter writer(prefix, {..., .kept = unfinished.take_over(type)});
//   unfinished.begin();
//   ...
//   writer.keep_unfinished();            // the ids first
//   unfinished.add(lengths, type);
//   writer.finish();
//   unfinished.remove();
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/data/token_file.h"

namespace phalanx::data {

/// Of what the ids are.
struct UnfinishedOrigin {
  std::string identity;   // a hash of all that they depend on
  std::string tokenizer;  // its fingerprint
  std::string set_aside;  // the content_hash() of what was set aside of the text; empty: nothing
  friend bool operator==(const UnfinishedOrigin&, const UnfinishedOrigin&) = default;
};

/// What a stopped call has left for this prefix; nothing if there is none.
std::optional<UnfinishedOrigin> unfinished_tokens(const std::string& prefix);

/// Errors of the disk are FileErrors.
class UnfinishedTokens {
 public:
  UnfinishedTokens(const std::string& prefix, const UnfinishedOrigin& origin, FileSystem& file_system);
  ~UnfinishedTokens();  // removes a PREFIX.unfinished that holds no document
  UnfinishedTokens(const UnfinishedTokens&) = delete;
  UnfinishedTokens& operator=(const UnfinishedTokens&) = delete;

  /// Tokens of each document whose ids PREFIX.bin.tmp begins with. None if they are of another origin, which is logged.
  std::vector<std::int32_t> take_over(TokenType type);
  /// Begins PREFIX.unfinished, or goes on with it behind what was taken over.
  void begin();
  /// Adds documents. They are on the disk when it returns. REQUIRES: begin(); their ids are on the disk, behind those
  /// of the documents before them.
  void add(std::span<const std::int32_t> lengths, TokenType type);
  void remove();

 private:
  std::string path_, bin_path_, header_;
  FileSystem& file_system_;
  std::unique_ptr<WritableFile> file_;
  std::uint64_t taken_bytes_ = 0;  // of PREFIX.unfinished that are right
  std::int64_t tokens_ = 0;        // of the documents in it
  bool is_empty_ = true;
};

}  // namespace phalanx::data
