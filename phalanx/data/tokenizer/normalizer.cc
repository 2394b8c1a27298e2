#include "phalanx/data/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "phalanx/base/utf8.h"
#include "phalanx/data/tokenizer/unicode.h"

namespace phalanx::data {
namespace {

bool is_ascii(char byte) { return static_cast<unsigned char>(byte) < 0x80; }

/// Bytes of valid UTF-8 at the start of `text`, up to the next ASCII character.
std::size_t valid_run(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size() && (at == 0 || !is_ascii(text[at]))) {
    const int length = first_char(text.substr(at)).length;
    if (length == 0) break;
    at += static_cast<std::size_t>(length);
  }
  return at;
}

void append_normal_form(std::string_view run, utf8proc_option_t options, std::string& out) {
  utf8proc_uint8_t* mapped = nullptr;
  const utf8proc_ssize_t size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(run.data()),
                                             static_cast<utf8proc_ssize_t>(run.size()), &mapped, options);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(mapped, &std::free);
  if (size < 0) throw std::bad_alloc();  // the run is valid: no other error is possible
  out.append(reinterpret_cast<const char*>(mapped), static_cast<std::size_t>(size));
}

/// Below U+0300 no character combines with the one before it, and composed forms are already normal.
bool is_nfc_at_sight(std::string_view run) {
  return std::all_of(run.begin(), run.end(), [](char byte) { return static_cast<unsigned char>(byte) < 0xCC; });
}

void to_normal_form(NormalForm form, std::string_view text, std::string& out) {
  constexpr std::array<int, 4> kOptions = {UTF8PROC_COMPOSE, UTF8PROC_DECOMPOSE, UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
                                           UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT};
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | kOptions[static_cast<std::size_t>(form)]);
  // Normal forms never combine across the position before an ASCII character. An ASCII character before another one
  // does not change.
  for (std::size_t at = 0; at < text.size();) {
    std::size_t plain = at;
    while (plain < text.size() && is_ascii(text[plain]) && (plain + 1 == text.size() || is_ascii(text[plain + 1])))
      ++plain;
    out.append(text, at, plain - at);
    at = plain;
    if (at == text.size()) break;
    const std::string_view run = text.substr(at, valid_run(text.substr(at)));
    if (run.empty()) {
      out += text[at++];
    } else if (form == NormalForm::nfc && is_nfc_at_sight(run)) {
      out += run;
    } else {
      append_normal_form(run, options, out);
    }
    at += run.size();
  }
}

void to_lowercase(std::string_view text, std::string& out) {
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Char c = first_char(text.substr(at));
    if (c.length == 0) {
      out += text[at++];
      continue;
    }
    at += static_cast<std::size_t>(c.length);
    if (c.code_point == 0x130) {  // the one character whose lower case is two
      out += "i\u0307";
    } else {
      append_utf8(static_cast<std::uint32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c.code_point))), out);
    }
  }
}

std::string_view strip_spaces(const StripSpacesStep& step, std::string_view text) {
  // From the left, finds the first character that is not a space, and on the way the end of the last one.
  std::size_t begin = std::string_view::npos, end = 0;
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Char c = first_char(text.substr(at));
    const std::size_t after = at + static_cast<std::size_t>(std::max(1, c.length));
    if (c.length == 0 || class_of(c.code_point) != CharClass::space) {
      begin = std::min(begin, at);
      end = after;
    }
    at = after;
  }
  if (end == 0) return step.left || step.right ? std::string_view{} : text;
  if (!step.left) begin = 0;
  if (!step.right) end = text.size();
  return text.substr(begin, end - begin);
}

constexpr std::size_t kSpareOfText = 65536;  // for a Prepend to a short text

/// Returns whether characters at the start of `text` were removed without a replacement. `given`: bytes of the text
/// before any step.
bool replace_all(const PatternFinder& finder, const PatternFinder::Scratch& scratch, const std::string& content,
                 std::string_view text, std::size_t given, std::string& out) {
  std::size_t done = 0;
  bool cut_at_start = false;
  finder.find(text, scratch, [&](std::size_t begin, std::size_t end) {
    refuse_growth(out.size(), given, kSpareOfText);
    out.append(text, done, begin - done);
    cut_at_start |= out.empty() && content.empty() && end > 0;
    out += content;
    done = end;
  });
  out.append(text, done);
  return cut_at_start;
}

}  // namespace

Normalizer::Normalizer(std::vector<NormalizerStep> steps) : steps_(std::move(steps)) {
  for (const NormalizerStep& step : steps_) {
    if (const auto* replace = std::get_if<ReplaceStep>(&step)) finders_.emplace_back(replace->pattern);
  }
}

Normalizer::Scratch Normalizer::make_scratch() const {
  Scratch scratch;
  for (const PatternFinder& finder : finders_) scratch.finders.push_back(finder.make_scratch());
  return scratch;
}

Normalizer::Result Normalizer::apply(std::string_view text, Scratch& scratch) const {
  Result result{text, false};
  std::size_t finder = 0;
  for (const NormalizerStep& step : steps_) {
    const std::size_t replace = std::holds_alternative<ReplaceStep>(step) ? finder++ : 0;
    if (result.text.empty()) continue;
    std::string& out = scratch.next;
    out.clear();
    if (const auto* form = std::get_if<NormalFormStep>(&step)) {
      to_normal_form(form->form, result.text, out);
    } else if (const auto* prepend = std::get_if<PrependStep>(&step)) {
      out.append(prepend->text).append(result.text);
    } else if (const auto* replaced = std::get_if<ReplaceStep>(&step)) {
      result.cut_at_start |=
          replace_all(finders_[replace], scratch.finders[replace], replaced->content, result.text, text.size(), out);
    } else if (std::holds_alternative<LowercaseStep>(step)) {
      to_lowercase(result.text, out);
    } else {
      const std::string_view kept = strip_spaces(std::get<StripSpacesStep>(step), result.text);
      result.cut_at_start |= kept.data() != result.text.data();
      out = kept;
    }
    refuse_growth(out.size(), text.size(), kSpareOfText);
    std::swap(scratch.text, scratch.next);
    result.text = scratch.text;
  }
  return result;
}

}  // namespace phalanx::data
