#include "phalanx/infer/stop_text.h"

#include <algorithm>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx::infer {

StopText::StopText(const data::BpeTokenizer& tokenizer, std::vector<std::string> stops)
    : decoder_(tokenizer, {.skip_special_tokens = true}), stops_(std::move(stops)) {
  if (std::ranges::any_of(stops_, &std::string::empty)) {
    throw ConfigError("a stop string is empty: it would end every text before it begins");
  }
}

std::string StopText::release(const std::string& text) {
  if (stopped_) return "";
  held_ += text;
  std::size_t end = std::string::npos, kept = 0;
  for (const std::string& stop : stops_) {
    end = std::min(end, held_.find(stop));
    // The longest end of the text that is a beginning of the stop string.
    for (std::size_t length = std::min(stop.size() - 1, held_.size()); length > kept; --length) {
      if (held_.ends_with(std::string_view(stop).substr(0, length))) kept = length;
    }
  }
  stopped_ = end != std::string::npos;
  std::string certain = held_.substr(0, stopped_ ? end : held_.size() - kept);
  held_.erase(0, stopped_ ? held_.size() : certain.size());
  return certain;
}

std::string StopText::add(data::TokenId token) { return release(decoder_.add(token)); }

std::string StopText::finish() {
  std::string text = release(decoder_.finish());
  return text + std::exchange(held_, "");
}

}  // namespace phalanx::infer
