#include "phalanx/launch/rendezvous/rendezvous_file.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/store/job_secret.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::string_view kTicketTitle = "phalanx rendezvous 1\n";

// The rest of the next line, which must begin with `name`.
std::optional<std::string> take_line(std::string_view& text, std::string_view name) {
  const std::size_t end = text.find('\n');
  if (!text.starts_with(name) || end == std::string_view::npos) return std::nullopt;
  std::string value(text.substr(name.size(), end - name.size()));
  text.remove_prefix(end + 1);
  return value;
}

}  // namespace

void RendezvousFile::publish(const StoreTicket& ticket) const {
  write_private_file(path_,
                     fmt::format("{}address {}\nsecret {}\n", kTicketTitle, ticket.address.text(), ticket.secret));
}

std::optional<StoreTicket> RendezvousFile::read() const {
  std::error_code ignored;
  const auto folder = std::filesystem::path(path_).parent_path();
  for (std::filesystem::directory_iterator entry(folder.empty() ? "." : folder, ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
  }
  const auto contents = read_private_file(path_, "the rendezvous file", 16'384);
  if (!contents) return std::nullopt;
  std::string_view rest = *contents;
  const bool titled = rest.starts_with(kTicketTitle);
  if (titled) rest.remove_prefix(kTicketTitle.size());
  const auto address = take_line(rest, "address ");
  const auto secret = take_line(rest, "secret ");
  if (!titled || !address || !secret || !rest.empty())
    throw ConfigError(
        fmt::format("the rendezvous file {} was not written by a Phalanx rank: choose another path, or "
                    "delete it",
                    path_));
  return StoreTicket{parse_host_port(*address, fmt::format("the address in the rendezvous file {}", path_)), *secret};
}

std::shared_ptr<TcpStore> RendezvousFile::connect(milliseconds timeout, const std::string& own_secret) const {
  const auto deadline = Clock::now() + timeout;
  auto pause = milliseconds(2);
  std::string last_error;
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    if (const auto ticket = read()) {
      if (ticket->secret.empty() && own_secret.empty())
        throw ConfigError(
            fmt::format("the rank that hosts the store took the job's secret from its environment, and this one has "
                        "none: set PHALANX_JOB_SECRET or PHALANX_JOB_SECRET_FILE for every rank (rendezvous file {})",
                        path_));
      try {
        // The file may be from a job that has ended. So first check for a short time whether the address accepts
        // connections.
        connect_to(ticket->address, std::clamp(left, milliseconds(1), milliseconds(1'000)), "the store");
        return std::make_shared<TcpStore>(
            ticket->address, TcpStoreOptions{.timeout = timeout,
                                             .connect_timeout = std::clamp(left, milliseconds(1), milliseconds(10'000)),
                                             .secret = ticket->secret.empty() ? own_secret : ticket->secret});
      } catch (const Error& error) {
        last_error = error.what();
      }
    }
    if (Clock::now() + pause >= deadline) break;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, milliseconds(100));
  }
  if (last_error.empty())
    throw CommError(
        fmt::format("rank 0 has not come within {} s: it is to write its address into {}, and has not. If it runs on "
                    "another node, that folder must be one that all share: set PHALANX_RENDEZVOUS_DIR to such a one",
                    static_cast<double>(timeout.count()) / 1000.0, path_));
  throw CommError(fmt::format("rank 0 was not reached within {} s at the address in {}: {}",
                              static_cast<double>(timeout.count()) / 1000.0, path_, last_error));
}

void RendezvousFile::remove() const noexcept { unlink(path_.c_str()); }

std::string private_temp_folder() {
  std::string path = fmt::format("{}/phalanx-{}", env_string("TMPDIR").value_or("/tmp"), geteuid());
  struct stat status {};
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    throw CommError(fmt::format("cannot make the folder {}: {}", path, std::strerror(errno)));
  if (lstat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != geteuid() ||
      (status.st_mode & 077) != 0)
    throw ConfigError(
        fmt::format("{} is to be a folder of mode 0700 that belongs to user {}, and is not: delete it, or "
                    "set TMPDIR",
                    path, geteuid()));
  return path;
}

}  // namespace phalanx
