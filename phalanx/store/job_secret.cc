#include "phalanx/store/job_secret.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/unique_fd.h"
#include "phalanx/store/store_proof.h"

namespace phalanx {
namespace {

void check_secret(const std::string& secret, const std::string& what) {
  if (secret.size() < kMinSecretBytes || secret.size() > kMaxSecretBytes)
    throw ConfigError(
        fmt::format("{}: the job's secret has {} bytes: expected {} to {}; `openssl rand -hex 32` makes a good one",
                    what, secret.size(), kMinSecretBytes, kMaxSecretBytes));
  if (secret.find_first_of(std::string_view("\n\r\0", 3)) != std::string::npos)
    throw ConfigError(fmt::format("{}: the job's secret has a line break or a zero byte in it", what));
}

[[noreturn]] void fail_on(const std::string& path, const char* doing) {
  throw CommError(fmt::format("cannot {} {}: {}", doing, path, std::strerror(errno)));
}

}  // namespace

std::string generate_job_secret() {
  std::string digits;
  for (const char byte : random_bytes(32)) digits += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return digits;
}

std::optional<std::string> read_private_file(const std::string& path, const std::string& what, std::size_t max_bytes) {
  // O_NONBLOCK: a pipe must not block this process.
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) {
    if (errno == ENOENT) return std::nullopt;
    throw CommError(fmt::format("{}: cannot open {}: {}", what, path, std::strerror(errno)));
  }
  struct stat status {};
  if (fstat(fd.get(), &status) != 0) fail_on(path, "look at");
  if (!S_ISREG(status.st_mode)) throw ConfigError(fmt::format("{}: {} is not a regular file", what, path));
  if (status.st_uid != geteuid() && status.st_uid != 0)
    throw ConfigError(fmt::format("{}: {} belongs to user {}, this process to user {}: expected a file of one's own",
                                  what, path, status.st_uid, geteuid()));
  if ((status.st_mode & 077) != 0)
    throw ConfigError(fmt::format("{}: {} has mode {:04o}, so others than its owner may use it: run chmod 600 {}", what,
                                  path, status.st_mode & 07777, path));
  std::string contents;
  for (char chunk[4096];;) {
    const ssize_t got = read(fd.get(), chunk, sizeof chunk);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_on(path, "read");
    if (got == 0) return contents;
    contents.append(chunk, static_cast<std::size_t>(got));
    if (contents.size() > max_bytes)
      throw ConfigError(fmt::format("{}: {} has more than {} bytes", what, path, max_bytes));
  }
}

void write_private_file(const std::string& path, std::string_view contents) {
  const std::string scratch = fmt::format("{}.{}.new", path, generate_job_secret().substr(0, 12));
  UniqueFd fd(open(scratch.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) fail_on(scratch, "create");
  bool good = fchmod(fd.get(), 0600) == 0;  // whatever the umask
  while (good && !contents.empty()) {
    const ssize_t written = write(fd.get(), contents.data(), contents.size());
    if (written > 0)
      contents.remove_prefix(static_cast<std::size_t>(written));
    else
      good = written < 0 && errno == EINTR;
  }
  // On a network file system the bytes may be refused as late as here.
  good = good && fsync(fd.get()) == 0 && close(fd.release()) == 0 && rename(scratch.c_str(), path.c_str()) == 0;
  if (!good) {
    const int error = errno;
    unlink(scratch.c_str());
    errno = error;
    fail_on(path, "write");
  }
}

std::string read_secret_file(const std::string& path, const std::string& what) {
  auto contents = read_private_file(path, what, kMaxSecretBytes + 2);
  if (!contents) throw ConfigError(fmt::format("{}: there is no file {}", what, path));
  while (!contents->empty() && (contents->back() == '\n' || contents->back() == '\r')) contents->pop_back();
  check_secret(*contents, fmt::format("{}: {}", what, path));
  return *contents;
}

JobSecret job_secret_from_environment(
    const std::function<std::optional<std::string>(const std::string& name)>& lookup_or_none) {
  const auto lookup = lookup_or_none ? lookup_or_none : [](const std::string& name) { return env_string(name); };
  const std::string by_value = lookup("PHALANX_JOB_SECRET").value_or("");
  const std::string file = lookup("PHALANX_JOB_SECRET_FILE").value_or("");
  JobSecret result;
  if (!by_value.empty()) {
    check_secret(by_value, "PHALANX_JOB_SECRET");
    result = {by_value, "PHALANX_JOB_SECRET"};
  }
  if (!file.empty()) {
    const std::string from_file = read_secret_file(file, "PHALANX_JOB_SECRET_FILE");
    if (!by_value.empty() && from_file != by_value)
      throw ConfigError(
          fmt::format("PHALANX_JOB_SECRET and the file {} that PHALANX_JOB_SECRET_FILE names hold "
                      "different secrets: set one of them only",
                      file));
    result = {from_file, "the file " + file};
  }
  return result;
}

}  // namespace phalanx
