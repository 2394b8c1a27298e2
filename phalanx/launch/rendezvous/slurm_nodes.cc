#include "phalanx/launch/rendezvous/slurm_nodes.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <optional>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr std::size_t kMostEntries = 65'536;

class SlurmList {
 public:
  SlurmList(std::string_view text, const std::string& variable) : text_(text), variable_(variable) {}

  [[noreturn]] void fail(std::size_t at, const std::string& expected) const {
    throw ConfigError(fmt::format("{} is '{}': expected {} at character {} ('{}')", variable_, text_, expected, at + 1,
                                  text_.substr(std::min(at, text_.size()), 12)));
  }

  // Calls visit(begin, end) for each part between commas that are not inside brackets.
  template <class Visit>
  void each_part(std::size_t begin, std::size_t end, Visit visit) const {
    for (std::size_t part = begin, at = begin, depth = 0;; ++at) {
      if (at == end || (text_[at] == ',' && depth == 0)) {
        if (at == part) fail(at, "a name or number");
        visit(part, at);
        if (at == end) return;
        part = at + 1;
      } else if (text_[at] == '[' || text_[at] == '(') {
        ++depth;
      } else if (text_[at] == ']' || text_[at] == ')') {
        if (depth-- == 0) fail(at, "no closing bracket");
      }
    }
  }

  std::uint64_t number(std::size_t begin, std::size_t end) const {
    std::uint64_t value = 0;
    const auto parsed = std::from_chars(text_.data() + begin, text_.data() + end, value);
    if (begin == end || parsed.ec != std::errc{} || parsed.ptr != text_.data() + end || value > 1'000'000'000)
      fail(begin, "a number");
    return value;
  }

  std::string_view text() const { return text_; }
  std::size_t find(char wanted, std::size_t begin, std::size_t end) const {
    const std::size_t at = text_.substr(0, end).find(wanted, begin);
    return at == std::string_view::npos ? end : at;
  }
  void check_size(std::size_t entries, std::size_t at) const {
    if (entries > kMostEntries) fail(at, fmt::format("at most {} entries", kMostEntries));
  }

 private:
  std::string_view text_;
  const std::string& variable_;
};

// The numbers of one bracket, "01-03,7", as text for names.
std::vector<std::string> numbers_of(const SlurmList& list, std::size_t begin, std::size_t end) {
  std::vector<std::string> result;
  if (begin == end) list.fail(begin, "a number");
  list.each_part(begin, end, [&](std::size_t part, std::size_t part_end) {
    const std::size_t dash = list.find('-', part, part_end);
    const std::uint64_t low = list.number(part, dash);
    const std::uint64_t high = dash == part_end ? low : list.number(dash + 1, part_end);
    if (high < low) list.fail(part, "a range that goes up");
    list.check_size(result.size() + static_cast<std::size_t>(high - low) + 1, part);
    for (std::uint64_t value = low; value <= high; ++value) result.push_back(fmt::format("{:0{}}", value, dash - part));
  });
  return result;
}

// The names of one part, such as "r[1-2]n[3-4]-ib": all combinations of the numbers of its brackets.
void add_names(const SlurmList& list, std::size_t begin, std::size_t end, std::vector<std::string>& names) {
  std::vector<std::string> made{""};
  while (begin < end) {
    const std::size_t open = list.find('[', begin, end);
    for (auto& name : made) name += list.text().substr(begin, open - begin);
    if (open == end) break;
    const std::size_t close = list.find(']', open, end);
    if (close == end) list.fail(open, "a bracket that is closed");
    const auto numbers = numbers_of(list, open + 1, close);
    list.check_size(made.size() * numbers.size(), open);
    std::vector<std::string> longer;
    for (const auto& name : made)
      for (const auto& number : numbers) longer.push_back(name + number);
    made = std::move(longer);
    begin = close + 1;
  }
  list.check_size(names.size() + made.size(), begin);
  names.insert(names.end(), made.begin(), made.end());
}

}  // namespace

std::vector<std::string> expand_slurm_nodes(std::string_view text, const std::string& variable) {
  const SlurmList list(text, variable);
  std::vector<std::string> names;
  list.each_part(0, text.size(), [&](std::size_t begin, std::size_t end) { add_names(list, begin, end, names); });
  return names;
}

std::string first_slurm_node(std::string_view text, const std::string& variable) {
  return expand_slurm_nodes(text, variable).front();
}

std::vector<int> expand_slurm_counts(std::string_view text, const std::string& variable) {
  const SlurmList list(text, variable);
  std::vector<int> counts;
  list.each_part(0, text.size(), [&](std::size_t begin, std::size_t end) {
    const std::size_t open = list.find('(', begin, end);
    const auto count = static_cast<int>(list.number(begin, open));
    std::uint64_t times = 1;
    if (open != end) {
      if (end - open < 4 || text[open + 1] != 'x' || text[end - 1] != ')') list.fail(open, "(xN)");
      times = list.number(open + 2, end - 1);
    }
    list.check_size(counts.size() + times, begin);
    counts.insert(counts.end(), times, count);
  });
  return counts;
}

}  // namespace phalanx
