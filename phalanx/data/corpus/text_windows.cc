#include "phalanx/data/corpus/text_windows.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/log.h"
#include "phalanx/data/best_fit.h"
#include "phalanx/data/corpus/encode_all.h"
#include "phalanx/data/corpus/surrounding_tokens.h"
#include "phalanx/data/permutation.h"

namespace phalanx::data {
namespace {

constexpr std::size_t kWindowBytes = std::size_t{64} << 20;
/// Keys of permutations, beside the seed: that of an epoch's files, and those of windows.
constexpr std::uint64_t kOrderOfFiles = std::uint64_t{1} << 63U;

std::uint64_t key_of(const TextCursor& begin) {
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ULL;  // spreads the numbers over all bits
  const auto mixed = [](std::uint64_t key, std::int64_t number) {
    key = (key ^ static_cast<std::uint64_t>(number)) * kOdd;
    return key ^ (key >> 29U);
  };
  return mixed(mixed(mixed(kOdd, begin.epoch), begin.file), begin.record) & ~kOrderOfFiles;
}

/// Ends the reading of a file from inside.
struct Stopped {};

}  // namespace

TextWindows::TextWindows(std::vector<Document> files, BpeTokenizer tokenizer, TextWindowOptions options)
    : files_(std::move(files)), tokenizer_(std::move(tokenizer)), options_(options) {
  if (options_.seq_len < 1 || options_.window < 1 || options_.workers < 1) {
    throw ConfigError(fmt::format("seq_len {}, window {} and workers {} must be 1 or more", options_.seq_len,
                                  options_.window, options_.workers));
  }
  const std::optional<TokenId> end = tokenizer_.end_of_text();
  if (!end) {
    throw DataError(
        "the tokenizer has no end-of-text token (<|endoftext|>, <|end_of_text|>, </s> or <eos>), nor do the files "
        "beside "
        "it name one: expected one to end each text");
  }
  document_end_ = *end;
  around_ = surrounding_tokens(tokenizer_, {.special_tokens = options_.special_tokens, .end = end});
}

void TextWindows::each(TextCursor from, const std::atomic<bool>& stop,
                       const std::function<bool(TextWindow)>& use) const {
  const auto count = static_cast<std::int64_t>(files_.size());
  bool epoch_has_rows = from != TextCursor{.epoch = from.epoch};
  std::vector<std::string> texts;
  std::size_t bytes = 0;
  std::int64_t records = 0, empty = 0;
  TextCursor begin = from;
  const auto stop_if_asked = [&] {
    if (stop) throw Stopped();
  };
  const auto finish = [&](TextCursor end) {
    if (!texts.empty()) {
      TextWindow window = window_of(texts, begin, end, stop);
      stop_if_asked();
      if (!window.rows.empty()) {
        epoch_has_rows = true;
        if (!use(std::move(window))) throw Stopped();
      }
    }
    texts.clear();
    bytes = 0;
    begin = end;
  };
  try {
    for (std::int64_t epoch = from.epoch;; ++epoch) {
      const Permutation order(count, {options_.seed, kOrderOfFiles | static_cast<std::uint64_t>(epoch)});
      for (std::int64_t place = epoch == from.epoch ? from.file : 0; place < count; ++place) {
        const Document& file = files_[static_cast<std::size_t>(options_.shuffle ? order(place) : place)];
        const bool is_first = epoch == from.epoch && place == from.file;
        const auto take = [&](std::int64_t number, std::string_view text) {
          stop_if_asked();
          texts.emplace_back(text);
          bytes += text.size();
          if (std::ssize(texts) < options_.window && bytes < kWindowBytes) return;
          finish({epoch, place, number + 1});
        };
        const TextCount count_of_file = each_record(file, is_first ? from.record : 0, take, stop_if_asked);
        records += count_of_file.records();
        empty += count_of_file.empty;
      }
      if (epoch == from.epoch && empty > 0) {
        log::warn_once(fmt::format("data: {} of {} records have no text (null or empty) and are left out",
                                   with_commas(empty), with_commas(records)));
      }
      finish({epoch + 1, 0, 0});
      if (!std::exchange(epoch_has_rows, false)) {
        throw DataError(fmt::format("no text of two tokens in {} and {} more files: nothing to train on",
                                    files_.front().shown(), count - 1));
      }
    }
  } catch (const Stopped&) {
    return;
  }
}

TextWindow TextWindows::window_of(const std::vector<std::string>& texts, TextCursor begin, TextCursor end,
                                  const std::atomic<bool>& stop) const {
  const auto ids = encode_all(tokenizer_, texts, {.threads = options_.workers, .stop = &stop});
  TextWindow window{.begin = begin, .end = end, .tokens = {}, .starts = {}, .rows = {}, .labels = {}};
  const Permutation order(std::ssize(ids), {options_.seed, key_of(begin)});
  for (std::int64_t i = 0; i < std::ssize(ids); ++i) {
    const auto& document = ids[static_cast<std::size_t>(options_.shuffle ? order(i) : i)];
    window.starts.push_back(std::ssize(window.tokens));
    for (const auto& part : {std::cref(around_.before), std::cref(document), std::cref(around_.after)}) {
      window.tokens.insert(window.tokens.end(), part.get().begin(), part.get().end());
    }
  }
  const std::int64_t seq = options_.seq_len;
  if (!options_.pack) {
    const std::int64_t places = std::ssize(window.tokens) - 1;
    for (std::int64_t at = 0; at < places; at += seq) {
      const std::int64_t count = std::min(seq, places - at);
      const auto after = [&](std::int64_t token) { return std::ranges::upper_bound(window.starts, token); };
      const std::int64_t unlabelled = options_.separate_documents ? after(at + count) - after(at) : 0;
      window.rows.push_back({{at, count}});
      window.labels.push_back(static_cast<std::int32_t>(count - unlabelled));
    }
    return window;
  }
  std::vector<TextWindow::Piece> pieces;
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 0; i < window.starts.size(); ++i) {
    const std::int64_t first = window.starts[i];
    const std::int64_t last = i + 1 < window.starts.size() ? window.starts[i + 1] : std::ssize(window.tokens);
    for (std::int64_t at = first; at < last - 1; at += seq) {
      pieces.push_back({at, std::min(seq, last - 1 - at)});
      sizes.push_back(pieces.back().count);
    }
  }
  for (const auto& row : best_fit(sizes, seq)) {
    auto& of_row = window.rows.emplace_back();
    std::int64_t labels = 0;
    for (const std::size_t piece : row) {
      of_row.push_back(pieces[piece]);
      labels += pieces[piece].count;
    }
    window.labels.push_back(static_cast<std::int32_t>(labels));
  }
  return window;
}

}  // namespace phalanx::data
