#include "phalanx/base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

using ::testing::Property;
using ::testing::Throws;

TEST(File, RoundTripIncludingEmptyAndBinary) {
  const TempDirectory scratch;
  const std::filesystem::path path = scratch.path() / "f";
  const std::string binary("a\0b\n\xff", 5);
  for (const std::string& contents : {std::string(), binary, std::string(300'000, 'x')}) {
    write_file(path, contents);
    EXPECT_EQ(read_file(path), contents);
    replace_file(path, contents + "2");
    EXPECT_EQ(read_file(path), contents + "2");
  }
  posix_file_system().append(path)->write("tail");
  EXPECT_THAT(read_file(path), EndsWith("x2tail"));
  EXPECT_FALSE(std::filesystem::exists(scratch.path() / "f.tmp"));
}

TEST(File, APipeOrADeviceIsWrittenToAndNotReplaced) {
  const TempDirectory scratch;
  const std::filesystem::path pipe = scratch.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  replace_file(pipe, "figures");
  char text[16] = {};
  EXPECT_EQ(::read(reader, text, sizeof text), 7);
  EXPECT_STREQ(text, "figures");
  ::close(reader);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
}

TEST(File, ProcFilesThatClaimNoSizeAreReadWhole) { EXPECT_THAT(read_file("/proc/self/status"), HasSubstr("Pid:")); }

TEST(File, ErrorsNameThePathAndTheReason) {
  const TempDirectory scratch;
  const std::string missing = (scratch.path() / "no/such").string();
  EXPECT_THAT([&] { read_file(missing); },
              ThrowsMessage<FileError>(AllOf(HasSubstr(missing), HasSubstr("No such file"))));
  EXPECT_THAT([&] { write_file(missing, "x"); }, Throws<FileError>(Property(&FileError::code, ENOENT)));
  EXPECT_THAT([&] { read_file(scratch.path()); }, Throws<FileError>(Property(&FileError::code, EISDIR)));
  FileSystem& fs = posix_file_system();
  EXPECT_THAT([&] { fs.rename(missing, missing + "2"); },
              ThrowsMessage<FileError>(AllOf(HasSubstr(missing), HasSubstr(missing + "2"))));
  EXPECT_THROW(fs.remove(missing), FileError);
  EXPECT_NO_THROW(fs.remove_all(missing));
  EXPECT_THROW(fs.sync_directory(missing), FileError);
  write_file(scratch.path() / "plain", "x");
  EXPECT_THAT([&] { fs.make_directory(scratch.path() / "plain"); },
              Throws<FileError>(Property(&FileError::code, ENOTDIR)));
}

TEST(File, SizeLimitIsCheckedBeforeReading) {
  const TempDirectory scratch;
  const std::filesystem::path path = scratch.path() / "huge";
  write_file(path, "");
  std::filesystem::resize_file(path, std::uintmax_t{1} << 40);  // a hole: takes no space, would take 1 TiB of memory
  EXPECT_THAT([&] { read_file(path, 1000); },
              ThrowsMessage<FileError>(AllOf(HasSubstr("1099511627776 bytes"), HasSubstr("at most 1000"))));
  EXPECT_THROW(read_file("/dev/zero", 1000), FileError);
}

TEST(File, FullDiskIsReported) {
  EXPECT_THAT([] { write_file("/dev/full", "x"); },
              Throws<FileError>(AllOf(Property(&FileError::code, ENOSPC),
                                      Property(&FileError::what, HasSubstr("/dev/full: No space left")))));
}

// The kernel cuts the first write over the limit short, and the next one fails. Both must be detected.
TEST(File, ShortWriteIsContinuedAndThenReported) {
  const TempDirectory scratch;
  constexpr rlim_t kLimit = 4096;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* const old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{kLimit, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  int code = 0;
  try {
    write_file(scratch.path() / "f", std::string(kLimit + 1000, 'x'));
  } catch (const FileError& error) {
    code = error.code();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(code, EFBIG);
  EXPECT_EQ(std::filesystem::file_size(scratch.path() / "f"), kLimit);
}

TEST(File, ReplaceLeavesOldOrNewWhateverFails) {
  const TempDirectory scratch;
  const std::filesystem::path path = scratch.path() / "f";
  FaultyFileSystem counting(posix_file_system());
  replace_file(path, "new", counting);
  ASSERT_THAT(counting.journal(),
              ElementsAre("create f.tmp", "write f.tmp (3 bytes)", "sync f.tmp", "close f.tmp", "rename f.tmp -> f",
                          "sync_directory " + scratch.path().filename().string()));
  for (const Fault kind : {Fault::error, Fault::full, Fault::crash}) {
    for (std::int64_t at = 0; at < counting.operations(); ++at) {
      write_file(path, "old");
      FaultyFileSystem fs(posix_file_system(), {.fail_at = at, .kind = kind});
      try {
        replace_file(path, "new", fs);
      } catch (const FileError&) {
        EXPECT_NE(kind, Fault::crash);
        EXPECT_FALSE(std::filesystem::exists(scratch.path() / "f.tmp")) << at;
      } catch (const SimulatedCrash&) {
        EXPECT_EQ(kind, Fault::crash);
      }
      const bool renamed = at > 4 || (kind == Fault::full && at > 2);  // a full disk still closes and renames
      EXPECT_EQ(read_file(path), renamed ? "new" : "old") << "failing at " << at;
    }
  }
}

TEST(FaultyFileSystem, AFullDiskStaysFullAndTearsTheWrite) {
  const TempDirectory scratch;
  FaultyFileSystem fs(posix_file_system(), {.fail_at = 1, .kind = Fault::full});
  const std::unique_ptr<WritableFile> file = fs.create(scratch.path() / "f");
  EXPECT_THAT([&] { file->write("12345678"); }, Throws<FileError>(Property(&FileError::code, ENOSPC)));
  EXPECT_EQ(read_file(scratch.path() / "f"), "1234");
  EXPECT_THROW(fs.create(scratch.path() / "g"), FileError);
  EXPECT_NO_THROW(file->close());
  EXPECT_NO_THROW(fs.remove(scratch.path() / "f"));
}

TEST(FaultyFileSystem, NothingHappensAfterACrash) {
  const TempDirectory scratch;
  FaultyFileSystem fs(posix_file_system(), {.fail_at = 0, .kind = Fault::crash});
  EXPECT_THROW(fs.make_directory(scratch.path() / "d"), SimulatedCrash);
  EXPECT_THROW(fs.create(scratch.path() / "f"), SimulatedCrash);
  EXPECT_THROW(fs.remove_all(scratch.path()), SimulatedCrash);
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
}

}  // namespace
}  // namespace phalanx
