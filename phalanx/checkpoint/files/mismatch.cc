#include "phalanx/checkpoint/files/mismatch.h"

#include <fmt/format.h>

#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {
constexpr std::size_t kShown = 6;
}

std::string describe_type(const safetensors::TensorInfo& tensor) {
  return fmt::format("{} {}", safetensors::name_of(tensor.dtype), safetensors::format_shape(tensor.shape));
}

void Mismatches::other(std::string line) {
  if (count_++ < kShown) lines_.push_back(std::move(line));
}
void Mismatches::missing(const safetensors::TensorInfo& wanted) {
  other(fmt::format("{} is missing (expected {})", safetensors::quote_name(wanted.name), describe_type(wanted)));
}
void Mismatches::unexpected(const safetensors::TensorInfo& found) {
  other(fmt::format("{} is unexpected (found {})", safetensors::quote_name(found.name), describe_type(found)));
}
void Mismatches::differs(const safetensors::TensorInfo& wanted, const safetensors::TensorInfo& found) {
  other(fmt::format("{}: expected {}, found {}", safetensors::quote_name(wanted.name), describe_type(wanted),
                    describe_type(found)));
}

void Mismatches::throw_if_any(const std::string& headline, const std::string& advice) const {
  if (count_ == 0) return;
  std::string text = headline + ":";
  for (const auto& line : lines_) text += "\n  " + line;
  if (count_ > lines_.size()) text += fmt::format("\n  and {} more", count_ - lines_.size());
  if (!advice.empty()) text += "\n" + advice;
  throw CheckpointError(text);
}

}  // namespace phalanx
