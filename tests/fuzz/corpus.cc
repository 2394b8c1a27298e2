// Texts as `phalanx tokenize` reads them, plain or compressed. Byte 0 of the input: by which name.
#include <array>

#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/data/corpus/corpus.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const TempDirectory scratch("fuzz");
  constexpr std::array kNames = {"one.txt", "one.jsonl", "one.json"};
  if (size < 2) return 0;
  const std::string path = (scratch.path() / kNames[data[0] % kNames.size()]).string();
  write_file(path, fuzz::text_of(data, size).substr(1));
  return fuzz::parse(
      [&] {
        for (const auto& document : data::list_corpus({path}).documents) {
          data::each_text(document, [&](std::string_view text) {
            fuzz::require(document.format == data::TextFormat::text || !text.empty(), "a record that is used has text");
          });
        }
      },
      path);
}
