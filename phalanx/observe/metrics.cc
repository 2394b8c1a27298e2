#include "phalanx/observe/metrics.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

#include "phalanx/base/error.h"

namespace phalanx::observe {
namespace {

/// The lines of the steps up to `last_step`. A line that is not JSON was torn by a crash and is dropped.
std::string lines_up_to(const std::string& contents, std::int64_t last_step) {
  std::string kept;
  std::size_t begin = 0;
  for (std::size_t end = contents.find('\n'); end != std::string::npos; end = contents.find('\n', begin)) {
    const std::string line = contents.substr(begin, end + 1 - begin);
    begin = end + 1;
    const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool has_step = json.is_object() && json.contains("step") && json["step"].is_number_integer();
    if (has_step && json["step"].get<std::int64_t>() <= last_step) kept += line;
  }
  return kept;
}

}  // namespace

MetricsWriter::MetricsWriter(const std::filesystem::path& path, MetricsOptions options) : path_(path) {
  FileSystem& fs = options.file_system != nullptr ? *options.file_system : posix_file_system();
  if (path.has_parent_path()) fs.make_directory(path.parent_path());
  if (options.resumed_step && std::filesystem::exists(path)) {
    const std::string contents = read_file(path);
    const std::string kept = lines_up_to(contents, *options.resumed_step);
    if (kept != contents) replace_file(path, kept, fs);
    file_ = fs.append(path);
  } else {
    file_ = fs.create(path);
  }
}

MetricsWriter::~MetricsWriter() = default;

void MetricsWriter::write(const nlohmann::ordered_json& line) {
  if (!line.is_object() || !line.contains("step") || !line["step"].is_number_integer()) {
    throw Error(fmt::format("{}: a line needs an integer \"step\": {}", path_.string(), line.dump()));
  }
  const std::string text = line.dump() + "\n";
  const std::lock_guard lock(mutex_);
  file_->write(text);  // one write per line, so concurrent readers see whole lines
}

}  // namespace phalanx::observe
