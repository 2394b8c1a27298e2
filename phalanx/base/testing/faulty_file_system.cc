#include "phalanx/base/testing/faulty_file_system.h"

#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

[[noreturn]] void kill_this_process() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

}  // namespace

class FaultyFile final : public WritableFile {
 public:
  FaultyFile(FaultyFileSystem& fs, std::unique_ptr<WritableFile> below, std::string name)
      : fs_(fs), below_(std::move(below)), name_(std::move(name)) {}

  using WritableFile::write;
  void write(std::span<const std::byte> bytes) override {
    const std::string operation = fmt::format("write {} ({} bytes)", name_, bytes.size());
    if (fs_.before(operation, /*needs_space=*/true, /*is_write=*/true) == FaultyFileSystem::Outcome::stops_half_way) {
      below_->write(bytes.first(bytes.size() / 2));
      if (fs_.plan_.kind == Fault::kill) kill_this_process();
      if (fs_.plan_.kind == Fault::crash) throw SimulatedCrash("crash during " + operation);
      throw FileError(fmt::format("cannot {}: {}", operation, std::strerror(ENOSPC)), ENOSPC);
    }
    below_->write(bytes);
  }
  void sync() override {
    fs_.before("sync " + name_, /*needs_space=*/true, /*is_write=*/false);
    below_->sync();
  }
  void close() override {
    fs_.before("close " + name_, /*needs_space=*/false, /*is_write=*/false);
    below_->close();
  }

 private:
  FaultyFileSystem& fs_;
  std::unique_ptr<WritableFile> below_;
  std::string name_;
};

FaultyFileSystem::Outcome FaultyFileSystem::before(const std::string& operation, bool needs_space, bool is_write) {
  const std::lock_guard lock(mutex_);
  const auto number = static_cast<std::int64_t>(journal_.size());
  journal_.push_back(operation);
  if (number < plan_.fail_at) return Outcome::works;
  switch (plan_.kind) {
    case Fault::error:
      if (number > plan_.fail_at) return Outcome::works;
      throw FileError(fmt::format("cannot {}: {}", operation, std::strerror(plan_.code)), plan_.code);
    case Fault::full:
      if (!needs_space) return Outcome::works;
      if (is_write) return Outcome::stops_half_way;
      throw FileError(fmt::format("cannot {}: {}", operation, std::strerror(ENOSPC)), ENOSPC);
    case Fault::crash:
      if (is_write && number == plan_.fail_at) return Outcome::stops_half_way;
      throw SimulatedCrash("crash at " + operation);
    case Fault::kill:
      if (is_write) return Outcome::stops_half_way;
      kill_this_process();
  }
  return Outcome::works;
}

std::unique_ptr<WritableFile> FaultyFileSystem::create(const std::filesystem::path& path) {
  before("create " + path.filename().string(), /*needs_space=*/true, /*is_write=*/false);
  return std::make_unique<FaultyFile>(*this, below_.create(path), path.filename().string());
}
std::unique_ptr<WritableFile> FaultyFileSystem::append(const std::filesystem::path& path) {
  before("append " + path.filename().string(), /*needs_space=*/true, /*is_write=*/false);
  return std::make_unique<FaultyFile>(*this, below_.append(path), path.filename().string());
}
void FaultyFileSystem::rename(const std::filesystem::path& from, const std::filesystem::path& to) {
  before(fmt::format("rename {} -> {}", from.filename().string(), to.filename().string()), false, false);
  below_.rename(from, to);
}
void FaultyFileSystem::make_directory(const std::filesystem::path& path) {
  before("make_directory " + path.filename().string(), /*needs_space=*/true, /*is_write=*/false);
  below_.make_directory(path);
}
void FaultyFileSystem::remove(const std::filesystem::path& path) {
  before("remove " + path.filename().string(), /*needs_space=*/false, /*is_write=*/false);
  below_.remove(path);
}
void FaultyFileSystem::remove_all(const std::filesystem::path& path) {
  before("remove_all " + path.filename().string(), /*needs_space=*/false, /*is_write=*/false);
  below_.remove_all(path);
}
void FaultyFileSystem::sync_directory(const std::filesystem::path& path) {
  before("sync_directory " + path.filename().string(), /*needs_space=*/false, /*is_write=*/false);
  below_.sync_directory(path);
}

std::int64_t FaultyFileSystem::operations() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(journal_.size());
}
std::vector<std::string> FaultyFileSystem::journal() const {
  const std::lock_guard lock(mutex_);
  return journal_;
}

}  // namespace phalanx
