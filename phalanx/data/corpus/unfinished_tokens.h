// What a stopped command has encoded of a corpus, so that the same command goes on from there.
//
// PREFIX.bin.tmp holds the ids (token_file_writer.h). PREFIX.unfinished says of which inputs they are, and how many tokens
// each document has. It is written after the ids are on the disk, so what it names is whole. Documents are complete or not
// there: the last one of a stopped command is encoded again.
//
//   UnfinishedTokens unfinished(prefix, identity);
//   const std::vector<std::int32_t> kept = unfinished.lengths(type);   // of another identity: none
//   unfinished.begin(kept);
//   ...
//   writer.sync();
//   unfinished.add(lengths);
//   writer.finish();
//   unfinished.remove();
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/data/token_file.h"

namespace phalanx::data {

/// Whether a stopped command has left ids for this prefix.
bool has_unfinished_tokens(const std::string& prefix);

class UnfinishedTokens {
 public:
  /// `identity`: a hash of all that the ids depend on.
  UnfinishedTokens(const std::string& prefix, std::string identity, FileSystem& file_system = posix_file_system());

  /// Tokens of each document whose ids are in PREFIX.bin.tmp, from its start; none if they have another identity.
  std::vector<std::int32_t> lengths(TokenType type) const;
  /// Begins PREFIX.unfinished, with these documents.
  void begin(std::span<const std::int32_t> lengths);
  /// Adds documents. They are on the disk when it returns.
  void add(std::span<const std::int32_t> lengths);
  void remove();

 private:
  std::string path_, bin_path_, header_;
  FileSystem& file_system_;
  std::unique_ptr<WritableFile> file_;
};

}  // namespace phalanx::data
