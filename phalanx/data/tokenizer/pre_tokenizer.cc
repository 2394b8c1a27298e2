#include "phalanx/data/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "phalanx/base/utf8.h"
#include "phalanx/data/tokenizer/unicode.h"

namespace phalanx::data {
namespace {

/// The class of a character, as far as its first byte tells it.
enum class ByteClass : std::uint8_t { other, letter, number, space, several };

constexpr std::array<ByteClass, 256> make_byte_classes() {
  std::array<ByteClass, 256> table{};
  for (int c = 0; c < 256; ++c) {
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) table[c] = ByteClass::letter;
    if (c >= '0' && c <= '9') table[c] = ByteClass::number;
    if (c == ' ' || (c >= '\t' && c <= '\r')) table[c] = ByteClass::space;
    if (c >= 0x80) table[c] = ByteClass::several;
  }
  return table;
}

constexpr std::array<ByteClass, 256> kByteClasses = make_byte_classes();

ByteClass byte_class(char byte) { return kByteClasses[static_cast<unsigned char>(byte)]; }

struct ClassedChar {
  ByteClass value;
  std::size_t length;
};

/// The character at `at`, of any length; an invalid byte is a character of class other.
ClassedChar char_at(const char* at, const char* end) {
  const ByteClass quick = byte_class(*at);
  if (quick != ByteClass::several) return {quick, 1};
  const Utf8Char c = first_char({at, static_cast<std::size_t>(end - at)});
  if (c.length == 0) return {ByteClass::other, 1};
  constexpr ByteClass kSame[] = {ByteClass::other, ByteClass::letter, ByteClass::number, ByteClass::space};
  return {kSame[static_cast<int>(class_of(c.code_point))], static_cast<std::size_t>(c.length)};
}

/// End of the run of characters of class `wanted` that begins at `at`.
const char* run_end(const char* at, const char* end, ByteClass wanted) {
  while (at < end) {
    const ByteClass quick = byte_class(*at);
    if (quick == wanted) {
      ++at;
    } else if (quick == ByteClass::several) {
      const ClassedChar c = char_at(at, end);
      if (c.value != wanted) break;
      at += c.length;
    } else {
      break;
    }
  }
  return at;
}

std::size_t contraction(const char* at, const char* end) {
  if (end - at < 2) return 0;
  const char a = at[1];
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
  if (end - at < 3) return 0;
  const char b = at[2];
  return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

}  // namespace

std::size_t gpt2_piece(std::string_view text) {
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  if (*begin == '\'') {
    if (const std::size_t length = contraction(begin, end)) return length;
  }
  ClassedChar first = char_at(begin, end);
  const char* at = begin;
  if (*begin == ' ' && text.size() > 1) {  // a space goes with the letters, digits or signs after it
    const ClassedChar second = char_at(begin + 1, end);
    if (second.value != ByteClass::space) {
      first = second;
      at = begin + 1;
    }
  }
  at += first.length;
  if (first.value != ByteClass::space) return static_cast<std::size_t>(run_end(at, end, first.value) - begin);
  // The last space of a run belongs to the next piece, unless the run has one space or is at the end of the text.
  const char* last = begin;
  while (at < end) {
    const ClassedChar next = char_at(at, end);
    if (next.value != ByteClass::space) return static_cast<std::size_t>((last == begin ? at : last) - begin);
    last = at;
    at += next.length;
  }
  return text.size();
}

PreTokenizer::Split::Split(const SplitStep& step)
    : finder(step.pattern),
      behavior(step.behavior),
      invert(step.invert),
      is_gpt2(step.pattern.is_regex && step.pattern.text == kGpt2Pattern && step.behavior == SplitBehavior::isolated &&
              !step.invert) {}

PreTokenizer::PreTokenizer(const std::vector<PreTokenizerStep>& steps) {
  for (const PreTokenizerStep& step : steps) {
    if (const auto* split = std::get_if<SplitStep>(&step)) {
      steps_.emplace_back(Split(*split));
    } else if (const auto* metaspace = std::get_if<MetaspaceStep>(&step)) {
      steps_.emplace_back(*metaspace);
    } else {
      steps_.emplace_back(std::get<ByteLevelStep>(step));
    }
  }
  if (steps_.size() == 1) {
    const auto* bytes = std::get_if<ByteLevelStep>(&steps_[0]);
    is_gpt2_ = bytes && bytes->use_regex && !bytes->add_prefix_space;
  }
}

PreTokenizer::Scratch PreTokenizer::make_scratch() const {
  Scratch scratch;
  for (const Step& step : steps_) {
    const auto* split = std::get_if<Split>(&step);
    scratch.steps.push_back({split ? split->finder.make_scratch() : nullptr, {}, {}});
  }
  return scratch;
}

void PreTokenizer::split_from(std::size_t step, Piece piece, Scratch& scratch, const PieceSink& sink) const {
  if (piece.text.empty()) return;
  if (step == steps_.size()) return sink(piece.text);
  const auto next = [&](std::size_t begin, std::size_t end) {
    split_from(step + 1, {piece.text.substr(begin, end - begin), piece.at_start && begin == 0}, scratch, sink);
  };
  StepScratch& own = scratch.steps[step];
  if (const auto* split = std::get_if<Split>(&steps_[step])) {
    split->apply(piece.text, own, next);
  } else if (const auto* metaspace = std::get_if<MetaspaceStep>(&steps_[step])) {
    piece.text = with_metaspaces(*metaspace, piece, own.text);
    if (!metaspace->split) return next(0, piece.text.size());
    // A piece begins at each replacement character; it is a piece alone if another follows at once.
    std::size_t begin = 0;
    const std::string& mark = metaspace->replacement;
    for (std::size_t at = piece.text.find(mark, 0); at != std::string_view::npos;
         at = piece.text.find(mark, at + mark.size())) {
      next(begin, at);
      begin = at;
    }
    next(begin, piece.text.size());
  } else {
    const auto& bytes = std::get<ByteLevelStep>(steps_[step]);
    if (bytes.add_prefix_space && piece.text[0] != ' ') {
      own.text.assign(1, ' ').append(piece.text);
      piece.text = own.text;
    }
    if (!bytes.use_regex) return next(0, piece.text.size());
    for_each_gpt2_piece(piece.text, next);
  }
}

std::string_view PreTokenizer::with_metaspaces(const MetaspaceStep& step, Piece piece, std::string& out) {
  const bool wanted = step.scheme == PrependScheme::always || (step.scheme == PrependScheme::first && piece.at_start);
  out.clear();
  if (wanted && piece.text[0] != ' ' && !piece.text.starts_with(step.replacement)) out = step.replacement;
  for (std::size_t begin = 0; begin < piece.text.size();) {
    const std::size_t space = std::min(piece.text.find(' ', begin), piece.text.size());
    out.append(piece.text, begin, space - begin);
    if (space < piece.text.size()) out += step.replacement;
    begin = space + 1;
  }
  return out;
}

void PreTokenizer::Split::apply(std::string_view text, StepScratch& scratch, const RangeSink& piece) const {
  if (is_gpt2) return for_each_gpt2_piece(text, piece);
  std::size_t done = 0;
  if (behavior == SplitBehavior::isolated) {  // each range is a piece, whether it matches or not
    finder.find(text, scratch.finder, [&](std::size_t begin, std::size_t end) {
      if (begin > done) piece(done, begin);
      if (end > begin) piece(begin, end);
      done = end;
    });
    if (done < text.size()) piece(done, text.size());
    return;
  }
  auto& ranges = scratch.ranges;
  ranges.clear();
  const auto add = [&](std::size_t begin, std::size_t end, bool matches) {
    ranges.push_back({begin, end, matches != invert});
  };
  finder.find(text, scratch.finder, [&](std::size_t begin, std::size_t end) {
    if (begin > done) add(done, begin, false);
    add(begin, end, true);
    done = end;
  });
  if (done < text.size()) add(done, text.size(), false);
  // Each range begins a piece or joins the previous one. `kept` is the start of the current piece in `ranges`.
  const auto joins = [&](std::size_t i) {  // whether range i, i > 0, and the previous one are one piece
    switch (behavior) {
      case SplitBehavior::contiguous:
        return ranges[i].matches == ranges[i - 1].matches;
      case SplitBehavior::merged_with_previous:
        return ranges[i].matches && !ranges[i - 1].matches;
      case SplitBehavior::merged_with_next:
        return ranges[i - 1].matches && !ranges[i].matches;
      default:
        return false;
    }
  };
  for (std::size_t i = 0; i < ranges.size();) {
    std::size_t last = i;
    while (last + 1 < ranges.size() && joins(last + 1)) ++last;
    if (behavior != SplitBehavior::removed || !ranges[i].matches) piece(ranges[i].begin, ranges[last].end);
    i = last + 1;
  }
}

}  // namespace phalanx::data
