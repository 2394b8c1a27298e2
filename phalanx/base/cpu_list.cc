#include "phalanx/base/cpu_list.h"

#include <algorithm>
#include <charconv>
#include <set>

namespace phalanx {

std::optional<std::vector<int>> cpus_in_list(std::string_view text) {
  constexpr int kMaxCpus = 1 << 20;  // more than the kernel supports; a larger number is a mistake
  const std::size_t end_of_list = text.find_last_not_of(" \t\r\n");
  std::string_view rest = text.substr(0, end_of_list == std::string_view::npos ? 0 : end_of_list + 1);
  std::set<int> cpus;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    int first = -1;
    const char* const end = item.data() + item.size();
    auto parsed = std::from_chars(item.data(), end, first);
    int last = first;
    if (parsed.ec == std::errc{} && parsed.ptr != end && *parsed.ptr == '-')
      parsed = std::from_chars(parsed.ptr + 1, end, last);
    if (parsed.ec != std::errc{} || parsed.ptr != end || first < 0 || last < first || last > kMaxCpus) return {};
    for (int cpu = first; cpu <= last; ++cpu) cpus.insert(cpu);
  }
  return std::vector<int>(cpus.begin(), cpus.end());
}

std::string cpu_list_text(const std::vector<int>& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t end = i;
    while (end + 1 < cpus.size() && cpus[end + 1] == cpus[end] + 1) ++end;
    if (!text.empty()) text += ',';
    text += std::to_string(cpus[i]);
    if (end > i) text += '-' + std::to_string(cpus[end]);
    i = end + 1;
  }
  return text;
}

}  // namespace phalanx
