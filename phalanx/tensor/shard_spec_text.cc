// Writes and parses the text forms of placements and specs.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "phalanx/base/error.h"
#include "phalanx/tensor/placement.h"
#include "phalanx/tensor/shard_spec.h"

namespace phalanx {
namespace {

constexpr std::string_view kReplicated = "replicated";

/// Parses a text from left to right. An error shows the position.
class SpecScanner {
 public:
  explicit SpecScanner(std::string_view text, std::size_t position = 0) : text_(text), at_(position) {}

  [[noreturn]] void fail(const std::string& expected) const {
    const std::string_view rest = text_.substr(at_);
    throw ConfigError(fmt::format("cannot read \"{}\" at character {}: expected {}, found {}", text_, at_ + 1, expected,
                                  rest.empty() ? "the end" : fmt::format("\"{}\"", rest)));
  }

  bool done() const { return at_ == text_.size(); }

  bool take(std::string_view token) {
    if (!text_.substr(at_).starts_with(token)) return false;
    at_ += token.size();
    return true;
  }

  void expect(std::string_view token) {
    if (!take(token)) fail(fmt::format("\"{}\"", token));
  }

  std::string word(const char* what) {
    const std::size_t end = std::min(text_.find_first_of(" ,:=()[]{}", at_), text_.size());
    if (end == at_) fail(what);
    const std::string_view found = text_.substr(at_, end - at_);
    at_ = end;
    return std::string(found);
  }

  template <class Number>
  Number number() {
    Number value = 0;
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc()) fail("a number");
    at_ = static_cast<std::size_t>(end - text_.data());
    return value;
  }

  /// Numbers separated by ", ", up to and including the closing bracket.
  std::vector<std::int64_t> numbers_until(std::string_view closing) {
    std::vector<std::int64_t> numbers;
    if (take(closing)) return numbers;
    do numbers.push_back(number<std::int64_t>());
    while (take(", "));
    expect(closing);
    return numbers;
  }

  Placement placement() {
    Placement placement;
    if (text_.substr(at_) == kReplicated) {  // and not an axis of that name
      at_ = text_.size();
      return placement;
    }
    do {
      std::string axis = word("an axis");
      expect(":");
      if (take("P")) {
        placement.partial.push_back(std::move(axis));
        continue;
      }
      if (!placement.partial.empty()) fail("\"P\" (splits stand before partial axes)");
      if (!take("S(")) fail("\"S(\" or \"P\"");
      Split split{std::move(axis), number<int>(), {}};
      expect(")");
      if (take("{")) {
        split.sizes = numbers_until("}");
        if (split.sizes.empty()) fail("a number between { and }");
      }
      placement.splits.push_back(std::move(split));
    } while (take(", "));
    return placement;
  }

  MeshShape mesh() {
    std::vector<MeshAxis> axes;
    expect("(");
    if (take(")")) return MeshShape();
    do {
      std::string name = word("an axis");
      expect("=");
      axes.push_back({std::move(name), number<int>()});
    } while (take(", "));
    expect(")");
    return MeshShape(std::move(axes));
  }

  DataType dtype() {
    for (const auto type : {DataType::f32, DataType::f64, DataType::f16, DataType::bf16, DataType::i32, DataType::i64,
                            DataType::u8, DataType::boolean})
      if (take(name_of(type))) return type;
    fail("a dtype such as float32");
  }

 private:
  std::string_view text_;
  std::size_t at_;
};

}  // namespace

std::string Split::text() const {
  return fmt::format("{}:S({}){}", axis, dim, sizes.empty() ? "" : fmt::format("{{{}}}", fmt::join(sizes, ", ")));
}

std::string Placement::text() const {
  if (splits.empty() && partial.empty()) return std::string(kReplicated);
  std::string text;
  for (const auto& split : splits) text += (text.empty() ? "" : ", ") + split.text();
  for (const auto& axis : partial) text += fmt::format("{}{}:P", text.empty() ? "" : ", ", axis);
  return text;
}

Placement Placement::parse(std::string_view text) {
  SpecScanner scanner(text);
  Placement placement = scanner.placement();
  if (!scanner.done()) scanner.fail("\", \" or the end");
  return placement;
}

std::string ShardSpec::text() const {
  return fmt::format("'{}' {}[{}] on {}: {}", name_, name_of(dtype_), fmt::join(shape_, ", "), mesh_.text(),
                     placement_.text());
}

ShardSpec ShardSpec::parse(std::string_view text) {
  // No quote can follow the name, so the last quote ends it, whatever the name contains.
  const std::size_t quote = text.rfind('\'');
  if (!text.starts_with('\'') || quote == 0 || quote == std::string_view::npos)
    SpecScanner(text).fail("a name between quotes: 'name'");
  SpecScanner scanner(text, quote + 1);
  scanner.expect(" ");
  const DataType dtype = scanner.dtype();
  scanner.expect("[");
  std::vector<std::int64_t> shape = scanner.numbers_until("]");
  scanner.expect(" on ");
  MeshShape mesh = scanner.mesh();
  scanner.expect(": ");
  Placement placement = scanner.placement();
  if (!scanner.done()) scanner.fail("\", \" or the end");
  return {std::string(text.substr(1, quote - 1)), std::move(shape), dtype, std::move(mesh), std::move(placement)};
}

}  // namespace phalanx
