#include "phalanx/launch/supervisor/worker_logs.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr const char* kStreamFiles[2] = {"stdout.log", "stderr.log"};
constexpr const char* kFilterFiles[2] = {"filtered_stdout.log", "filtered_stderr.log"};

[[noreturn]] void refuse_to_log(const std::string& what, const std::filesystem::path& path) {
  const int code = errno;
  throw FileError(fmt::format("--log-dir: cannot make {} {}: {}", what, path.string(), std::strerror(code)), code);
}

UniqueFd open_log(const std::filesystem::path& path) {
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  if (!fd) refuse_to_log("the log file", path);
  return fd;
}

void make_folders(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error) return;
  errno = error.value();
  refuse_to_log("the folder", path);
}

std::optional<int> number_from(std::string_view text, int min, int max) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || number < min || number > max) return std::nullopt;
  return number;
}

void replace_macro(std::string& text, std::string_view macro, const std::string& value) {
  for (std::size_t at = text.find(macro); at != std::string::npos; at = text.find(macro, at + value.size()))
    text.replace(at, macro.size(), value);
}

}  // namespace

int StreamChoice::of(int local_rank) const {
  const auto found = by_local_rank.find(local_rank);
  return found != by_local_rank.end() ? found->second : all;
}

bool StreamChoice::is_empty() const {
  return all == 0 &&
         std::all_of(by_local_rank.begin(), by_local_rank.end(), [](const auto& entry) { return entry.second == 0; });
}

StreamChoice StreamChoice::parse(const std::string& flag, const std::string& text) {
  StreamChoice result;
  const auto refuse = [&] {
    throw UsageError(
        fmt::format("{} is '{}': expected 0 (none), 1 (standard output), 2 (standard error) or 3 (both), or a list of "
                    "local rank:value such as 0:1,1:3",
                    flag, text));
  };
  if (const auto all = number_from(text, 0, 3)) {
    result.all = *all;
    return result;
  }
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    const std::size_t colon = item.find(':');
    if (colon == std::string_view::npos) refuse();
    const auto local_rank = number_from(item.substr(0, colon), 0, 1 << 20);
    const auto value = number_from(item.substr(colon + 1), 0, 3);
    if (!local_rank || !value) refuse();
    if (!result.by_local_rank.emplace(*local_rank, *value).second) refuse();
  }
  if (result.by_local_rank.empty()) refuse();
  return result;
}

WorkerLogs::WorkerLogs(WorkerLogOptions options, const std::string& run_id) : options_(std::move(options)) {
  if (!options_.need_directory()) {
    traces_.emplace("", run_id);
    return;
  }
  std::filesystem::path base = options_.directory;
  if (base.empty()) {
    const char* temporary = std::getenv("TMPDIR");
    base = temporary != nullptr && *temporary != '\0' ? temporary : "/tmp";
  } else {
    make_folders(base);
  }
  std::string name = run_id;
  std::replace(name.begin(), name.end(), '/', '_');
  const std::string prefix = options_.directory.empty() ? "phalanx_logs_" : "";
  std::string path = (std::filesystem::absolute(base) / (prefix + name + "_XXXXXX")).string();
  if (mkdtemp(path.data()) == nullptr) refuse_to_log("a folder", path);
  run_directory_ = path;
  traces_.emplace(run_directory_, run_id);
}

void WorkerLogs::begin_attempt(int attempt) {
  traces_->begin_attempt(attempt);
  if (run_directory_.empty()) return;
  attempt_directory_ = run_directory_ / fmt::format("attempt_{}", attempt);
  make_folders(attempt_directory_);
  for (int stream = 0; stream < 2; ++stream)
    if (!options_.filters[stream].empty())
      filters_[stream] = std::make_shared<LineFilter>(
          LineFilter{options_.filters[stream], open_log(attempt_directory_ / kFilterFiles[stream])});
}

WorkerStream WorkerLogs::open(const Rank& rank, int stream) {
  WorkerStream result;
  const int bit = stream == 0 ? 1 : 2;
  const bool teed = (options_.tee.of(rank.local_rank) & bit) != 0;
  const bool redirected = !teed && (options_.redirects.of(rank.local_rank) & bit) != 0;
  const bool is_shown = options_.shown.empty() || options_.shown.contains(rank.local_rank);
  const auto console = [&] {
    if (!consoles_[stream])
      consoles_[stream] = std::make_unique<BackgroundWriter>(stream == 0 ? STDOUT_FILENO : STDERR_FILENO);
    return consoles_[stream].get();
  };
  if (!attempt_directory_.empty()) make_folders(attempt_directory_ / std::to_string(rank.local_rank));
  UniqueFd log;
  if (teed || redirected) {
    const auto path = attempt_directory_ / std::to_string(rank.local_rank) / kStreamFiles[stream];
    log = open_log(path);
    result.path = path.string();
  }
  if (redirected || (!teed && !is_shown)) {
    result.file = redirected ? std::move(log) : UniqueFd(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  } else if (teed) {
    std::string prefix = options_.prefix;
    replace_macro(prefix, "${role_name}", rank.role);
    replace_macro(prefix, "${local_rank}", std::to_string(rank.local_rank));
    replace_macro(prefix, "${rank}", std::to_string(rank.rank));
    result.relay = std::make_unique<OutputRelay>(prefix, is_shown ? console() : nullptr);
    result.relay->copy_to(std::move(log), filters_[stream]);
  } else if (rank.rank != 0) {
    result.relay = std::make_unique<OutputRelay>(fmt::format("[{}] ", rank.rank), console());
  }
  return result;
}

std::vector<const BackgroundWriter*> WorkerLogs::consoles() const {
  std::vector<const BackgroundWriter*> result;
  for (const auto& console : consoles_)
    if (console) result.push_back(console.get());
  return result;
}

std::string WorkerLogs::error_file(int local_rank) const {
  if (attempt_directory_.empty()) return "";
  return (attempt_directory_ / std::to_string(local_rank) / "error.json").string();
}

}  // namespace phalanx
