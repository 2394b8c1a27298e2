#include "phalanx/data/tokenizer/token_decoder.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/data/tokenizer/byte_level.h"

namespace phalanx::data {
namespace {

std::string without(std::string_view text, std::string_view part) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t found = std::min(text.find(part, at), text.size());
    out.append(text, at, found - at);
    at = found + part.size();
  }
  return out;
}

constexpr std::size_t kSpareOfToken = 4096;

/// `given`: bytes of the token before any step.
std::string replaced(const PatternFinder& finder, std::string_view text, std::string_view content, std::size_t given) {
  std::string out;
  std::size_t done = 0;
  finder.find(text, finder.make_scratch(), [&](std::size_t begin, std::size_t end) {
    refuse_growth(out.size(), given, kSpareOfToken);
    out.append(text, done, begin - done).append(content);
    done = end;
  });
  return out.append(text, done);
}

std::string stripped(const StripDecode& step, std::string_view text) {
  for (std::int64_t i = 0; i < step.start && text.starts_with(step.content); ++i)
    text.remove_prefix(step.content.size());
  for (std::int64_t i = 0; i < step.stop && text.ends_with(step.content); ++i) text.remove_suffix(step.content.size());
  return std::string(text);
}

}  // namespace

TokenDecoder::TokenDecoder(std::vector<DecoderStep> steps) {
  bool whole = false;  // from here on steps see the whole text
  for (DecoderStep& step : steps) {
    const auto* strip = std::get_if<StripDecode>(&step);
    if (!whole) {
      whole = std::holds_alternative<ByteFallbackDecode>(step) || std::holds_alternative<ByteLevelDecode>(step) ||
              std::holds_alternative<FuseDecode>(step);
      const auto* metaspace = std::get_if<MetaspaceDecode>(&step);
      first_differs_ |= metaspace && metaspace->drops_first;
      if (const auto* replace = std::get_if<ReplaceStep>(&step)) finders_.emplace_back(replace->pattern);
      steps_.push_back(std::move(step));
    } else if (strip && strip->stop == 0 && strip_count_ == 0) {
      strip_count_ = strip->start;
      strip_content_ = strip->content;
    } else if (!std::holds_alternative<FuseDecode>(step)) {
      throw DataError(
          "steps in this order are not supported: after ByteFallback, ByteLevel or Fuse only Fuse and one Strip of the "
          "start may come");
    }
  }
}

std::string TokenDecoder::text_of(std::string_view token, bool first) const {
  std::string text(token);
  std::size_t finder = 0;
  for (const DecoderStep& step : steps_) {
    if (std::holds_alternative<ByteLevelDecode>(step)) {
      if (auto bytes = printable_to_bytes(text)) text = std::move(*bytes);
    } else if (std::holds_alternative<ByteFallbackDecode>(step)) {
      if (const auto byte = fallback_byte(text)) text.assign(1, static_cast<char>(*byte));
    } else if (const auto* metaspace = std::get_if<MetaspaceDecode>(&step)) {
      text = first && metaspace->drops_first
                 ? without(text, metaspace->replacement)
                 : replaced(PatternFinder({metaspace->replacement}), text, " ", token.size());
    } else if (const auto* replace = std::get_if<ReplaceStep>(&step)) {
      text = replaced(finders_[finder++], text, replace->content, token.size());
    } else if (const auto* strip = std::get_if<StripDecode>(&step)) {
      text = stripped(*strip, text);
    }
  }
  return text;
}

}  // namespace phalanx::data
