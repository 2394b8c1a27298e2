// The files of a run, run.json and metrics.jsonl behind a zero byte, and the page that is made of them.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/report/report.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

namespace {

std::size_t count(std::string_view text, std::string_view part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const TempDirectory scratch("fuzz");
  const std::string folder = scratch.path().string();
  const std::string_view text = fuzz::text_of(data, size);
  const std::size_t zero = std::min(text.find('\0'), text.size());
  write_file(folder + "/run.json", text.substr(0, zero));
  write_file(folder + "/metrics.jsonl", text.substr(std::min(zero + 1, text.size())));
  return fuzz::parse(
      [&] {
        const std::string page = report::render_report(folder);
        const std::string begin = "<script type=\"application/json\" id=\"data\">";
        const std::size_t at = page.find(begin) + begin.size();
        fuzz::require(count(page, "<script") == 3 && count(page, "</script") == 3, "no script but the page's own");
        fuzz::require(nlohmann::json::accept(page.substr(at, page.find('<', at) - at)), "the data are JSON");
      },
      folder);
}
