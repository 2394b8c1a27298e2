// tokenizer.json; then what it makes of some text, and back. A zero byte, which JSON cannot hold, ends the file: what
// follows is the text.
#include <algorithm>
#include <optional>

#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input = fuzz::text_of(data, size);
  const std::size_t end = std::min(input.find('\0'), input.size());
  const std::string_view text = end < input.size() ? input.substr(end + 1) : " Hello  w\xC3\xB6rld, it's 12:30\xFF\n";
  std::optional<data::BpeTokenizer> read;
  fuzz::parse([&] { read = data::BpeTokenizer::from_json(input.substr(0, end), fuzz::kFile); });
  if (!read) return 0;
  const data::BpeTokenizer& tokenizer = *read;
  fuzz::parse([&] { data::BpeTokenizer::from_json(tokenizer.to_json(), fuzz::kFile); });
  // A pattern that cannot be matched and replacements without end know no file.
  const auto use = [&] {
    for (const bool special : {false, true}) {
      const auto ids = tokenizer.encode(text, {.added_tokens = special, .add_special_tokens = special});
      for (const data::TokenId id : ids)
        fuzz::require(id >= 0 && id < tokenizer.vocab_size(), "ids are in the vocabulary");
      tokenizer.decode(ids, {.skip_special_tokens = special});
      data::StreamingDecoder stream(tokenizer);
      for (const data::TokenId id : ids) stream.add(id);
      stream.finish();
    }
    fuzz::require(tokenizer.safe_cut(text, text.size()) <= text.size(), "a cut lies in the text");
  };
  return fuzz::parse(use, "");
}
