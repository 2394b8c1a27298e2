// Token files: Megatron's pair, llm.c's, raw ids. Byte 0 of the input: 0 for one .bin, else for a pair, then the length
// of the .idx in two bytes; byte 1: a vocabulary of that size, or unknown.
#include <algorithm>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/data/token_file.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const TempDirectory scratch("fuzz");
  if (size < 4) return 0;
  const bool pair = data[0] != 0;
  const std::string path = (scratch.path() / (pair ? "pair" : "one.bin")).string();
  std::string_view rest = fuzz::text_of(data, size).substr(4);
  if (pair) {
    const std::size_t index = std::min<std::size_t>(data[2] | data[3] << 8, rest.size());
    write_file(path + ".idx", rest.substr(0, index));
    write_file(path + ".bin", rest.substr(index));
  } else {
    write_file(path, rest);
  }
  return fuzz::parse(
      [&] {
        const data::TokenFile tokens(path, {.vocab_size = data[1]});
        std::vector<std::int64_t> ids(static_cast<std::size_t>(std::min<std::int64_t>(tokens.size(), 100'000)));
        fuzz::require(tokens.size() > 0 && tokens.document_count() > 0, "a file holds tokens");
        for (std::int64_t i = 0; i < std::min<std::int64_t>(tokens.document_count(), 1000); ++i) {
          const auto range = tokens.document(i);
          fuzz::require(range.begin >= 0 && range.begin <= range.end && range.end <= tokens.size(),
                        "documents lie inside");
        }
        tokens.read(tokens.size() - static_cast<std::int64_t>(ids.size()), ids);
        tokens.description();
      },
      path);
}
