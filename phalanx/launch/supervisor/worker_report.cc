#include "phalanx/launch/supervisor/worker_report.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/error_text.h"
#include "phalanx/base/remedy.h"

namespace phalanx {
namespace {

constexpr const char* kErrorFile = "/error.json";
constexpr const char* kGracefulFile = "/graceful_stop";
constexpr const char* kProcessFile = "/process";

// Readers see the whole file or none.
bool write_report_file(const std::string& path, const std::string& text) {
  const std::string temporary = path + "." + std::to_string(getpid());
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file << text;
    file.close();
    if (!file) {
      unlink(temporary.c_str());
      return false;
    }
  }
  if (std::rename(temporary.c_str(), path.c_str()) == 0) return true;
  unlink(temporary.c_str());
  return false;
}

std::optional<std::string> read_report_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The PID namespace. In another namespace the same process id means another process.
ino_t pid_namespace() {
  struct stat status {};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

double seconds_since_epoch() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

bool report_error_to_launcher(const std::exception& error) noexcept {
  try {
    const auto* ours = dynamic_cast<const Error*>(&error);
    const char* rank = std::getenv("RANK");
    // Write the most informative report first. After the failure of a peer this process may be killed at any moment.
    const char* directory = std::getenv("PHALANX_REPORT_DIR");
    bool is_told = false;
    if (directory != nullptr && *directory != '\0') {
      const nlohmann::json report{{"rank", rank != nullptr ? std::atoi(rank) : -1},
                                  {"kind", ours != nullptr ? ours->kind() : "std::exception"},
                                  {"message", with_remedy(error_text(error))},
                                  {"time_s", seconds_since_epoch()},
                                  {"exit_status", ours != nullptr ? ours->exit_status() : 1}};
      is_told = write_report_file(std::string(directory) + kErrorFile,
                                  report.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    }
    if (const char* file = std::getenv("TORCHELASTIC_ERROR_FILE"); file != nullptr && *file != '\0') {
      const nlohmann::json extra{{"timestamp", std::to_string(static_cast<std::int64_t>(seconds_since_epoch()))}};
      const nlohmann::json torch{{"message", {{"message", with_remedy(error_text(error))}, {"extraInfo", extra}}}};
      write_report_file(file, torch.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    }
    return is_told;
  } catch (...) {
    return false;
  }
}

void announce_graceful_stop(std::chrono::seconds limit) noexcept {
  try {
    const char* directory = std::getenv("PHALANX_REPORT_DIR");
    if (directory != nullptr && *directory != '\0')
      write_report_file(std::string(directory) + kGracefulFile, std::to_string(limit.count()));
  } catch (...) {  // out of memory: then the worker has the short limit
  }
}

void note_started_process(const std::string& directory, int rank, int pid) {
  write_report_file(directory + kProcessFile,
                    std::to_string(rank) + " " + std::to_string(pid) + " " + std::to_string(pid_namespace()));
}

std::map<int, int> read_started_processes() {
  std::map<int, int> found;
  const char* directory = std::getenv("PHALANX_REPORT_DIR");
  if (directory == nullptr || *directory == '\0') return found;
  std::error_code error;
  for (const auto& one : std::filesystem::directory_iterator(std::filesystem::path(directory).parent_path(), error)) {
    std::ifstream file(one.path().string() + kProcessFile);
    int rank = -1, pid = 0;
    ino_t name_space = 0;
    if (file >> rank >> pid >> name_space && name_space == pid_namespace()) found[rank] = pid;
  }
  return found;
}

std::optional<WorkerReport> read_worker_report(const std::string& directory) {
  const auto text = read_report_file(directory + kErrorFile);
  if (!text) return std::nullopt;
  try {
    const auto json = nlohmann::json::parse(*text);
    return WorkerReport{json.at("rank"), json.at("kind"), json.at("message"), json.at("time_s"),
                        json.at("exit_status")};
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

std::optional<WorkerReport> read_torch_error_file(const std::string& path) {
  const auto text = read_report_file(path);
  if (!text) return std::nullopt;
  try {
    // {"message": "text"} or {"message": {"message": "text", "extraInfo": {...}}}
    auto message = nlohmann::json::parse(*text).at("message");
    if (message.is_object()) message = message.at("message");
    struct stat status {};
    double time_s = 0;
    if (stat(path.c_str(), &status) == 0)
      time_s = static_cast<double>(status.st_mtim.tv_sec) + static_cast<double>(status.st_mtim.tv_nsec) * 1e-9;
    return WorkerReport{.rank = -1, .kind = "error", .message = message.get<std::string>(), .time_s = time_s};
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

std::optional<std::chrono::seconds> read_graceful_stop(const std::string& directory) {
  const auto text = read_report_file(directory + kGracefulFile);
  if (!text) return std::nullopt;
  return std::chrono::seconds(std::atoll(text->c_str()));
}

}  // namespace phalanx
